"""A page that shows what an export measured: one file, no scripts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from qrnn_export.html_plot import Points, bars, scatter
from qrnn_export.measure import Measurement
from qrnn_export.proof import Proof

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
svg { width: 100%; font-size: 12px; }
.grid { stroke: #ddd; } .limit { stroke: #888; fill: none; stroke-dasharray: 5 4; }
table { border-collapse: collapse; } td, th { padding: 0 .8rem 0 0; text-align: left; }
"""


def report_page(
    name: str, proof: Proof, sizes: Mapping[str, int], notes: Sequence[str] = ()
) -> str:
    """The page as HTML.

    Args:
        name: Of the model, for the title.
        proof: What was measured, all of it within the limits.
        sizes: Bytes of each file that was written.
        notes: How the checkpoint was read.
    """
    ways: dict[str, list[Measurement]] = {}
    for m in proof.measurements:
        ways.setdefault(f"{m.artefact}, {m.way}", []).append(m)
    layers = list(dict.fromkeys(layer for m in proof.measurements for layer in m.by_layer))
    by_layer: Points = {
        way: [(x, max(m.by_layer[layer] for m in found)) for x, layer in enumerate(layers)]
        for way, found in ways.items()
    }
    by_length: Points = {
        way: [(m.timesteps, m.difference) for m in found] for way, found in ways.items()
    }
    limits: dict[int, float] = {}
    for m in proof.measurements:
        limits[m.timesteps] = min(proof.limit(m), limits.get(m.timesteps, proof.limit(m)))
    times: Points = {
        way: [(m.timesteps, 1000 * m.seconds / m.rows) for m in found]
        for way, found in ways.items()
    }
    difference = "largest difference from the module"
    absent = [*proof.devices.absent, *(x for lines in proof.absent.values() for x in lines)]
    parts = [
        f"<h1>Export of {escape(name)}</h1>",
        f"<p>{len(proof.measurements)} comparisons with the module, in a fresh process; allowed is "
        f"a difference of {proof.tolerance:g} on values of unit scale.</p>",
        _list([*(f"{device}: {name}" for device, name in proof.devices.names.items()), *absent]),
        "<h2>Error by layer</h2>",
        scatter(by_layer, ("last cell state of each layer, and output", difference), names=layers),
        "<h2>Error by length</h2>",
        scatter(by_length, ("timesteps T", difference), limits=sorted(limits.items())),
        "<p>Dashed: what is allowed, which grows with the scale of the values.</p>",
        "<h2>Size</h2>",
        bars({file: size / 1000 for file, size in sizes.items()}, "kB"),
        "<h2>Time per sequence</h2>",
        scatter(times, ("timesteps T", "milliseconds")),
        "<p>One call for each case, divided by its rows; the first calls of a process are among "
        "them. This is no benchmark.</p>",
        "<h2>How it was read</h2>",
        _list(notes or ["a checkpoint of qrnn_serve.save, which holds its whole configuration"]),
        "<h2>Every comparison</h2>",
        _table(proof),
    ]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(proof: Proof) -> str:
    rows = "".join(
        f"<tr><td>{escape(m.artefact)}</td><td>{escape(m.way)}</td><td>{escape(m.case)}</td>"
        f"<td>{m.difference:.1e}</td><td>{proof.limit(m):.1e}</td></tr>"
        for m in proof.measurements
    )
    head = "".join(f"<th>{h}</th>" for h in ("file", "run as", "case", "difference", "allowed"))
    return f"<details><summary>Show</summary><table><tr>{head}</tr>{rows}</table></details>"
