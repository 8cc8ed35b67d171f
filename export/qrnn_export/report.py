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

from qrnn_export.cost import Cost
from qrnn_export.exporter import ExportReport
from qrnn_export.proof import Proof

if TYPE_CHECKING:
    from qrnn_export.inspection import Inspection


def print_report(report: ExportReport, console: Console) -> None:
    """The notes of the import, the parity table, and what was written."""
    for note in report.notes:
        console.print(Text(f"- {note}"))
    print_proof(report.proof, console)
    if report.cost is not None:
        console.print(cost_table(report.cost))
    for artefact in report.artefacts:
        for path in (artefact.path, *artefact.beside):
            size = decimal(path.stat().st_size)
            kept = " (keep it beside the model)" if path != artefact.path else ""
            console.print(Text(f"wrote {path}  {size}{kept}"), soft_wrap=True)
    if report.chain is not None:
        console.print(Text(f"wrote {report.chain}  (how the stages follow each other)"))
    for notice in report.notices:
        console.print(Text(f"Note: {notice}"))


def print_proof(proof: Proof, console: Console) -> None:
    """The parity table, where it was measured, and what was not compared."""
    console.print(parity_table(proof))
    names = ", ".join(f"{device} ({name})" for device, name in proof.devices.names.items())
    console.print(Text(f"compared on {names}"))
    for line in (*proof.devices.absent, *(x for lines in proof.absent.values() for x in lines)):
        console.print(Text(f"- {line}"))


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


def cost_table(cost: Cost) -> Table:
    """What a conversion costs and saves."""
    table = Table(title=f"From {cost.before} to {cost.after}, on {cost.measured_on}")
    table.add_column("what")
    table.add_column("", justify="right")
    sizes = f"{decimal(cost.bytes_before)} to {decimal(cost.bytes_after)}"
    table.add_row("weights", sizes)
    table.add_row("outputs compared", str(cost.vectors))
    table.add_row("largest difference", f"{cost.largest_difference:.1e}")
    table.add_row("relative norm of the difference", f"{cost.relative_norm:.1e}")
    if cost.changed_argmax is not None:
        table.add_row("another largest logit", f"{cost.changed_argmax:.2%}")
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
