"""A real server under load from the real client while everything goes wrong, for minutes.

    python benchmarks/soak.py [--minutes 10] [--seed 0] [--quick]

Two replicas, processes on the CPU, serve a repository with two versions of a model. Callers send
rows that nobody else sends and compare every score with the model run alone, while replicas are
killed, stopped and starved of memory, the model is reloaded, callers cancel and vanish, and
messages are malformed; then the queue is flooded with ten times what can be scored. Prints
progress, checks what the server promises, and writes benchmarks/results/soak.json. Status 1 when a
promise does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpu import ROOT, machine
from qrnn_serve import SequenceModel, save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from served import Served, serving
from soak_harm import Harm
from soak_traffic import MODEL, FloodReport, Traffic, alone, deal, flood, message_of

RESULTS = ROOT / "benchmarks/results/soak.json"
CALLERS = 4
REPLICAS = 2
PATIENCE_S = 0.5
FLOOD_LENGTH = 2000
WIDTH = 256
# Codes that a caller may see of a call that was right, here: a replica was lost with it twice,
# the queue was full, or its own time was up.
CLEAR_CODES = {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"}
OPTIONS = (
    "--device",
    ",".join(["cpu"] * REPLICAS),
    "--replica-processes",
    "always",
    "--model-control",
    "rpc",
    "--hang-timeout-s",
    5,
    "--restart-wait-s",
    0.1,
)


def repository(folder: Path, seed: int) -> dict[str, SequenceModel]:
    """Two versions of a model, of other weights, as files."""
    models: dict[str, SequenceModel] = {}
    for version in ("1", "2"):
        torch.manual_seed(seed * 2 + int(version))
        layers = (LayerConfig(hidden_size=WIDTH, window=2), LayerConfig(hidden_size=WIDTH))
        config = SequenceModelConfig(
            qrnn=QRNNConfig(input_size=3, layers=layers), pooling="last", head_size=8
        )
        models[version] = SequenceModel(config).eval()
        (folder / MODEL / version).mkdir(parents=True)
        save(models[version], folder / MODEL / version / "model.pt")
    return models


class Memory:
    """The server's own memory after so many calls, of all callers together."""

    def __init__(self, served: Served, early: int, late: int) -> None:
        self.marks = {early: 0, late: 0}
        self._served = served

    def note(self, calls: int) -> None:
        """Look at it once each mark is passed."""
        for mark, nbytes in self.marks.items():
            if calls >= mark and not nbytes:
                self.marks[mark] = self._served.process.memory_info().rss

    @property
    def done(self) -> bool:
        """Whether both marks were passed."""
        return all(self.marks.values())

    @property
    def growth(self) -> float:
        """Memory at the later mark over that at the earlier."""
        early, late = self.marks.values()
        return late / early


def soak(served: Served, traffic: Traffic, harm: Harm, memory: Memory, seconds: float) -> None:
    """Harm the server until the time is up and both marks of memory are passed."""
    stop_s, shown_s = time.monotonic() + seconds, 0.0
    with traffic:
        while time.monotonic() < stop_s or not memory.done or not harm.rounds:
            harm.do_one()
            traffic.check()
            if time.monotonic() > shown_s:
                shown_s, tally = time.monotonic() + 10, traffic.tally
                print(
                    f"{max(stop_s - time.monotonic(), 0):5.0f} s left: {tally.calls} calls, "
                    f"{tally.right} rows right, {len(tally.wrong)} wrong, "
                    f"errors {dict(tally.row_errors)} {dict(tally.call_errors)}, "
                    f"harm {harm.done.total()}, {served.process.memory_info().rss >> 20} MiB",
                    flush=True,
                )
        harm.wait_for_replicas()


def promises(
    served: Served, traffic: Traffic, harm: Harm, memory: Memory, report: FloodReport
) -> dict[str, bool]:
    """What must hold, and whether it does."""
    tally = traffic.tally
    codes = set(tally.row_errors) | set(tally.call_errors)
    early, late = memory.marks
    return {
        "every row got exactly one right answer or one error": not tally.wrong and tally.right > 0,
        f"no other codes than {sorted(CLEAR_CODES)}": codes <= CLEAR_CODES,
        "fewer than 1 row in 1,000 failed": tally.row_errors.total() < tally.right / 1000,
        "every kind of harm was done": harm.rounds > 0,
        f"memory after {late} calls within 10 % of after {early}": memory.growth <= 1.1,
        "right scores under the flood": report.wrong == 0 and report.scored > 0,
        "99 % of what the flood got accepted ended in twice its deadline": (
            report.p99_s <= 2 * PATIENCE_S
        ),
        "the log has no unexpected error": "unexpected error" not in served.log,
        "the server ends with status 0 when it is told to": stopped(served) == 0,
    }


def stopped(served: Served) -> int | None:
    """The exit status after SIGTERM."""
    served.process.terminate()
    return served.process.wait(60)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Soak, flood, check."""
    seconds = 60 * options.minutes
    models = repository(folder / "models", options.seed)
    hands = deal(models, CALLERS, options.seed)
    row = np.random.default_rng(options.seed).standard_normal((FLOOD_LENGTH, 3))
    row = row.astype(np.float32)
    scores = {version: alone(model, row) for version, model in models.items()}
    early, late = (100, 1000) if options.quick else (1000, 10_000)
    with serving(folder / "models", folder / "log", *OPTIONS) as served:
        memory = Memory(served, early, late)
        traffic = Traffic(served.target, hands, options.seed, memory.note)
        harm = Harm(served, message_of(hands[0].rows[:40]), REPLICAS, options.seed)
        started_s = time.monotonic()
        soak(served, traffic, harm, memory, seconds)
        soaked_s = time.monotonic() - started_s
        counts = served.metrics()
        print("the flood", flush=True)
        flooding = flood(served.target, row, scores, PATIENCE_S, 5 if options.quick else 20)
        report = asyncio.run(flooding)
        harm.close()
        held = promises(served, traffic, harm, memory, report)
    return {
        "machine": machine() | {"note": options.note},
        "seconds": soaked_s,
        "seed": options.seed,
        "promises": held,
        "traffic": traffic.tally.as_json(),
        "harm": dict(harm.done),
        "malformed messages": dict(harm.malformed),
        "seconds until all replicas served again": {
            "median": float(np.median(harm.recovery_s)),
            "most": max(harm.recovery_s),
        },
        "restarts": counts["qrnn_replica_restarts_total"],
        "server's bytes after calls": {str(k): v for k, v in memory.marks.items()},
        "memory late / early": memory.growth,
        "flood, deadline 0.5 s": dataclasses.asdict(report),
        "wrong": traffic.tally.wrong[:20],
    }


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of load; more until 10,000 calls"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="1,000 calls do; writes no results")
    parser.add_argument("--note", default="", help="kept in the results: what else ran meanwhile")
    options = parser.parse_args()
    if options.quick:
        options.minutes = min(options.minutes, 0.5)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60 * options.minutes * 4 + 900, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder), options)
    text = json.dumps(figures, indent=1)
    print(text)
    if not options.quick:
        RESULTS.write_text(text + "\n")
        print(f"written to {RESULTS.relative_to(ROOT)}")
    broken = [promise for promise, holds in figures["promises"].items() if not holds]
    print(f"broken: {broken}" if broken else "every promise holds")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
