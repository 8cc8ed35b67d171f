"""What a run leaves: JSON, Markdown, summary and plots, from cells made up here."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

import kernel_plots
from kernel_cases import Case, lstm_cases, paper_speedup, pool_cases
from kernel_plots import draw_plots
from kernel_report import environment, file_stem, is_complete, markdown, summary, write_json
from kernel_timing import Timing


def cell(case: Case, **values):
    known = {"times": {}, "errors": {}, "ratios": {}, "headline": "10 us", "target": None}
    return asdict(case) | {"label": case.label(), "met": None} | known | values


@pytest.fixture
def results():
    times = {"fo_pool": asdict(Timing.of([10.0], 1)), "copy": asdict(Timing.of([20.0], 1))}
    pool = [
        cell(case, share=0.9, target=0.95, met=False, times=times) for case in pool_cases(False)
    ]
    lstm = [
        cell(case, ratio=20.0, paper=paper_speedup(case.shape), target=1.0, met=True)
        for case in lstm_cases(False)
    ]
    beside = {"ratio": 3.0, "beside_product_graph": 4.0, "target": 3.0, "met": True}
    shape = pool[0]["shape"]
    layer = [cell(Case(shape, "float32", training=True), **beside)]
    scans = [cell(Case(shape, "float32"), ratio=2.0, ratios={"one": 2.0}, target=1.0, met=True)]
    graph = [cell(Case(shape, "float32"), ratio=1.5, ratios={"alone": 1.5}, target=2.0, met=True)]
    fused = [cell(Case(shape, "float16"), ratio=1.8, times={}, target=1.1, met=True, uses_one=True)]
    return {
        "environment": environment("cpu", "abc123"),
        "tables": {
            **{"pool": pool, "lstm": lstm, "salesforce": layer, "scans": scans, "graph": graph},
            "fused": fused,
        },
    }


def test_environment():
    """A run names its device, versions, date and commit."""
    facts = environment("cpu", "abc123")

    assert facts["commit"] == "abc123"
    assert facts["device"]["device"] == "cpu"
    assert facts["packages"]["torch"]
    assert facts["date"].endswith("+00:00")


def test_json_round_trip(results, tmp_path):
    """The file is strict JSON with every cell; what is not finite is null."""
    results["tables"]["graph"][0]["ratio"] = float("nan")
    results["tables"]["scans"][0]["ratio"] = 1.23456789
    path = tmp_path / "new" / "kernels.json"

    write_json(path, results)

    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert len(read["tables"]["pool"]) == 72
    assert read["tables"]["pool"][0]["shape"] == [512, 256, 1024]
    assert read["tables"]["graph"][0]["ratio"] is None
    assert read["tables"]["scans"][0]["ratio"] == 1.2346
    assert read["environment"]["commit"] == "abc123"


def test_markdown(results):
    """Every table is there, rows complete, targets and the paper's figures beside."""
    text = markdown(results)

    assert "| fo_pool 512x256x1024 packed | 10 us, 90 % (target 95 %) |" in text
    assert "| float32, B 8 | 20.0 (5.5) | 20.0 (8.8) |" in text
    assert "| one | met |" in text.replace("|  | one", "| one")
    for name in results["tables"]:
        assert f"## {name}" in text


def test_failed_cells_are_said(results):
    """A failed cell keeps its place in every table, the summary and the verdict."""
    assert is_complete(results)
    for cells in results["tables"].values():
        cells[0] |= {"times": {}, "errors": {"cell": "RuntimeError: broken"}, "met": None}
        for figure in ("share", "ratio", "paper"):
            cells[0].pop(figure, None)

    assert not is_complete(results)
    assert markdown(results).count("failed") == 2
    assert "failed  fo_pool 512x256x1024 float32: cell: RuntimeError: broken" in summary(results)


def test_summary(results):
    """Counts and misses a table."""
    text = summary(results)

    assert "pool: 72 cells, 0 of 72 with a target met it, 0 with a side that failed" in text
    assert "missed  fo_pool 512x256x1024 float32: 10 us; target 0.95" in text
    assert "lstm: 60 cells, 60 of 60" in text


def test_file_stem():
    """Whole runs and parts do not overwrite each other."""
    tables = ("pool", "graph")

    assert file_stem("NVIDIA H200", tables, tables) == "kernels-nvidia-h200"
    assert file_stem("NVIDIA H200", ("graph",), tables) == "kernels-nvidia-h200-graph"


def test_plots(results, tmp_path):
    """One file a plot, failed cells included."""
    results["tables"]["lstm"][3].pop("ratio")
    results["tables"]["pool"][4].pop("share")

    drawn = draw_plots(results, tmp_path / "kernels")

    assert [path.name for path in drawn] == ["kernels-pool.png", "kernels-lstm.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_no_matplotlib(results, tmp_path, monkeypatch, capsys):
    """Without matplotlib the run says so and goes on."""
    monkeypatch.setattr(kernel_plots.importlib.util, "find_spec", lambda name: None)

    assert draw_plots(results, tmp_path / "kernels") == []
    assert "matplotlib is not installed" in capsys.readouterr().out
