"""A model on a GPU: CUDA graphs against eager calls, a process against a thread, and a server.

    python benchmarks/gpu_replica.py [--device cuda:0] [--seconds 3]

In this process and through shared memory in a replica's process, small batches with and without
CUDA graphs take turns; the numbers of all sides are compared first. Then a server of each model is
called by the client: one row at a time by one caller, and many rows a call by several. Prints
tables and writes benchmarks/results/gpu-replica.json.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpu import Turns
from frontend import table
from qrnn_client import Client
from qrnn_serve import SequenceModel, save
from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.scorers import ScorerSpec, load_checked
from qrnn_serve.scorers.process import ProcessScorer, worker_command

RESULTS = Path(__file__).parent / "results/gpu-replica.json"
# Name: layers, width.
MODELS = {"2 layers of 256": (2, 256), "4 layers of 2048": (4, 2048)}
SMALL, LARGE = MODELS
BATCHES = {"1 row of 32": [32], "8 rows of 32": [32] * 8, "13 rows of 1 to 49": range(1, 50, 4)}
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
        results["server"] = [
            server_row(paths[name], name, device, seconds, graphs)
            for name, graphs in ((SMALL, True), (SMALL, False), (LARGE, True))
        ]
        table("Server", results["server"])
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def saved(folder: Path, layers: int, width: int) -> Path:
    """A random model that gives the last timestep's 16 scores."""
    torch.manual_seed(1611)
    config = SequenceModelConfig(
        qrnn=QRNNConfig(
            input_size=256, layers=tuple(LayerConfig(hidden_size=width) for _ in range(layers))
        ),
        pooling="last",
        head_size=16,
    )
    path = folder / f"model-{width}.pt"
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
            {side: lambda s=s, r=rows: s.score(r) for side, s in scorers.items()}, seconds
        )
        yield {
            "batch": name,
            **{f"{side} us": turns.median(side) * 1e6 for side in scorers},
            "thread: eager / graphs": turns.ratio("thread, eager", "thread, graphs"),
            "process: eager / graphs": turns.ratio("process, eager", "process, graphs"),
        }
    for scorer in scorers.values():
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield line.removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
