"""What it costs to score in another process instead of a thread of this one.

    python benchmarks/replica_process.py [--device cpu]

Scores the same batches in a thread of this process and through shared memory in a process of its
own, in turns: with a model (two layers of 256, an output for each timestep), and with a scorer that
does nothing, which leaves the hop alone. Writes medians, fastest samples, CPU time of both
processes and the bytes that crossed to benchmarks/results/replica-process.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, Scorer
from qrnn_serve.model.checkpoint import save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers import ScorerSpec, load_checked
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from qrnn_serve.scorers.worker import serve_scorer

HOP_WORKER = "hop-worker"
RESULTS = Path(__file__).parent / "results/replica-process.json"
WIDTH = 256
LAYERS = (LayerConfig(hidden_size=WIDTH, window=2), LayerConfig(hidden_size=WIDTH))
CONFIG = SequenceModelConfig(
    qrnn=QRNNConfig(input_size=WIDTH, layers=LAYERS), pooling="none", head_size=WIDTH
)
BATCHES = {"1 row of 32": [32], "64 rows of 128": [128] * 64}
HOP_BATCHES = {**BATCHES, "256 rows of 500": [500] * 256}
SAMPLES = 200
SECONDS_A_BATCH = 15.0


class NoScorer:
    """A Scorer that answers zeros at once, from arrays that it keeps."""

    device, engine, alive, max_timesteps, stages = "cpu", "none", True, 1 << 30, ()
    schema = ModelSchema(
        takes_ids=False,
        input_size=WIDTH,
        vocabulary_size=0,
        dtype="float32",
        output_name="output",
        output_size=WIDTH,
        output_per_timestep=True,
        state_size=3 * WIDTH,
        weights_sha256="",
    )

    def __init__(self) -> None:
        self._zeros = np.zeros((max(map(sum, HOP_BATCHES.values())), 3 * WIDTH), np.float32)

    def score(self, rows: PackedRows) -> ScoredRows:
        """Zeros."""
        output = self._zeros.reshape(-1, WIDTH)[: rows.timesteps]
        return ScoredRows(output=output, state=self._zeros[: rows.rows])

    def interrupt(self) -> bool:
        """It never hangs."""
        return False

    def close(self) -> None:
        """It holds nothing."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    hop = ProcessScorer([sys.executable, __file__, HOP_WORKER])
    cells = {"hop alone": compare(NoScorer(), hop, HOP_BATCHES)}
    hop.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.manual_seed(1611)
        save(SequenceModel(CONFIG).eval(), path)
        spec = ScorerSpec(path=str(path), device=arguments.device, threads=1)
        process = ProcessScorer(worker_command(spec))
        cells["model"] = compare(load_checked(spec), process, BATCHES)
        process.close()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_of_one_minute": os.getloadavg()[0],
        "device_of_the_model": arguments.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **cells,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    arguments.output.write_text(text)


def compare(
    thread: Scorer, process: ProcessScorer, batches: dict[str, list[int]]
) -> dict[str, dict[str, float]]:
    """Both with each batch."""
    return {name: compare_batch(thread, process, lengths) for name, lengths in batches.items()}


def compare_batch(thread: Scorer, process: ProcessScorer, lengths: list[int]) -> dict[str, float]:
    """Milliseconds of both for rows of these lengths, whose scores must be the same to the bit."""
    random = np.random.default_rng(0)
    values = random.standard_normal((sum(lengths), WIDTH)).astype(np.float32)
    # As the server has them: in a message, and so read-only.
    values.flags.writeable = False
    rows = PackedRows(values=values, lengths=np.array(lengths, np.int64))
    sides = {"thread": thread.score, "process": process.score}
    scored = {name: score(rows) for name, score in sides.items()}
    np.testing.assert_array_equal(scored["thread"].output, scored["process"].output)
    moved = values.nbytes + scored["thread"].output.nbytes + scored["thread"].state.nbytes
    other = psutil.Process(process.pid)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s = dict.fromkeys(sides, 0.0)
    end_s = time.perf_counter() + SECONDS_A_BATCH
    while len(seconds["thread"]) < SAMPLES and time.perf_counter() < end_s:
        for name, score in sides.items():
            cpu_before_s, started_s = cpu_seconds(other), time.perf_counter()
            score(rows)
            seconds[name].append(time.perf_counter() - started_s)
            cpu_s[name] += cpu_seconds(other) - cpu_before_s
    samples = len(seconds["thread"])
    figures: dict[str, float] = {"megabytes_moved": moved / 1e6, "samples": samples}
    for name in sides:
        figures[f"{name}_median_ms"] = 1e3 * statistics.median(seconds[name])
        figures[f"{name}_fastest_ms"] = 1e3 * min(seconds[name])
        figures[f"{name}_cpu_ms"] = 1e3 * cpu_s[name] / samples
    return figures


def cpu_seconds(other: psutil.Process) -> float:
    """CPU time of this process and of the other; the latter's in steps of 10 ms."""
    times = other.cpu_times()
    return time.process_time() + times.user + times.system


if __name__ == "__main__":
    if sys.argv[1:2] == [HOP_WORKER]:
        serve_scorer(NoScorer, int(sys.argv[2]), int(sys.argv[3]))
    main()
