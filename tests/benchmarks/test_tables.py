"""Each table on the CPU with given times: its cells, ratios and verdicts."""

from __future__ import annotations

import pytest
import torch

import kernel_layer_tables
import kernel_op_tables
from kernel_cases import POOL_SHAPES, Case, Shape
from kernel_layer_tables import beside_product
from kernel_op_tables import measure_backward, measure_pool, measure_scans
from kernel_peers import ScanPeer
from kernel_timing import COPY_BYTES
from qrnn_serve.kernels import reference

SMALL = Shape(6, 3, 8)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_pool(bench, packed, reverse):
    """The share is the op's bytes a second over the copy's."""
    case = Case(SMALL, "bfloat16", "fo_pool", packed, reverse)
    bench.times_us = {"fo_pool": 2.0, "copy": 4.0}

    cell = measure_pool(case, bench)

    assert cell["bytes"] == 6 * 3 * 8 * 4 * 2
    assert cell["share"] == pytest.approx((cell["bytes"] / 2.0) / (2 * COPY_BYTES / 4.0))
    assert cell["met"] is None
    assert cell["errors"] == {}


def test_pool_verdict(bench, monkeypatch):
    """At a shape with a target the cell says whether it was met."""
    case = Case(POOL_SHAPES[0], "float32", "fo_pool")
    monkeypatch.setattr(
        kernel_op_tables, "_draw", lambda case, device, gates: torch.randn(2, 1, gates)
    )
    copy_us = 2 * COPY_BYTES / 4e6
    bench.times_us = {"copy": copy_us, "fo_pool": case.traffic_bytes(4) / 4e6 / 0.96}
    assert measure_pool(case, bench)["met"] is True

    bench.times_us["fo_pool"] = case.traffic_bytes(4) / 4e6 / 0.94

    assert measure_pool(case, bench)["met"] is False


@pytest.mark.parametrize("op", ["fo_pool_backward", "forget_mult", "forget_mult_backward"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_backward(bench, op, packed):
    """Gradients can be taken again and again, and a saved state counts one element more."""
    cell = measure_backward(Case(SMALL, "float32", op, packed), bench)

    assert cell["errors"] == {}
    assert cell["share"] > 0
    if op == "forget_mult":
        assert cell["share_with_saved_states"] is None
    else:
        assert cell["share_with_saved_states"] > cell["share"]


def test_scans(bench, monkeypatch):
    """Right peers are timed, the nearest decides, and wrong or broken ones are only reported."""

    def time_last(f, x):
        return reference.forget_mult(f.permute(2, 0, 1), x.permute(2, 0, 1)).permute(1, 2, 0)

    def broken(f, x):
        raise RuntimeError("no compiler\nand more")

    peers = {
        "slow": ScanPeer(reference.forget_mult),
        "near": ScanPeer(time_last, time_last=True),
        "wrong": ScanPeer(lambda f, x: reference.forget_mult(f, x) + 1),
        "broken": ScanPeer(broken),
    }
    monkeypatch.setattr(kernel_op_tables, "scan_peers", lambda: peers)
    bench.times_us = {"ours": 10.0, "slow": 30.0, "near": 9.0}

    cell = measure_scans(Case(SMALL, "bfloat16", "forget_mult"), bench)

    assert cell["ratios"] == {"slow": 3.0, "near": 0.9}
    assert (cell["nearest"], cell["met"]) == ("near", False)
    assert "wrong numbers" in cell["errors"]["wrong"]
    assert cell["errors"]["broken"] == "RuntimeError: no compiler"


def test_lstm(bench):
    """The LSTM's faster mode is what ours is compared with, and our product alone."""
    bench.times_us = {
        **{"ours graph": 10.0, "ours eager": 60.0, "product graph": 6.0},
        **{"lstm graph": 200.0, "lstm eager": 180.0},
    }

    cell = kernel_layer_tables.measure_lstm(Case(Shape(32, 8, 320), "float32"), bench)

    assert cell["ratio"] == 18.0
    assert cell["ratio_eager"] == 3.0
    assert cell["ratio_product"] == 30.0
    assert cell["target"] == 16.5
    assert cell["met"] is True
    assert cell["errors"] == {}


@pytest.mark.usefixtures("channel_scan_on_cpu")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("windows", [(1,), (2, 1)], ids=str)
def test_salesforce(bench, training, windows):
    """Whole layers, and what is left of them without their products."""
    bench.times_us = {
        **{"ours graph": 30.0, "original graph": 90.0, "product graph": 20.0},
        **{"ours eager": 60.0, "original eager": 120.0, "product eager": 40.0},
    }
    case = Case(SMALL, "float32", training=training, windows=windows)

    cell = kernel_layer_tables.measure_salesforce(case, bench)

    assert cell["errors"] == {}
    assert cell["ratio_graph"] == 3.0
    assert cell["ratio_product"] == 4.5
    assert cell["ratio_eager"] == 2.0
    assert cell["ratio_as_used"] == 4.0
    assert cell["beside_product_graph"] == 7.0
    assert cell["met"] is True


@pytest.mark.usefixtures("channel_scan_on_cpu")
def test_salesforce_with_wrong_numbers(bench, monkeypatch):
    """An original that computes something else is not timed."""
    monkeypatch.setattr(
        kernel_layer_tables, "shifted_columns", lambda values, window: values.repeat(1, 1, window)
    )
    monkeypatch.setattr(kernel_layer_tables.OriginalLayer, "forward", lambda self, values: values)

    cell = kernel_layer_tables.measure_salesforce(Case(SMALL, "float32"), bench)

    assert "wrong numbers" in cell["errors"]["original"]
    assert cell["ratio"] is None
    assert cell["met"] is None


@pytest.mark.parametrize("op", ["layer", "fo_pool"])
def test_graph(bench, monkeypatch, op):
    """Ours over the empty pair, in three ways."""
    monkeypatch.setattr(kernel_layer_tables, "empty_kernel", lambda: None)
    bench.times_us = {"ours alone": 12.0, "empty pair alone": 8.0, "ours queued": 20.0}

    cell = kernel_layer_tables.measure_graph(Case(SMALL, "bfloat16", op), bench)

    assert cell["ratios"] == {"alone": 1.5, "queued": 2.0, "in a row": 1.0}
    assert cell["met"] is True


def test_fused(bench):
    """Where there is no kernel for the whole layer, the cell says so and has no ratio."""
    cell = kernel_layer_tables.measure_fused(Case(SMALL, "bfloat16"), bench)

    assert "one kernel" in cell["errors"]
    assert cell["ratio"] is None
    assert cell["met"] is None
    assert not cell["uses_one"]
    assert "not for cpu" in cell["chosen"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [((50.0, 20.0, 10.0), 4.0), ((50.0, 9.0, 10.0), 400.0), ((None, 9.0, 10.0), None)],
)
def test_beside_product(times, expected):
    """A layer as fast as its product gives a lower bound, not a division by nothing."""
    assert beside_product(*times) == expected
