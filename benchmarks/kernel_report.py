"""What a run leaves: the JSON of all cells, Markdown tables of them, and a summary."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernel_cases import GRID_BATCHES, GRID_TIMESTEPS

Cell = dict[str, Any]
Results = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
MOST_LISTED = 12


def environment(device: str, commit: str | None) -> dict[str, Any]:
    """Where and on what a run was made: device, versions, date, commit.

    Args:
        device: "cuda" or "cpu".
        commit: The commit, for a checkout without its git folder; None asks git.
    """
    from qrnn_serve.kernels import describe

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "device": describe(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("qrnn-serve", "torch", "triton", "numpy")},
    }


def file_stem(device_name: str, tables: Sequence[str], all_tables: Sequence[str]) -> str:
    """Of the files of a run: kernels-DEVICE, and the tables when they are not all."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    part = "" if list(tables) == list(all_tables) else "-" + "-".join(tables)
    return f"kernels-{slug}{part}"


def write_json(path: Path, results: Results) -> None:
    """Write all cells, each on a line.

    Numbers keep five digits; those that are not finite become null, which JSON has in their place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = _plain(results)
    tables = plain.pop("tables")
    facts = json.dumps(plain, indent=1, allow_nan=False).removesuffix("\n}")
    bodies = [
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(cell, allow_nan=False) for cell in cells)
        + "\n]"
        for name, cells in tables.items()
    ]
    path.write_text(facts + ',\n "tables": {\n' + ",\n".join(bodies) + "\n }\n}\n")


def markdown(results: Results) -> str:
    """All tables of a run for people."""
    environment = results["environment"]
    device = environment["device"]
    parts = [
        "# Kernels on " + device.get("name", device["device"]),
        f"{environment['date']}, commit {environment['commit']}, torch {device['torch']}, "
        f"cupy {device.get('cupy')}, driver {environment['driver']}. Medians; both sides of a "
        "ratio in one run. `benchmarks/README.md` says what the tables mean.",
    ]
    for name, cells in results["tables"].items():
        parts += [f"## {name}", _WRITERS[name](cells)]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """How many cells of each table met their target, and the first ones that missed or failed."""
    lines: list[str] = []
    for name, cells in results["tables"].items():
        judged = [cell for cell in cells if cell.get("met") is not None]
        met = sum(bool(cell["met"]) for cell in judged)
        failed = [cell for cell in cells if cell["errors"]]
        lines.append(
            f"{name}: {len(cells)} cells, {met} of {len(judged)} with a target met it, "
            f"{len(failed)} with a side that failed"
        )
        missed = [cell for cell in judged if not cell["met"]]
        lines += [
            f"  missed  {cell['label']}: {cell['headline']}; target {cell['target']:.2f}"
            for cell in missed[:MOST_LISTED]
        ]
        lines += [f"  failed  {text}" for text in _distinct_errors(failed)[:MOST_LISTED]]
    return "\n".join(lines)


def is_complete(results: Results) -> bool:
    """Whether every cell has its figure. One of several peers that cannot run leaves it one."""
    cells = [cell for cells in results["tables"].values() for cell in cells]
    return all(_figure(cell) is not None for cell in cells)


def _figure(cell: Cell) -> float | None:
    return cell.get("share", cell.get("ratio"))


def _distinct_errors(cells: Sequence[Cell]) -> list[str]:
    seen: dict[str, str] = {}
    for cell in cells:
        for side, text in cell["errors"].items():
            seen.setdefault(f"{side}: {text}", cell["label"])
    return [f"{label}: {text}" for text, label in seen.items()]


def _share_table(cells: Sequence[Cell]) -> str:
    dtypes = list(dict.fromkeys(cell["dtype"] for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        row = cell["label"].replace(f" {cell['dtype']}", "")
        rows.setdefault(row, {})[cell["dtype"]] = _share_text(cell)
    body = [[row, *(texts.get(dtype, "") for dtype in dtypes)] for row, texts in rows.items()]
    return _table(["", *dtypes], body)


def _share_text(cell: Cell) -> str:
    op = next((name for name in cell["times"] if name != "copy"), None)
    if op is None or cell.get("share") is None:
        return "failed"
    text = f"{cell['times'][op]['median_us']:,.0f} us, {100 * cell['share']:.0f} %"
    return text if cell["target"] is None else text + f" (target {100 * cell['target']:.0f} %)"


def _lstm_table(cells: Sequence[Cell]) -> str:
    def row(dtype: str, batch: int) -> list[str]:
        at = {cell["shape"][0]: cell for cell in cells if _is(cell, dtype, batch)}
        return [f"{dtype}, B {batch}", *(_lstm_text(at.get(steps)) for steps in GRID_TIMESTEPS)]

    dtypes = dict.fromkeys(cell["dtype"] for cell in cells)
    body = [row(dtype, batch) for dtype in dtypes for batch in GRID_BATCHES]
    grid = _table(["", *(f"T {steps}" for steps in GRID_TIMESTEPS)], body)
    names = ("ratio", "ratio_eager", "ratio_product", "target")
    details = [
        [cell["label"], *(_times(cell.get(name)) for name in names), _yes(cell["met"])]
        for cell in cells
    ]
    headings = ["", "captured", "eager", "product alone", "target", "met"]
    return grid + "\n\n" + _table(headings, details)


def _is(cell: Cell, dtype: str, batch: int) -> bool:
    return cell["dtype"] == dtype and cell["shape"][1] == batch


def _lstm_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.get("ratio") is None:
        return "failed"
    return f"{cell['ratio']:.1f} ({cell['paper']}){'' if cell['met'] else ' *'}"


def _salesforce_table(cells: Sequence[Cell]) -> str:
    names = (
        *("ratio_graph", "ratio_product", "ratio_eager", "ratio_as_used"),
        "beside_product_graph",
    )
    body = [
        [cell["label"], *(_times(cell.get(name)) for name in names), _yes(cell["met"])]
        for cell in cells
    ]
    headings = [
        *("", "captured", "product alone", "eager", "ours captured, original eager"),
        "beside the product",
    ]
    return _table([*headings, "met"], body)


def _scans_table(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(name for cell in cells for name in cell["ratios"]))
    body = [
        [cell["label"], *(_times(cell["ratios"].get(name)) for name in names), _yes(cell["met"])]
        for cell in cells
    ]
    return _table(["", *names, "met"], body)


def _graph_table(cells: Sequence[Cell]) -> str:
    ways = list(dict.fromkeys(way for cell in cells for way in cell["ratios"]))
    body = [
        [cell["label"], *(_times(cell["ratios"].get(way)) for way in ways), _yes(cell["met"])]
        for cell in cells
    ]
    return _table(["", *ways, "met"], body)


def _fused_table(cells: Sequence[Cell]) -> str:
    sides = ("product", "two kernels", "one kernel")
    body = [
        [
            cell["label"],
            *(_us(cell["times"].get(side)) for side in sides),
            _times(cell.get("ratio")),
            "one" if cell["uses_one"] else "two",
            _yes(cell["met"]),
        ]
        for cell in cells
    ]
    return _table(["", *(f"{side}, us" for side in sides), "ratio", "used", "met"], body)


_WRITERS: dict[str, Callable[[Sequence[Cell]], str]] = {
    "pool": _share_table,
    "backward": _share_table,
    "lstm": _lstm_table,
    "salesforce": _salesforce_table,
    "scans": _scans_table,
    "graph": _graph_table,
    "fused": _fused_table,
}


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _us(timing: dict[str, Any] | None) -> str:
    return "-" if timing is None else f"{timing['median_us']:,.1f}"


def _yes(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "no"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None
