"""The HTML report: its plots show the proof's numbers, and it needs nothing else."""

from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import pytest
import torch

from qrnn_export import ExportOptions, export
from qrnn_export.html_plot import bars, scatter
from qrnn_export.html_report import report_page
from qrnn_export.measure import Measurement
from qrnn_export.proof import Proof
from qrnn_serve.core.errors import ConfigError
from support.exported import MODELS, make_model


def circles(svg):
    """(series, value, x, y) of each point, from the picture itself."""
    root = ElementTree.fromstring(svg[: svg.index("</svg>") + 6])
    for circle in root.iter("circle"):
        series, value = circle.find("title").text.rsplit(": ", 1)
        yield series, float(value), float(circle.get("cx")), float(circle.get("cy"))


def ticks(svg):
    """Height of the line of each power of ten."""
    root = ElementTree.fromstring(svg[: svg.index("</svg>") + 6])
    texts = [t for t in root.iter("text") if (t.text or "").startswith("1e")]
    return {float(t.text): float(t.get("y")) - 4 for t in texts}


def test_points_lie_where_their_values_are():
    """Heights follow the logarithm between the lines of the powers of ten; 0 is on the lowest."""
    values = {"a": [(1, 3e-7), (100, 2e-5)], "b": [(10, 0.0)]}
    svg = scatter(values, ("T", "error"))
    lines = ticks(svg)
    low, high = min(lines), max(lines)
    assert (low, high) == (1e-7, 1e-4)

    for _, value, _, y in circles(svg):
        share = (math.log10(value) - math.log10(low)) / 3 if value else 0
        assert y == pytest.approx(lines[low] + share * (lines[high] - lines[low]), abs=0.11)
    across = {x: place for (_, _, place, _), x in zip(circles(svg), [1, 100, 10], strict=True)}
    assert across[10] == pytest.approx((across[1] + across[100]) / 2, abs=0.11)


@pytest.mark.parametrize("values", [[(1, 0.0)], [(1, 1e-7)], [(1, 1.0), (1, 1.0)]])
def test_one_value_is_no_division_by_zero(values):
    """All values equal, or all 0, still make a picture."""
    assert len(list(circles(scatter({"a": values}, ("T", "error"))))) == len(values)
    assert len(list(circles(scatter({"a": values}, ("T", "error"), names=["x", "y"])))) == len(
        values
    )


def test_bars_are_as_long_as_their_values():
    """Twice the size is twice the length."""
    root = ElementTree.fromstring(bars({"a": 10.0, "b": 5.0}, "kB"))

    widths = [float(rect.get("width")) for rect in root.iter("rect")]
    assert widths[0] == 2 * widths[1]


def test_names_are_text_not_markup():
    """A file name with angle brackets and quotes stays a name."""
    m = Measurement('<b>".onnx', "custom op", "T=1", 0.0, 1.0, "", 1, 1, 0.1, {"output": 0.0})

    page = report_page("<i>&", Proof((m,), 1e-5), {'<b>".onnx': 3}, ["<u>"])

    assert not re.search(r"<[biu]>", page)
    assert "&lt;i&gt;&amp;" in page


def test_an_export_writes_a_page_that_needs_nothing_else(tmp_path):
    """Plots of every measurement; no script, no link, no picture from elsewhere."""
    torch.manual_seed(1611)
    model = make_model(MODELS["ids, every pooling, head"])

    report = export(model, tmp_path, ExportOptions(html=True))

    page = (tmp_path / "model.report.html").read_text(encoding="utf-8")
    assert "report.html shows what was measured" in report.notices[-1]
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|https?:", page)
    pictures = [f"<svg{part}" for part in page.split("<svg")[1:]]
    assert len(pictures) == 4
    by_layer, by_length, _, times = pictures
    measured = report.proof.measurements
    assert len(list(circles(by_length))) == len(list(circles(times))) == len(measured)
    found = {m.by_layer["layer 0"] for m in measured} | {m.by_layer["output"] for m in measured}
    shown = [value for _, value, _, _ in circles(by_layer)]
    assert len(shown) == 4 * len(("layer 0", "layer 1", "output"))
    assert max(shown) == pytest.approx(
        max(found | {m.by_layer["layer 1"] for m in measured}), rel=0.1
    )
    assert all(m.seconds > 0 for m in measured)
    for artefact in report.artefacts:
        size = f"{artefact.path.stat().st_size / 1000:,.0f} kB"
        assert size in page


def test_the_proof_has_the_difference_of_each_layer(tmp_path):
    """By layer and of the output, none above the whole difference; the output's is one of them."""
    model = make_model(MODELS["stack windows"])
    report = export(model, tmp_path, ExportOptions(formats=("onnx",)))

    rows = json.loads((tmp_path / "model.onnx.proof.json").read_text())["measured"]["measurements"]

    names = [f"layer {n}" for n in range(len(model.config.qrnn.layers))] + ["output"]
    assert rows
    for row, m in zip(rows, report.proof.measurements, strict=True):
        assert sorted(row["by layer"]) == sorted(names)
        assert max(row["by layer"].values()) <= row["difference"]
        assert row["by layer"] == m.by_layer


def test_a_page_is_not_replaced_unasked(tmp_path):
    """A report that is there stops the export before any work."""
    (tmp_path / "model.report.html").write_text("mine")

    with pytest.raises(ConfigError, match=r"model\.report\.html exists already"):
        export(make_model(MODELS["stack one"]), tmp_path, ExportOptions(html=True))
