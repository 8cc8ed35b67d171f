"""Measure the kernels on one GPU: `python benchmarks/kernels.py`. See README.md beside this file.

Runs the GPU tests of the kernels first, and prints no speed when one fails.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import kernel_cases
import kernel_layer_tables
import kernel_op_tables
from kernel_cases import Case
from kernel_plots import draw_plots
from kernel_report import (
    ROOT,
    environment,
    file_stem,
    is_complete,
    markdown,
    summary,
    write_json,
)
from kernel_timing import COPY_BYTES, Bench, GpuBench, short_error

MEASURES = kernel_op_tables.MEASURES | kernel_layer_tables.MEASURES
BUDGET_S = 0.06
QUICK_BUDGET_S = 0.02
TESTS_S = 90.0
MOST_CACHED_BYTES = 40 << 30


@dataclass(frozen=True)
class Table:
    """A table: its cells, and about how long one takes, set-up included."""

    cases: Callable[[bool], list[Case]]
    seconds_per_cell: float


TABLES = {
    "pool": Table(kernel_cases.pool_cases, 0.25),
    "backward": Table(kernel_cases.backward_cases, 0.25),
    "lstm": Table(kernel_cases.lstm_cases, 0.35),
    "salesforce": Table(kernel_cases.salesforce_cases, 0.55),
    "scans": Table(kernel_cases.scan_cases, 4.0),
    "graph": Table(kernel_cases.graph_cases, 0.3),
    "fused": Table(kernel_cases.fused_cases, 0.3),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if everything was measured, 1 if not, 2 if it cannot start."""
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("kernels.py measures on a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    cells = sum(len(TABLES[name].cases(options.quick)) for name in options.tables)
    estimate_s = sum(
        TABLES[name].seconds_per_cell * len(TABLES[name].cases(options.quick))
        for name in options.tables
    )
    print(
        f"{cells} cells, about {estimate_s:.0f} s, after the tests (about {TESTS_S:.0f} s)",
        flush=True,
    )
    tests = run_tests()
    if not tests["passed"]:
        print("the kernels' tests failed, so no speed is measured", file=sys.stderr)
        return 1
    bench = _prepared_bench(options.quick)
    # First, since the clocks of an idle device rise under load.
    copy_us = bench.measure({"copy": bench.copy_work()}).times["copy"].median_us
    results: dict[str, Any] = {
        "environment": environment(bench.device, options.commit),
        "quick": options.quick,
        "copy_gb_per_s": 2 * COPY_BYTES / copy_us / 1e3,
        "tests": tests,
        "tables": {},
    }
    stem = file_stem(torch.cuda.get_device_name(), options.tables, tuple(TABLES))
    path = options.output / (stem + ("-quick" if options.quick else ""))
    print(f"device-to-device copy: {results['copy_gb_per_s']:,.0f} GB/s, read and written")
    progress = Progress(cells, estimate_s)
    for name in options.tables:
        cases = TABLES[name].cases(options.quick)
        results["tables"][name] = run_table(name, cases, bench, progress)
        # After each table, so that a run that is cut short leaves what it has.
        write_json(path.with_suffix(".json"), results)
        path.with_suffix(".md").write_text(markdown(results))
    drawn = draw_plots(results, path)
    print(summary(results))
    print(*(path.with_suffix(end) for end in (".json", ".md")), *drawn, sep="\n")
    return 0 if is_complete(results) else 1


class Progress:
    """A line for each cell: what came out, and how far the run is."""

    def __init__(self, cells: int, estimate_s: float) -> None:
        self._cells = cells
        self._estimate_s = estimate_s
        self._done = 0
        self._start_s = time.monotonic()

    def line(self, table: str, cell: dict[str, Any]) -> None:
        """Print the line of a finished cell."""
        self._done += 1
        spent_s = time.monotonic() - self._start_s
        missed = "  MISSED" if cell.get("met") is False else ""
        failed = "".join(f"\n    {side}: {text}" for side, text in cell["errors"].items())
        print(
            f"[{self._done}/{self._cells}, {spent_s:.0f} of about {self._estimate_s:.0f} s] "
            f"{table} {cell['label']}: {cell['headline']}{missed}{failed}",
            flush=True,
        )


def run_table(
    name: str, cases: Sequence[Case], bench: Bench, progress: Progress
) -> list[dict[str, Any]]:
    """Measure all cells of a table. A cell that fails is reported and does not stop the rest."""
    cells: list[dict[str, Any]] = []
    for case in cases:
        # Weights and inputs are the same in every run.
        torch.manual_seed(len(cells))
        known = asdict(case) | {"label": case.label()}
        try:
            cell = known | MEASURES[name](case, bench)
        except Exception as error:  # the other cells are worth having
            cell = known | _failed_cell(error)
        cells.append(cell)
        progress.line(name, cell)
        _free_memory()
    return cells


def run_tests() -> dict[str, Any]:
    """Run the kernels' GPU tests in a process of their own.

    Returns:
        "passed": whether at least one ran and none failed; "summary": pytest's last line;
        "seconds".
    """
    start_s = time.monotonic()
    done = subprocess.run(test_command(), cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    passed = done.returncode == 0 and re.search(r"\b[1-9]\d* passed", lines[-1]) is not None
    print(lines[-1] if passed else done.stdout[-6000:] + done.stderr[-2000:], flush=True)
    seconds = round(time.monotonic() - start_s, 1)
    return {"passed": passed, "summary": lines[-1], "seconds": seconds}


def test_command() -> list[str]:
    """How pytest is called: plugins are switched off or used only where they are installed."""
    # -P: the package that is tested is the one that is measured, not the folder beside the tests.
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "tests/kernels", "-q"]
    command += ["-p", "no:cacheprovider"]
    for module, flags in (
        ("pytest_randomly", ["-p", "no:randomly"]),
        ("pytest_benchmark", ["-p", "no:benchmark"]),
        ("xdist", ["-n", str(max(1, min(10, (os.cpu_count() or 2) // 2)))]),
    ):
        if importlib.util.find_spec(module):
            command += flags
    if not (
        importlib.util.find_spec("pytest_asyncio") and importlib.util.find_spec("pytest_timeout")
    ):
        # The project's settings name both, and are strict; these tests need neither.
        command += ["-o", "addopts=--import-mode=importlib"]
        command += ["-W", "ignore::pytest.PytestConfigWarning"]
    return command


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tables",
        type=_table_names,
        default=list(TABLES),
        help="which, separated by commas: " + ",".join(TABLES) + " (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="few shapes, few repeats")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="folder of the results (default: benchmarks/results)",
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    return parser.parse_args(arguments)


def _table_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no table named {', '.join(unknown)}; there are {', '.join(TABLES)}"
        )
    return [name for name in TABLES if name in names]


def _prepared_bench(quick: bool) -> GpuBench:
    # Full float32 on both sides: TensorFloat32 keeps 10 bits of the mantissa.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # A few kernels are compiled one after the other; a pool of compilers takes longer to start.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return GpuBench(QUICK_BUDGET_S if quick else BUDGET_S)


def _failed_cell(error: Exception) -> dict[str, Any]:
    return {
        "times": {},
        "errors": {"cell": short_error(error)},
        "ratios": {},
        "met": None,
        "headline": "failed",
    }


def _free_memory() -> None:
    gc.collect(1)
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_CACHED_BYTES:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
