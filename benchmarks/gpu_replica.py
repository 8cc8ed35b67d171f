"""A model on a GPU: CUDA graphs against eager calls, a process against a thread, and a server.

    python benchmarks/gpu_replica.py [--device cuda:0] [--seconds 3]

In this process and through shared memory in a replica's process, small batches with and without
CUDA graphs take turns of 20 calls, since a GPU needs time to change from one process to another;
the numbers of all sides are compared first. Large batches cross to a process copied by one thread
and by several. Then a server of each model is called by the client:
one row at a time by one caller, and many rows a call by several. Prints tables and writes
benchmarks/results/gpu-replica.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpu import Turns
from frontend import table
from qrnn_client import Client
from qrnn_serve import SequenceModel, save
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.engine.types import PackedRows, ScoredRows
from qrnn_serve.model.config import LayerConfig, Pooling, QRNNConfig, SequenceModelConfig
from qrnn_serve.scorers import ScorerSpec, copying, load_checked
from qrnn_serve.scorers.process import ProcessScorer, worker_command

RESULTS = Path(__file__).parent / "results/gpu-replica.json"
# Name: layers, width.
MODELS = {"2 layers of 256": (2, 256), "4 layers of 2048": (4, 2048)}
SMALL, LARGE = MODELS
BATCHES = {"1 row of 32": [32], "8 rows of 32": [32] * 8, "13 rows of 1 to 49": range(1, 50, 4)}
CALLS_A_TURN = 20
LARGE_BATCHES = {"1024 rows of 128": [128] * 1024, "64 rows of 512": [512] * 64}
CALLERS = 4
# Rows and timesteps a row of a call of many rows.
CALLS = {SMALL: (256, 32), LARGE: (64, 32)}

Row = dict[str, Any]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device, seconds = arguments.device, arguments.seconds
    keep_freed_memory()
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: saved(Path(folder), *sizes) for name, sizes in MODELS.items()}
        results["batches"] = list(batch_rows(paths[SMALL], device, seconds))
        table(f"Batches of {SMALL}", results["batches"])
        every_timestep = saved(Path(folder), 2, 256, pooling="none")
        results["large batches"] = list(large_batch_rows(every_timestep, device, seconds))
        table(f"Large batches of {SMALL}, scores of each timestep", results["large batches"])
        results["server"] = [
            server_row(paths[name], name, device, seconds, graphs)
            for name, graphs in ((SMALL, True), (SMALL, False), (LARGE, True))
        ]
        table("Server", results["server"])
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def saved(folder: Path, layers: int, width: int, pooling: Pooling = "last") -> Path:
    """A random model of 256 features; its scores are 256 for each timestep, or 16 for the last."""
    torch.manual_seed(1611)
    config = SequenceModelConfig(
        qrnn=QRNNConfig(
            input_size=256, layers=tuple(LayerConfig(hidden_size=width) for _ in range(layers))
        ),
        pooling=pooling,
        head_size=256 if pooling == "none" else 16,
    )
    path = folder / f"model-{width}-{pooling}.pt"
    save(SequenceModel(config).eval(), path)
    return path


def batch_rows(path: Path, device: str, seconds: float) -> Iterator[Row]:
    """Each batch on every side."""
    specs = {
        name: ScorerSpec(path=str(path), device=device, threads=1, graph_memory_mb=mb)
        for name, mb in (("eager", 0), ("graphs", 256))
    }
    scorers: dict[str, Any] = {f"thread, {name}": load_checked(s) for name, s in specs.items()}
    for name, spec in specs.items():
        scorers[f"process, {name}"] = ProcessScorer(worker_command(spec))
    for name, lengths in BATCHES.items():
        rows = random_rows(list(lengths))
        expected = scorers["thread, eager"].score(rows)
        for scorer in scorers.values():
            for _ in range(2):
                np.testing.assert_allclose(
                    scorer.score(rows).output,
                    expected.output,
                    rtol=0,
                    atol=SAME_ROWS_FLOAT32_MAX_ABS,
                )
        turns = Turns(
            {side: partial(score_in_turn, s, rows) for side, s in scorers.items()}, seconds
        )
        yield {
            "batch": name,
            **{f"{side} us": turns.median(side) / CALLS_A_TURN * 1e6 for side in scorers},
            "thread: eager / graphs": turns.ratio("thread, eager", "thread, graphs"),
            "process: eager / graphs": turns.ratio("process, eager", "process, graphs"),
        }
    for scorer in scorers.values():
        scorer.close()


def score_in_turn(scorer: Any, rows: PackedRows) -> None:
    """One turn of a side."""
    for _ in range(CALLS_A_TURN):
        scorer.score(rows)


def large_batch_rows(path: Path, device: str, seconds: float) -> Iterator[Row]:
    """Each large batch, copied in and out by one thread and by several; and its stages."""
    scorer = ProcessScorer(worker_command(ScorerSpec(path=str(path), device=device, threads=1)))
    several = copying._threads()

    def score(rows: PackedRows, threads: int) -> ScoredRows:
        copying._threads = lambda: threads
        return scorer.score(rows)

    for name, lengths in LARGE_BATCHES.items():
        rows = random_rows(lengths)
        one, more = score(rows, 1), score(rows, several)
        np.testing.assert_array_equal(more.output, one.output)
        turns = Turns(
            {"1": partial(score, rows, 1), "several": partial(score, rows, several)}, seconds
        )
        stages = [score(rows, several).times for _ in range(5)]
        yield {
            "batch": name,
            "MB each way": rows.values.nbytes / 1e6,
            "copying threads": several,
            "ms": turns.median("several") * 1e3,
            "1 thread, ms": turns.median("1") * 1e3,
            "1 thread / several": turns.median("1") / turns.median("several"),
            **{
                f"{stage} ms": statistics.median(getattr(s, f"{stage}_s") for s in stages) * 1e3
                for stage in ("upload", "compute", "download")
            },
        }
    scorer.close()


def random_rows(lengths: list[int]) -> PackedRows:
    """Rows of these lengths, as the server has them: in a message, and so read-only."""
    values = np.random.default_rng(0).standard_normal((sum(lengths), 256), np.float32)
    values.flags.writeable = False
    return PackedRows(values=values, lengths=np.array(lengths, np.int64))


def server_row(path: Path, name: str, device: str, seconds: float, graphs: bool) -> Row:
    """One caller with one row a call, then several with many rows a call."""
    options = ("--device", device, "--graph-memory-mb", "256" if graphs else "0")
    rows, timesteps = CALLS[name]
    with serving(path, *options) as target:
        latencies = call_until(target, 1, timesteps, seconds)
        with concurrent.futures.ThreadPoolExecutor(CALLERS) as pool:
            started_s = time.perf_counter()
            ends = [
                pool.submit(call_until, target, rows, timesteps, seconds) for _ in range(CALLERS)
            ]
            calls = sum(len(end.result()) for end in ends)
            took_s = time.perf_counter() - started_s
    return {
        "model": name,
        "graphs": graphs,
        "1 row of 32, p50 ms": statistics.median(latencies) * 1e3,
        "p90 ms": statistics.quantiles(latencies, n=10)[-1] * 1e3,
        "callers": CALLERS,
        "rows a call": rows,
        "rows/s": calls * rows / took_s,
        "timesteps/s": calls * rows * timesteps / took_s,
    }


def call_until(target: str, rows: int, timesteps: int, seconds: float) -> list[float]:
    """Seconds of each call of one caller, in so many seconds, after a tenth of them to warm up."""
    values = np.random.default_rng(0).standard_normal((rows, timesteps, 256), np.float32)
    times: list[float] = []
    with Client(target) as client:
        end_s = time.perf_counter() + seconds / 10
        while time.perf_counter() < end_s:
            client.predict("", values)
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            started_s = time.perf_counter()
            client.predict("", values)
            times.append(time.perf_counter() - started_s)
    return times


@contextmanager
def serving(path: Path, *options: str) -> Iterator[str]:
    """A server process; where it listens."""
    command = [sys.executable, "-m", "qrnn_serve.cli", str(path), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline() if server.stdout else ""
        yield line.removeprefix("listening on ").strip()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
