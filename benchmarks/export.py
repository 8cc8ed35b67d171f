"""Seconds a step and peak memory of exporting a large language model.

    python benchmarks/export.py [--hidden 2500] [--vocabulary 267735] [--dtype float16]

Makes a checkpoint in the layout of awd-lstm-lm with random weights in a temporary folder, exports
it to all formats, and prints the seconds between progress sentences and the peak memory of the
exporter and of the process that checks the artefacts, as a multiple of the checkpoint's size.
Memory is VmHWM of Linux: pages of mapped files count, whether or not they could be given back.
Writes benchmarks/results/export.json; with --dtype, export-DTYPE.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
EMBEDDING = 400
Seconds = dict[str, float]

CHECKS = ("Comparing", "Measuring")
"""How the sentences of the steps that check the artefacts and a conversion begin."""

EXPORT = """
import sys, time
def say(sentence):
    print(time.perf_counter(), time.process_time(), sentence, flush=True)
say("Importing the package")
from qrnn_export import ExportOptions, export
export(sys.argv[1], sys.argv[2], ExportOptions(dtype=sys.argv[3] or None), progress=say)
say("Done")
"""


def main() -> None:
    """Make the checkpoint, export it, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2500)
    parser.add_argument("--vocabulary", type=int, default=267_735)
    parser.add_argument("--dtype", choices=["float32", "float16"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.pt"
        parameters = write_checkpoint(checkpoint, arguments.vocabulary, arguments.hidden)
        seconds, cpu_seconds, peaks = export(
            checkpoint, Path(folder) / "out", arguments.dtype or ""
        )
        size = checkpoint.stat().st_size
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dtype": arguments.dtype or "as it is",
        "parameters": parameters,
        "checkpoint_bytes": size,
        "seconds": seconds,
        "cpu_seconds_of_the_exporter": cpu_seconds,
        "seconds_without_checks": without_checks(seconds),
        "cpu_seconds_without_checks": without_checks(cpu_seconds),
        "peak_over_checkpoint": {name: peak / size for name, peak in peaks.items()},
    }
    print(json.dumps(result, indent=1))
    name = f"export-{arguments.dtype}.json" if arguments.dtype else "export.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


def write_checkpoint(path: Path, vocabulary: int, hidden: int) -> int:
    """Write a state dict with tied embedding and decoder; returns its number of parameters."""
    torch.manual_seed(1611)
    table = torch.rand(vocabulary, EMBEDDING) * 0.2 - 0.1
    tensors = {"encoder.weight": table}
    shapes = [(hidden, 2 * EMBEDDING), (hidden, hidden), (hidden, hidden), (EMBEDDING, hidden)]
    for layer, (width, columns) in enumerate(shapes):
        linear = f"rnns.{layer}.linear.module"
        tensors[f"{linear}.bias"] = torch.rand(3 * width) * 0.2 - 0.1
        tensors[f"{linear}.weight_raw"] = torch.rand(3 * width, columns) * 0.04 - 0.02
    parameters = sum(tensor.numel() for tensor in tensors.values()) + vocabulary
    torch.save(tensors | {"decoder.weight": table, "decoder.bias": torch.zeros(vocabulary)}, path)
    return parameters


def without_checks(seconds: Seconds) -> float:
    """The sum over all other steps."""
    return sum(s for name, s in seconds.items() if not name.startswith(CHECKS))


def export(checkpoint: Path, output: Path, dtype: str) -> tuple[Seconds, Seconds, dict[str, int]]:
    """Export in a process of its own: time of each step, its own CPU time, and peak bytes."""
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(output), dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        peaks = {"exporter": 0, "checking process": 0}
        watch = threading.Thread(target=watch_peaks, args=(running, peaks))
        watch.start()
        lines = running.communicate()[0].splitlines()
        watch.join()
    if running.returncode != 0:
        sys.exit(f"the export ended with status {running.returncode}")
    words = [line.split(" ", 2) for line in lines]
    seconds, cpu_seconds = (
        {step[2]: float(after[n]) - float(step[n]) for step, after in itertools.pairwise(words)}
        for n in (0, 1)
    )
    return seconds, cpu_seconds, peaks


def watch_peaks(running: subprocess.Popen[str], peaks: dict[str, int]) -> None:
    """Keep the highest VmHWM of the exporter and of the processes that it starts."""
    while running.poll() is None:
        peaks["exporter"] = max(peaks["exporter"], peak_bytes(running.pid))
        for child in children(running.pid):
            peaks["checking process"] = max(peaks["checking process"], peak_bytes(child))
        time.sleep(0.02)


def peak_bytes(process: int) -> int:
    """VmHWM of a process; 0 when it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def children(process: int) -> list[int]:
    """Processes that a process started and that run."""
    try:
        return [
            int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except OSError:
        return []


if __name__ == "__main__":
    main()
