"""The reference against the original implementation's vectors and against written-out formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qrnn_serve.core.tolerances import GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.kernels import reference

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("forget_mult_*.npz"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_reference_reproduces_the_original_outputs_and_gradients(path):
    """The definition equals the salesforce code in float64, gradients too."""
    golden = {k: torch.from_numpy(v) for k, v in np.load(path).items()}
    leaves = [golden[k].requires_grad_() for k in ("f", "x", "h0") if k in golden]

    out = reference.forget_mult(*leaves)
    grads = torch.autograd.grad(out, leaves, golden["grad_out"])

    assert (out - golden["out"]).abs().max() <= GOLDEN_FLOAT64_MAX_ABS
    for name, grad in zip(("f", "x", "h0"), grads, strict=False):
        assert (grad - golden[f"grad_{name}"]).abs().max() <= GOLDEN_FLOAT64_MAX_ABS


def test_golden_vectors_of_the_recurrence_are_there():
    """An empty folder must not pass for agreement."""
    assert len(GOLDEN) == 3


def test_forget_gate_multiplies_the_new_value():
    """The orientation is the salesforce one, not the paper's."""
    f = torch.tensor([0.5, 0.25, 1.0, 0.0], dtype=torch.float64).view(4, 1, 1)
    x = torch.tensor([1.0, -1.0, 2.0, 5.0], dtype=torch.float64).view(4, 1, 1)

    h = reference.forget_mult(f, x, torch.full((1, 1), 0.4, dtype=torch.float64))

    torch.testing.assert_close(
        h.flatten(), torch.tensor([0.7, 0.275, 2.0, 2.0], dtype=torch.float64)
    )


def test_fo_pool_is_the_written_out_formula():
    """Gate order Z, F, O; zoneout scales f once; h is the gated cell, c the bare one."""
    z, f, o = 0.3, 0.8, -1.2
    gates = torch.tensor([z, f, o], dtype=torch.float64).view(1, 1, 3)

    h, c = reference.fo_pool(gates, torch.full((1, 1), 0.5, dtype=torch.float64), zoneout=0.25)

    forget = 0.75 / (1 + np.exp(-f))
    cell = forget * np.tanh(z) + (1 - forget) * 0.5
    assert c.item() == pytest.approx(cell, abs=1e-15)
    assert h.item() == pytest.approx(cell / (1 + np.exp(-o)), abs=1e-15)


def test_reverse_is_the_flipped_run_of_the_flipped_input():
    """Running backwards over time equals flipping, running forwards and flipping back."""
    gates = torch.randn(5, 2, 12, dtype=torch.float64)
    c0 = torch.randn(2, 4, dtype=torch.float64)

    h, c = reference.fo_pool(gates, c0, reverse=True)
    flipped_h, flipped_c = reference.fo_pool(gates.flip(0), c0)

    assert torch.equal(h, flipped_h.flip(0))
    assert torch.equal(c, flipped_c)


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_rows_are_their_own_runs(reverse):
    """Each packed sequence equals running it alone, and an empty one keeps its state."""
    gates = torch.randn(6, 8, dtype=torch.float64)
    c0 = torch.randn(3, 4, dtype=torch.float64)
    offsets = torch.tensor([0, 2, 2, 6])

    h, c = reference.fo_pool(gates, c0, offsets, output_gate=False, reverse=reverse)

    for b, (start, stop) in enumerate([(0, 2), (2, 2), (2, 6)]):
        alone_h, alone_c = reference.fo_pool(
            gates[start:stop, None], c0[b : b + 1], None, False, reverse
        )
        assert torch.equal(h[start:stop], alone_h[:, 0])
        assert torch.equal(c[b], alone_c[0])
    assert torch.equal(c[1], c0[1])
