"""The queue and its batches, in one process: latency, throughput, mixed lengths and a flood.

    python benchmarks/scheduler.py [--seconds 5] [--width 256]

The model is two layers on the CPU with one thread. "In order" is the same pool without a cost
model: requests in order of arrival, in batches of 8192 timesteps. Both sides of a ratio take turns
within one run. Prints tables and writes them to benchmarks/results/scheduler.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cpu import ROOT, Row, machine, print_table
from qrnn_serve import SequenceModel, save
from qrnn_serve.core.errors import DeadlineExceededError, OverloadedError
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.cost_model import CostModel, CostTerms, Launch
from qrnn_serve.engine.pool import PoolConfig, ReplicaPool
from qrnn_serve.engine.types import PackedRows, Scorer
from qrnn_serve.engine.warm_up import example_rows, warm_up
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.scorers import load_scorer

RESULTS = ROOT / "benchmarks/results/scheduler.json"
CALLERS = 64
BIG_ROWS, BIG_LENGTH = 128, 128
FLOOD_LENGTH = 512
PATIENCE_S = 0.5
OVERLOAD = 10
SIDES = ("ours", "in order")


class NoCost(CostModel):
    """Every batch is free: due times are arrival times, and only the fixed limits hold."""

    def __init__(self) -> None:
        super().__init__(CostTerms(fixed=0.0, per_timestep=0.0, per_longest=0.0, per_row=0.0))

    def record(self, launch: Launch) -> None:
        """Learn nothing."""


@dataclass
class Tally:
    """What became of many calls.

    Attributes:
        scored_s: Latencies of those that got scores.
        refused_s: Of those that were refused when they came.
        expired: How many were told later that they are too late.
    """

    scored_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    expired: int = 0

    async def call(self, pool: ReplicaPool, rows: PackedRows, patience_s: float | None) -> None:
        """One call of one caller."""
        started_s = time.monotonic()
        deadline_s = None if patience_s is None else started_s + patience_s
        try:
            await pool.submit(rows, deadline_s=deadline_s)
        except OverloadedError:
            self.refused_s.append(time.monotonic() - started_s)
        except DeadlineExceededError:
            self.expired += 1
        else:
            self.scored_s.append(time.monotonic() - started_s)


@asynccontextmanager
async def running(scorer: Scorer, side: str) -> AsyncIterator[ReplicaPool]:
    """A pool with one replica. The scorer outlives it."""
    pool = ReplicaPool([lambda: Lasting(scorer)], PoolConfig())
    await pool.start()
    if side == "in order":
        for puller in pool._queue._pullers:
            puller.cost = NoCost()
    try:
        yield pool
    finally:
        await pool.stop(timeout_s=60)


class Lasting:
    """A scorer that stays open when its pool stops."""

    def __init__(self, scorer: Scorer) -> None:
        self.schema, self.device, self.engine = scorer.schema, scorer.device, scorer.engine
        self.max_timesteps, self.score = scorer.max_timesteps, scorer.score
        self.alive, self.interrupt, self.stages = True, scorer.interrupt, scorer.stages

    def close(self) -> None:
        """Nothing to close."""


async def latency_rows(scorer: Scorer, seconds: float) -> list[Row]:
    """A lone caller through the pool, over the engine called directly."""
    table: list[Row] = []
    async with running(scorer, "ours") as pool:
        for length in (8, 32, 128):
            rows = example_rows(scorer.schema, [length], with_state=False)
            # Seconds that pass, and seconds of processor that do not depend on other programs.
            direct_s, pool_s = list[list[float]](), list[list[float]]()
            stop_s = time.monotonic() + seconds
            while time.monotonic() < stop_s:
                before = clocks()
                scorer.score(rows)
                between = clocks()
                await pool.submit(rows)
                after = clocks()
                direct_s.append([b - a for a, b in zip(before, between, strict=True)])
                pool_s.append([b - a for a, b in zip(between, after, strict=True)])
            direct, through = np.median(direct_s, axis=0), np.median(pool_s, axis=0)
            table.append(
                {
                    "T": length,
                    "calls": len(pool_s),
                    "engine ms": 1e3 * float(direct[0]),
                    "pool ms": 1e3 * float(through[0]),
                    "pool / engine": float(through[0] / direct[0]),
                    "engine CPU ms": 1e3 * float(direct[1]),
                    "CPU pool / engine": float(through[1] / direct[1]),
                }
            )
    return table


def clocks() -> tuple[float, float]:
    """Wall and processor seconds of the process."""
    return time.perf_counter(), time.process_time()


async def throughput_rows(scorer: Scorer, seconds: float) -> list[Row]:
    """Callers that each send one row after the other."""
    table: list[Row] = []
    for name, longest in (("T 8", 0), ("T 1 to 256", 256)):
        random = np.random.default_rng(0)
        lengths = random.integers(1, longest + 1, 1000) if longest else np.full(1000, 8)
        rows = [example_rows(scorer.schema, [n], with_state=False) for n in lengths]
        started_s = time.monotonic()
        for one in rows:
            scorer.score(one)
        one_by_one = len(rows) / (time.monotonic() - started_s)
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        latencies: dict[str, list[float]] = {side: [] for side in SIDES}
        for side in SIDES * 3:
            async with running(scorer, side) as pool:
                tally, stop_s = Tally(), time.monotonic() + seconds / 3
                await asyncio.gather(
                    *(callers(pool, rows[n::CALLERS], tally, stop_s) for n in range(CALLERS))
                )
                rates[side].append(3 * len(tally.scored_s) / seconds)
                latencies[side] += tally.scored_s
        row: Row = {"rows": name, "one by one rows/s": one_by_one}
        for side in SIDES:
            row[f"{side} rows/s"] = float(np.median(rates[side]))
            row[f"{side} p99 ms"] = 1e3 * float(np.quantile(latencies[side], 0.99))
        table.append(row)
    return table


async def callers(pool: ReplicaPool, rows: list[PackedRows], tally: Tally, stop_s: float) -> None:
    """One caller: the next call after the answer to the last."""
    while time.monotonic() < stop_s:
        for row in rows:
            await tally.call(pool, row, None)
            if time.monotonic() >= stop_s:
                return


async def mixed_rows(scorer: Scorer, seconds: float) -> list[Row]:
    """Short calls while one caller sends large requests, one after the other."""
    table: list[Row] = []
    big = example_rows(scorer.schema, [BIG_LENGTH] * BIG_ROWS, with_state=False)
    short = example_rows(scorer.schema, [8], with_state=False)
    for side in SIDES:
        async with running(scorer, side) as pool:
            bigs, shorts, stop_s = Tally(), Tally(), time.monotonic() + seconds
            task = asyncio.create_task(callers(pool, [big], bigs, stop_s))
            while time.monotonic() < stop_s:
                await shorts.call(pool, short, None)
                await asyncio.sleep(0.005)
            await task
        table.append(
            {
                "side": side,
                "short p50 ms": 1e3 * float(np.median(shorts.scored_s)),
                "short p99 ms": 1e3 * float(np.quantile(shorts.scored_s, 0.99)),
                "large p50 ms": 1e3 * float(np.median(bigs.scored_s)),
            }
        )
    return table


async def flood_rows(scorer: Scorer, seconds: float) -> list[Row]:
    """Ten times the calls that can be scored, each with a deadline, at random moments."""
    rows = example_rows(scorer.schema, [FLOOD_LENGTH], with_state=False)
    table: list[Row] = []
    for side in SIDES:
        async with running(scorer, side) as pool:
            capacity = await rate(pool, rows, seconds / 2)
            random, tally, tasks = np.random.default_rng(0), Tally(), set[asyncio.Task[None]]()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            now_s = next_s = started_s = time.monotonic()
            while now_s < started_s + seconds:
                while next_s <= now_s:
                    next_s += random.exponential(1 / (OVERLOAD * capacity))
                    task = asyncio.create_task(tally.call(pool, rows, PATIENCE_S))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
                now_s = time.monotonic()
            await asyncio.gather(*tasks)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        calls = len(tally.scored_s) + len(tally.refused_s) + tally.expired
        table.append(
            {
                "side": side,
                "capacity /s": capacity,
                "offered /s": calls / seconds,
                "scored /s": len(tally.scored_s) / seconds,
                "in time /s": sum(s <= PATIENCE_S for s in tally.scored_s) / seconds,
                "scored p99 / deadline": float(np.quantile(tally.scored_s, 0.99)) / PATIENCE_S,
                "refused": len(tally.refused_s) / calls,
                "refused p99 ms": 1e3 * float(np.quantile(tally.refused_s or [0.0], 0.99)),
                "expired": tally.expired / calls,
                "memory grew MB": grown / 1024,
            }
        )
    return table


async def rate(pool: ReplicaPool, rows: PackedRows, seconds: float) -> float:
    """Calls a second with many callers and no deadline."""
    tally, stop_s = Tally(), time.monotonic() + seconds
    await asyncio.gather(*(callers(pool, [rows], tally, stop_s) for _ in range(CALLERS)))
    return len(tally.scored_s) / seconds


def cost_rows(scorer: Scorer) -> list[Row]:
    """What the cost model predicts for batches that it was not fitted to."""
    report = warm_up(scorer, BatchLimits())
    model, random, table = CostModel.fit(report.launches), np.random.default_rng(2), list[Row]()
    for count, longest in ((1, 200), (7, 30), (30, 20), (50, 50), (300, 3)):
        lengths = random.integers(1, longest + 1, count)
        rows = example_rows(scorer.schema, lengths, with_state=False)
        times_s: list[float] = []
        for _ in range(15):
            started_s = time.perf_counter()
            scorer.score(rows)
            times_s.append(time.perf_counter() - started_s)
        took = float(np.median(times_s))
        expected = model.seconds(int(lengths.sum()), int(lengths.max()), count)
        table.append(
            {
                "rows": count,
                "timesteps": int(lengths.sum()),
                "took ms": 1e3 * took,
                "predicted / took": expected / took,
            }
        )
    return table


async def measure(scorer: Scorer, seconds: float) -> dict[str, list[Row]]:
    """Every table."""
    return {
        "a lone caller": await latency_rows(scorer, seconds),
        f"{CALLERS} callers of one row": await throughput_rows(scorer, seconds),
        f"short calls beside {BIG_ROWS} rows of {BIG_LENGTH}": await mixed_rows(scorer, seconds),
        f"{OVERLOAD} x overload, deadline {PATIENCE_S} s": await flood_rows(scorer, seconds),
        "cost model": cost_rows(scorer),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each side of a line")
    parser.add_argument("--width", type=int, default=256, help="of the two layers")
    parser.add_argument("--note", default="", help="kept in the results: what else ran meanwhile")
    options = parser.parse_args()
    keep_freed_memory()  # as the server does
    layer = LayerConfig(hidden_size=options.width)
    stack = QRNNConfig(input_size=options.width, layers=(layer, layer))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        save(SequenceModel(SequenceModelConfig(qrnn=stack, pooling="last")).eval(), path)
        scorer = load_scorer(path, threads=1)
    tables = asyncio.run(measure(scorer, options.seconds))
    for title, rows in tables.items():
        print_table(title, rows)
    facts = machine() | {"note": options.note, "width": str(options.width)}
    RESULTS.write_text(json.dumps({"machine": facts, **tables}, indent=1) + "\n")
    print(f"\n{facts}\nwritten to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
