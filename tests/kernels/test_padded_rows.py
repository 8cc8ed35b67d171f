"""The C library on padded rows with lengths, as ONNX Runtime calls it."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve.kernels import cpu, fo_pool
from qrnn_serve.kernels.arguments import NOTHING, rows, state
from support.pool_cases import packed, pool_inputs

LENGTHS = (3, 0, 7, 1)
LAYOUT = packed(*LENGTHS, hidden=37)
TIMESTEPS = 9


def _padded(values: torch.Tensor, batch_major: bool) -> torch.Tensor:
    """Packed rows as [T, B, C] memory, or as [B, T, C] memory seen time-major; padding is NaN."""
    batch = len(LENGTHS)
    shape = (batch, TIMESTEPS) if batch_major else (TIMESTEPS, batch)
    memory = torch.full((*shape, values.shape[-1]), float("nan"))
    view = memory.transpose(0, 1) if batch_major else memory
    for b, part in enumerate(values.split(LENGTHS)):
        view[: len(part), b] = part
    return view


def _sequences(lengths: torch.Tensor, reverse: bool) -> tuple[int, ...]:
    return 0, TIMESTEPS, len(LENGTHS), LAYOUT.hidden, reverse, 0, lengths.data_ptr(), 2, 0, 0


@pytest.mark.parametrize("batch_major", [True, False], ids=["batch-major", "time-major"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_padded_rows_equal_packed_rows(batch_major, reverse):
    """Padding moves no state, whatever it holds, and its outputs and gradients are 0."""
    gates, c0 = (t.requires_grad_() for t in pool_inputs(LAYOUT, torch.float32, True))
    expected = fo_pool(gates, c0, LAYOUT.offsets("cpu"), reverse=reverse)
    grad_h, grad_c = torch.randn(LAYOUT.shape()), torch.randn(c0.shape)
    want_gates, want_c0 = torch.autograd.grad(expected, (gates, c0), (grad_h, grad_c))
    lengths = torch.tensor(LENGTHS)
    wide, wide_grad = _padded(gates.detach(), batch_major), _padded(grad_h, batch_major)
    h, grad_gates = torch.empty_like(wide_grad), torch.empty_like(wide)
    c, grad_c0 = torch.empty_like(c0), torch.empty_like(c0)
    common = _sequences(lengths, reverse), (True, 0.0)
    ends = rows(wide), state(c0.detach())

    forward = cpu._FO_POOL.pack(*_flat(*common, *ends, rows(h), state(c)))
    backward = cpu._FO_POOL_BACKWARD.pack(
        *_flat(*common, rows(wide_grad), state(grad_c), *ends, rows(grad_gates), state(grad_c0))
    )

    assert cpu._library().qrnn_fo_pool(forward) == 0
    assert cpu._library().qrnn_fo_pool_backward(backward) == 0
    for got, packed_rows in ((h, expected[0]), (grad_gates, want_gates)):
        filled = _padded(packed_rows.detach(), batch_major)
        assert torch.equal(got, filled.nan_to_num(nan=0.0))
    assert torch.equal(c, expected[1])
    assert torch.equal(grad_c0, want_c0)


@pytest.mark.parametrize("lengths", [(3, 0, 10, 1), (3, -1, 7, 1)])
def test_lengths_outside_the_rows_are_refused(lengths):
    """A length below 0 or past the timesteps is a status of its own, and nothing is written."""
    gates = torch.zeros(TIMESTEPS, 4, 3 * LAYOUT.hidden)
    h, c = torch.full((TIMESTEPS, 4, LAYOUT.hidden), 7.0), torch.full((4, LAYOUT.hidden), 7.0)
    given = torch.tensor(lengths)
    arguments = cpu._FO_POOL.pack(
        *_flat(_sequences(given, False), (True, 0.0), rows(gates), NOTHING, rows(h), state(c))
    )

    assert cpu._library().qrnn_fo_pool(arguments) == 3
    assert (h == 7).all()
    assert (c == 7).all()


def _flat(*parts: tuple[float, ...]) -> list[float]:
    return [field for part in parts for field in part]
