"""Shows an export and an inspection to people."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from qrnn_export.exporter import ExportReport
from qrnn_export.proof import Proof

if TYPE_CHECKING:
    from qrnn_export.inspection import Inspection


def print_report(report: ExportReport, console: Console) -> None:
    """The notes of the import, the parity table, and what was written."""
    for note in report.notes:
        console.print(Text(f"- {note}"))
    console.print(parity_table(report.proof))
    for artefact in report.artefacts:
        for path in (artefact.path, *artefact.beside):
            size = decimal(path.stat().st_size)
            kept = " (keep it beside the model)" if path != artefact.path else ""
            console.print(Text(f"wrote {path}  {size}{kept}"), soft_wrap=True)
    for notice in report.notices:
        console.print(Text(f"Note: {notice}"))


def parity_table(proof: Proof) -> Table:
    """One line for each way of running each artefact."""
    table = Table(title="Difference from the module, measured in a fresh process")
    for heading in ("artefact", "run as", "cases", "largest difference", "allowed"):
        table.add_column(heading, justify="left" if heading in ("artefact", "run as") else "right")
    rows = groupby(proof.measurements, key=lambda m: (m.artefact, m.way))
    for (artefact, way), group in rows:
        measurements = list(group)
        worst = max(measurements, key=lambda m: m.difference / proof.limit(m))
        broken = sum(bool(m.problem) for m in measurements)
        difference = f"{worst.difference:.1e}" if not broken else f"{broken} failed"
        cases, limit = str(len(measurements)), f"{proof.limit(worst):.0e}"
        table.add_row(Text(artefact), way, cases, difference, limit)
    return table


def print_inspection(path: Path, found: Inspection, console: Console) -> None:
    """Names, shapes, configuration and what is missing."""
    console.print(Text(f"{path}: {found.kind}"), soft_wrap=True)
    table = Table("tensor", "shape", "dtype")
    for name, shape, dtype in found.tensors:
        table.add_row(Text(name), Text(shape), dtype)
    console.print(table)
    for note in found.notes:
        console.print(Text(f"- {note}"))
    if found.config is not None:
        console.print(Text("configuration:"))
        console.print(Text(json.dumps(found.config, indent=2)))
    if found.missing:
        console.print(Text(f"cannot be exported yet: {found.missing}"))
