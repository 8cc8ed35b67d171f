"""How a server's speed grows with its devices, beside nn.DataParallel, from the client's view.

    python benchmarks/scale.py --devices 1,2,4,8          GPUs
    python benchmarks/scale.py --devices 1,2 --kind cpu   the same logic on CPU devices, small

Each case is served by a real server process on 1, 2, ... devices and scored by the real client over
a socket: rows a second, latency of a call, efficiency for each device (rows a second over those of
the smallest count, over how many times as many devices), memory of each device, processor time of
the server's processes, and where the time of a call went. The scores must be the same numbers for
every count. Counts that the machine lacks are named and left out. Writes
benchmarks/results/scale-DEVICE.json and, with matplotlib, a plot beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qrnn_client import Batching, Client, Prediction
from qrnn_serve import load
from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS
from scale_cases import Case, Ids, cases

RESULTS = Path(__file__).parent / "results"
READY = "listening on "
TIMEOUT_S = 600.0
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")

Cell = dict[str, Any]


@contextmanager
def serving(model: Path, placement: str, devices: list[str]) -> Iterator[tuple[str, int]]:
    """A server on these devices; its address and the process that leads its group."""
    options = ["--port", "0", "--device", ",".join(devices), "--placement", placement]
    limits = ["--queue-timesteps", str(1 << 24), "--log-level", "warning"]
    if devices[0] == "cpu":
        limits += ["--threads", "1"]
    command = [sys.executable, "-m", "qrnn_serve.cli", str(model), *options, *limits]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout or ():
            # Its plan comes first.
            if line.startswith(READY):
                yield line.removeprefix(READY).strip(), process.pid
                return
        raise RuntimeError(f"the server ended with {process.wait()} before it was ready")
    finally:
        process.terminate()
        process.wait()


def score_case(case: Case, model: Path, devices: list[str]) -> tuple[Cell, list[np.ndarray]]:
    """Serve one case on these devices; its figures, and its scores for comparison."""
    batches = [case.batch(seed) for seed in range(case.callers)]
    with (
        serving(model, case.placement, devices) as (target, pid),
        Client(target, timeout_s=TIMEOUT_S, batching=Batching(in_flight=1)) as client,
        ThreadPoolExecutor(case.callers) as callers,
    ):
        predictions = list(callers.map(lambda rows: client.predict("", rows), batches))
        busy_s = _cpu_seconds(pid)
        started_s = time.perf_counter()
        calls = list(callers.map(lambda rows: _timed_calls(client, rows, case.calls), batches))
        wall_s = time.perf_counter() - started_s
        busy_s = _cpu_seconds(pid) - busy_s
        memory = _device_memory(devices, pid)
    latencies = [seconds for times, _ in calls for seconds in times]
    timings = [prediction.timing for _, last in calls for prediction in last]
    quantiles = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    cell: Cell = {
        "devices": len(devices),
        "rows_per_s": case.rows * len(latencies) / wall_s,
        "timesteps_per_s": case.calls * sum(len(row) for rows in batches for row in rows) / wall_s,
        "call_p50_s": statistics.median(latencies),
        "call_p99_s": quantiles[98],
        "server_cores": busy_s / wall_s,
        "memory_bytes": memory,
        "where_the_time_went_s": {
            part: statistics.median(getattr(timing, part) for timing in timings)
            for part in vars_of(timings[0])
        },
    }
    return cell, [np.asarray(row) for prediction in predictions for row in prediction.outputs]


def vars_of(timing: Any) -> list[str]:
    """The names of its fields of seconds."""
    return [name for name in type(timing).__slots__ if name.endswith("_s")]


def _timed_calls(
    client: Client, rows: list[Ids], count: int
) -> tuple[list[float], list[Prediction]]:
    times, predictions = [], []
    for _ in range(count):
        started_s = time.perf_counter()
        predictions.append(client.predict("", rows))
        times.append(time.perf_counter() - started_s)
    return times, predictions


def data_parallel_rows_per_s(case: Case, model: Path, kind: str, count: int) -> float:
    """nn.DataParallel in one process, from and to the host, rows padded as its users pad them."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_data_parallel, (case, model, kind, count))


def _data_parallel(case: Case, model: Path, kind: str, count: int) -> float:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    split: nn.Module = load(model, map_location=device).eval()
    if kind == "cuda" and count > 1:
        split = nn.DataParallel(split, device_ids=list(range(count)))
    rows = [torch.from_numpy(row) for row in case.batch(0)]
    times = []
    with torch.inference_mode():
        for _ in range(case.calls + 1):
            started_s = time.perf_counter()
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            split(ids.to(device), lengths.to(device))[0].cpu()
            times.append(time.perf_counter() - started_s)
    return case.rows / statistics.median(times[1:])


