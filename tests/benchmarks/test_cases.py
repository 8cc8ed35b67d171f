"""What is measured: lengths, traffic, figures and targets."""

from __future__ import annotations

import pytest

import kernel_cases
from kernel_cases import Case, Shape, draw_lengths, paper_speedup, pool_target


@pytest.mark.parametrize("batch", [1, 2, 8, 256])
@pytest.mark.parametrize("mean", [1, 7, 512])
def test_lengths_have_the_mean_and_the_range(batch, mean):
    """Drawn lengths add up to the dense batch's N and stay between 1 and twice the mean."""
    lengths = draw_lengths(batch, mean, seed=3)

    assert sum(lengths) == batch * mean
    assert len(lengths) == batch
    assert all(1 <= length <= 2 * mean for length in lengths)


def test_lengths_are_uneven_and_the_same_every_time():
    """They spread over the range, and the seed fixes them."""
    lengths = draw_lengths(256, 512, seed=3)

    assert min(lengths) < 64
    assert max(lengths) > 960
    assert lengths == draw_lengths(256, 512, seed=3)


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("fo_pool", "float32", 4 * 4),
        ("fo_pool", "bfloat16", 4 * 2),
        ("fo_pool_backward", "float32", 7 * 4),
        ("forget_mult", "float16", 3 * 2),
        ("forget_mult_backward", "float32", 5 * 4),
    ],
)
def test_traffic(op, dtype, expected):
    """Each input is read once and each output written once."""
    case = Case(Shape(5, 3, 2), dtype, op)

    assert case.traffic_bytes(kernel_cases.FLOOR_ELEMENTS[op]) == 5 * 3 * 2 * expected


def test_paper_figures():
    """The corners of the paper's grid."""
    assert paper_speedup(Shape(32, 8, 320)) == 5.5
    assert paper_speedup(Shape(512, 8, 320)) == 16.9
    assert paper_speedup(Shape(32, 256, 320)) == 1.4
    assert paper_speedup(Shape(512, 256, 320)) == 1.3
    assert {len(row) for row in kernel_cases.PAPER_SPEEDUPS.values()} == {5}
    assert tuple(kernel_cases.PAPER_SPEEDUPS) == kernel_cases.GRID_BATCHES


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((512, 256, 1024), "float32", 0.95),
        ((2048, 64, 2560), "float16", 0.85),
        ((8192, 8, 1024), "float32", 0.70),
        ((32768, 1, 1024), "bfloat16", 0.60),
        ((512, 64, 1024), "float32", None),
        ((512, 8, 320), "float32", None),
    ],
)
def test_pool_targets(shape, dtype, expected):
    """Large and long shapes have a share to reach."""
    assert pool_target(Shape(*shape), dtype) == expected


@pytest.mark.parametrize(
    ("cases", "whole"),
    [
        (kernel_cases.pool_cases, 72),
        (kernel_cases.backward_cases, 108),
        (kernel_cases.lstm_cases, 60),
        (kernel_cases.salesforce_cases, 168),
        (kernel_cases.scan_cases, 12),
        (kernel_cases.graph_cases, 5),
        (kernel_cases.fused_cases, 20),
    ],
)
def test_cells(cases, whole):
    """A quick run has some of the cells, every cell a name of its own."""
    labels = [case.label() for case in cases(False)]

    assert len(labels) == whole
    assert len(set(labels)) == whole
    assert {case.label() for case in cases(True)} <= set(labels)
