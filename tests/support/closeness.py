"""How far two tensors are apart. Shapes and dtypes must agree, and NaN is never close."""

from __future__ import annotations

import math

import torch


def max_abs(actual, expected) -> float:
    """Largest absolute difference, in float64."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert actual.shape == expected.shape, f"{list(actual.shape)} is not {list(expected.shape)}"
    if actual.numel() == 0:
        return 0.0
    difference = actual.detach().cpu().double() - expected.detach().cpu().double()
    worst = difference.abs().max().item()
    return float("inf") if math.isnan(worst) else worst


def relative_norm(actual, expected) -> float:
    """|actual - expected| / |expected|, in float64."""
    assert actual.shape == expected.shape, f"{list(actual.shape)} is not {list(expected.shape)}"
    wide = expected.detach().cpu().double()
    ratio = ((actual.detach().cpu().double() - wide).norm() / wide.norm()).item()
    return float("inf") if math.isnan(ratio) else ratio