def measure(case: Case, kind: str, counts: list[int], folder: Path) -> Cell:
    """One case on every count of devices."""
    model = case.save_model(folder)
    cells: list[Cell] = []
    first: list[np.ndarray] = []
    for count in counts:
        devices = [f"cuda:{index}" for index in range(count)] if kind == "cuda" else [kind] * count
        print(f"{case.name}: {count} x {kind} ...", flush=True)
        cell, scores = score_case(case, model, devices)
        first = first or scores
        pairs = zip(first, scores, strict=True)
        cell["max_difference"] = max(float(np.abs(a - b).max()) for a, b in pairs)
        cell["same_numbers"] = cell["max_difference"] <= SAME_ROWS_FLOAT32_MAX_ABS
        if case.placement == "replicate":
            cell["data_parallel_rows_per_s"] = data_parallel_rows_per_s(case, model, kind, count)
        base = cells[0] if cells else cell
        more = count / base["devices"]
        cell["times_as_fast"] = cell["rows_per_s"] / base["rows_per_s"]
        cell["efficiency"] = cell["times_as_fast"] / more
        cells.append(cell)
        print(
            f"  {cell['rows_per_s']:,.1f} rows/s, x{cell['times_as_fast']:.2f}, "
            f"p99 {1e3 * cell['call_p99_s']:,.0f} ms, efficiency {cell['efficiency']:.2f}, "
            f"largest difference {cell['max_difference']:.1e}",
            flush=True,
        )
    return {"case": case.name, "placement": case.placement, "counts": cells}


def _cpu_seconds(leader: int) -> float:
    """Processor time of a server and of its replicas' processes."""
    return sum(_stat(pid, 13) + _stat(pid, 14) for pid in _family(leader)) / TICKS_A_SECOND


def _device_memory(devices: list[str], leader: int) -> list[int]:
    """Bytes in use on each GPU, or resident in each of the server's processes."""
    if devices[0] == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        return [_stat(pid, 23) * page for pid in _family(leader)]
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return [int(line) << 20 for line in lines[: len(devices)]]


def _family(leader: int) -> list[int]:
    """A process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = _stat(int(path.name), 3)
            except OSError:  # it has ended since
                continue
            children.setdefault(parent, []).append(int(path.name))
    family = [leader]
    for pid in family:
        family += children.get(pid, [])
    return family


def _stat(pid: int, field: int) -> int:
    """A number of /proc/PID/stat, counted as proc(5) does, from 0."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    # The name may hold blanks.
    return int(text.rpartition(")")[2].split()[field - 2])


def draw_plot(report: Cell, path: Path) -> None:
    """Times as fast by the count of devices, a line a case."""
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    counts = report["devices"]
    axes.plot(counts, [count / counts[0] for count in counts], "k:", label="ideal")
    for case in report["cases"]:
        faster = [cell["times_as_fast"] for cell in case["counts"]]
        axes.plot(counts, faster, "o-", label=f"{case['case']} ({case['placement']})")
    axes.set_xlabel("devices")
    axes.set_ylabel(f"times the rows a second of {counts[0]}")
    axes.set_title(f"qrnn-serve on {report['device']}, from the client's view")
    axes.set_xticks(counts)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="1,2,4,8", help="counts of devices, with commas")
    parser.add_argument("--kind", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", help="only cases whose name holds this text")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def main() -> int:
    """Run every case; 1 when scores differ between counts of devices."""
    options = parse_arguments()
    wanted = [int(count) for count in options.devices.split(",")]
    there = torch.cuda.device_count() if options.kind == "cuda" else max(wanted)
    counts = [count for count in wanted if count <= there]
    missing = sorted(set(wanted) - set(counts))
    if missing:
        print(f"not run on {missing} devices: this machine has {there}")
    if not counts:
        print("no device to run on; --kind cpu runs the same logic on the CPU", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(0) if options.kind == "cuda" else "CPU"
    chosen = cases("full" if options.kind == "cuda" else "small")
    chosen = [case for case in chosen if not options.cases or options.cases in case.name]
    with tempfile.TemporaryDirectory() as folder:
        table = [measure(case, options.kind, counts, Path(folder)) for case in chosen]
    report = {
        "device": name,
        "devices": counts,
        "not_run": missing,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[2],
        "cases": table,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = options.output / f"scale-{slug}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw_plot(report, path.with_suffix(".png"))
    print(f"written: {path}")
    return 0 if all(cell["same_numbers"] for case in table for cell in case["counts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
