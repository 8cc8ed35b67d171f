"""What the kernels are compared with computes the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kernel_peers
from kernel_peers import OriginalLayer, difference, expected_scan, stepwise_difference
from qrnn_serve import QRNN
from qrnn_serve.kernels import reference


@pytest.mark.usefixtures("channel_scan_on_cpu")
@pytest.mark.parametrize("windows", [(1,), (2,), (2, 1)], ids=str)
def test_original_layers(windows):
    """The original's computation and ours agree in outputs and gradients."""
    ours = QRNN(5, 5, len(windows), window=windows, dtype=torch.float64)
    original = nn.Sequential(*(OriginalLayer(layer.linear, layer.window) for layer in ours.layers))
    values = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, 3, 5, dtype=torch.float64)
    wanted = [values, *ours.parameters()]

    expected = ours(values)[0]
    got = original(values)

    assert stepwise_difference(got.detach(), expected.detach()) is None
    for one, other in zip(
        torch.autograd.grad(got, wanted, grad),
        torch.autograd.grad(expected, wanted, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("timesteps", [1, 2, 33])
def test_associative_scan(timesteps):
    """torch's scan of (1 - f, f * x) pairs is the recurrence."""
    f = torch.rand(timesteps, 3, 4, dtype=torch.float64)
    x = torch.randn(timesteps, 3, 4, dtype=torch.float64)

    got = kernel_peers.associative_scan(f, x, "generic")

    torch.testing.assert_close(got, reference.forget_mult(f, x), rtol=0, atol=1e-12)


def test_expected_scan_is_a_part_of_the_whole():
    """The first and last sequence and the outer channels are compared, values unchanged."""
    f, x = torch.rand(6, 4, 100), torch.randn(6, 4, 100)

    expected, part = expected_scan(f, x)

    assert expected.shape == (6, 2, 64)
    assert difference(part(reference.forget_mult(f, x)), expected) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spoiled", [0.1, float("nan")])
def test_wrong_numbers_are_seen(dtype, spoiled):
    """One wrong or missing value is enough."""
    expected = torch.randn(6, 2, 8, dtype=torch.float64)
    got = expected.to(dtype)
    assert difference(got, got.double()) is None

    got[3, 1, 2] += spoiled

    assert "wrong numbers" in (difference(got, expected) or "")


@pytest.mark.usefixtures("channel_scan_on_cpu")
def test_stepwise_rounding_has_its_own_limit():
    """bfloat16 layers of many roundings pass; a wrong one does not."""
    ours = QRNN(32, 32, dtype=torch.bfloat16)
    original = OriginalLayer(ours.layers[0].linear, 1)
    values = torch.randn(9, 4, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = ours(values)[0]
        got = original(values)

    assert stepwise_difference(got, expected) is None
    assert stepwise_difference(1.1 * got, expected) is not None
