"""The operators against the float64 reference: every dtype, layout and size, on CPU and GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qrnn_serve.kernels import fo_pool, forget_mult, reference
from support.pool_cases import (
    DEVICES,
    DTYPES,
    SEQUENCES,
    assert_near,
    dense,
    forget_inputs,
    packed,
    pool_inputs,
)

pytestmark = pytest.mark.parametrize("device", DEVICES)
# Beside SEQUENCES, widths of large layers and lengths around chunks and tiles.
SIZES = [
    *SEQUENCES,
    pytest.param(dense(3, 2, 512), id="dense-3x2x512"),
    pytest.param(dense(2, 1, 1550), id="dense-2x1x1550"),
    pytest.param(packed(9, 2, hidden=2500), id="packed-9,2x2500"),
    pytest.param(packed(7, 8, 63, 64, 65, 128, hidden=34), id="packed-tile-edges"),
]
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("forget_mult_*.npz"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_forget_mult_reproduces_the_original_outputs_and_gradients(path, dtype, device):
    """The operator equals the salesforce code, gradients too."""
    golden = {k: torch.from_numpy(v) for k, v in np.load(path).items()}
    names = [k for k in ("f", "x", "h0") if k in golden]
    leaves = [golden[k].to(device, dtype).requires_grad_() for k in names]

    out = forget_mult(*leaves)
    grads = torch.autograd.grad(out, leaves, golden["grad_out"].to(device, dtype))

    assert_near(out, golden["out"])
    for name, grad in zip(names, grads, strict=True):
        assert_near(grad, golden[f"grad_{name}"], name)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequences", SIZES)
def test_forget_mult_matches_reference(sequences, dtype, reverse, device):
    """Outputs and the gradients of all inputs are those of the reference."""
    inputs = forget_inputs(sequences, dtype)
    grad_h = torch.randn(sequences.shape()).to(dtype)
    expected_leaves = [t.double().requires_grad_() for t in inputs]
    offsets = sequences.offsets("cpu")
    expected = reference.forget_mult(*expected_leaves, offsets, reverse)
    expected_grads = torch.autograd.grad(
        expected, expected_leaves, grad_h.double(), materialize_grads=True
    )

    leaves = [t.to(device).requires_grad_() for t in inputs]
    h = forget_mult(*leaves, sequences.offsets(device), reverse)
    grads = torch.autograd.grad(h, leaves, grad_h.to(device))

    assert h.dtype == dtype
    assert h.is_contiguous()
    assert_near(h, expected, "h")
    for name, grad, want in zip(("f", "x", "h0"), grads, expected_grads, strict=True):
        assert_near(grad, want, f"grad_{name}")


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("output_gate", [True, False], ids=["fo", "f"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequences", SIZES)
def test_fo_pool_matches_reference(sequences, dtype, output_gate, reverse, device):
    """h, c and the gradients of gates and c0 are those of the reference, zoneout included."""
    gates, c0 = pool_inputs(sequences, dtype, output_gate)
    grads_out = torch.randn(sequences.shape()).to(dtype), torch.randn(c0.shape).to(dtype)
    options = (output_gate, reverse, 0.3)
    expected_leaves = [t.double().requires_grad_() for t in (gates, c0)]
    expected = reference.fo_pool(*expected_leaves, sequences.offsets("cpu"), *options)
    expected_grads = torch.autograd.grad(
        expected, expected_leaves, [g.double() for g in grads_out], materialize_grads=True
    )

    leaves = [t.to(device).requires_grad_() for t in (gates, c0)]
    got = fo_pool(*leaves, sequences.offsets(device), *options)
    grads = torch.autograd.grad(got, leaves, [g.to(device) for g in grads_out])

    for name, value, want in zip(("h", "c"), got, expected, strict=True):
        assert value.dtype == dtype
        assert value.is_contiguous()
        assert_near(value, want, name)
    for name, grad, want in zip(("gates", "c0"), grads, expected_grads, strict=True):
        assert_near(grad, want, f"grad_{name}")


@pytest.mark.parametrize(
    "layout", [dense(6, 3, 5), packed(4, 0, 3, hidden=5)], ids=["dense", "packed"]
)
def test_states_may_be_left_out(layout, device):
    """No initial state is a state of zeros, and an output that is not used needs no gradient."""
    gates, c0 = pool_inputs(layout, torch.float32, True)
    f, x, h0 = forget_inputs(layout, torch.float32)
    offsets = layout.offsets(device)
    gates = gates.to(device).requires_grad_()

    without = fo_pool(gates, None, offsets)
    with_zeros = fo_pool(gates, torch.zeros_like(c0, device=device), offsets)

    for a, b in zip(without, with_zeros, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(
        forget_mult(f.to(device), x.to(device), None, offsets),
        forget_mult(f.to(device), x.to(device), torch.zeros_like(h0, device=device), offsets),
    )
    for used in (0, 1):
        wide = gates.detach().cpu().double().requires_grad_()
        want = torch.autograd.grad(
            reference.fo_pool(wide, None, layout.offsets("cpu"))[used].sum(), wide
        )[0]
        got = torch.autograd.grad(fo_pool(gates, None, offsets)[used].sum(), gates)[0]
        assert_near(got, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_both_integer_types_and_any_stride(dtype, device):
    """int32 and int64 offsets, also as a strided view, mean the same."""
    layout = packed(3, 0, 5, hidden=7)
    gates, c0 = pool_inputs(layout, torch.float32, True)
    expected = reference.fo_pool(gates.double(), c0.double(), layout.offsets("cpu"))
    offsets = layout.offsets(device, dtype)
    spread = torch.stack([offsets, offsets + 1], dim=1)[:, 0]

    for given in (offsets, spread):
        h, c = fo_pool(gates.to(device), c0.to(device), given)
        assert_near(h, expected[0])
        assert_near(c, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_and_gradients(dtype, device):
    """Batch-major views, slices, channels that do not touch and expanded tensors are read right."""
    gates = torch.randn(3, 14, 2 * 3 * 9).to(dtype)
    views = {
        "batch-major": gates.transpose(0, 1)[..., :27],
        "every other timestep": gates[:, ::2, :27].transpose(0, 1),
        "every other channel": gates.transpose(0, 1)[..., ::2],
        "one timestep repeated": gates.transpose(0, 1)[:1, :, :27].expand(4, 3, 27),
        "one sequence repeated": gates.transpose(0, 1)[:, :1, :27].expand(14, 3, 27),
    }
    c0 = torch.randn(9, 3).to(dtype).t()
    for name, view in views.items():
        wide = view.double().detach().requires_grad_()
        expected = reference.fo_pool(wide, c0.double())
        # The gradient of a sum is one number expanded over the whole shape.
        expected_grad = torch.autograd.grad(expected[0].sum() + expected[1].sum(), wide)[0]

        moved = torch.empty_strided(view.size(), view.stride(), dtype=dtype, device=device)
        moved = moved.copy_(view) if 0 not in view.stride() else view.to(device)
        leaf = moved.detach().requires_grad_()
        got = fo_pool(leaf, c0.to(device))
        grad = torch.autograd.grad(got[0].sum() + got[1].sum(), leaf)[0]

        for value, want in zip((*got, grad), (*expected, expected_grad), strict=True):
            assert_near(value, want, name)


def test_strided_forget_mult(device):
    """f and x may have different strides, also where neighbouring sequences touch."""
    both = torch.rand(8, 4, 2 * 6)
    f, x = both[..., :6], both[..., 6:]
    h0 = torch.randn(6, 4).t()
    expected = reference.forget_mult(f.double(), x.double(), h0.double())

    both, h0 = both.to(device), h0.to(device)
    got = forget_mult(both[..., :6], both[..., 6:], h0)
    mixed = forget_mult(both[..., :6].contiguous(), both[..., 6:], h0.contiguous())

    assert_near(got, expected)
    assert torch.equal(got, mixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_of_exactly_zero_and_one(dtype, device):
    """f = 1 takes the new value exactly and f = 0 keeps the state exactly."""
    f = torch.tensor([0.0, 1.0]).repeat(20).view(40, 1, 1).expand(40, 2, 33).to(device, dtype)
    x = torch.randn(40, 2, 33).to(device, dtype)

    h = forget_mult(f, x)

    assert torch.equal(h[0], torch.zeros_like(h[0]))
    assert torch.equal(h[1::2], x[1::2])
    assert torch.equal(h[2::2], x[1:-1:2])


def test_saturated_gates_are_exact(device):
    """Pre-activations far out and infinite give gates of exactly 0 and 1."""
    far = torch.tensor([-float("inf"), -1e30, -200.0, 200.0, 1e30, float("inf")])
    z, f, o = torch.meshgrid(far, far, far, indexing="ij")
    gates = torch.cat([t.reshape(1, 1, -1) for t in (z, f, o)], dim=-1)
    c0 = torch.full((1, z.numel()), 0.25)

    h, c = fo_pool(gates.to(device), c0.to(device))

    cell = torch.where(f > 0, z.sign(), torch.tensor(0.25)).reshape(1, -1)
    assert torch.equal(c.cpu(), cell)
    assert torch.equal(h.cpu()[0], torch.where(o.reshape(1, -1) > 0, cell, 0.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "layout", [dense(6, 3, 35), packed(6, 6, 6, hidden=35)], ids=["dense", "packed"]
)
def test_one_bad_sequence_does_not_reach_another(layout, bad, device):
    """A NaN or infinity in one sequence leaves values and gradients of the others alone."""
    gates, c0 = pool_inputs(layout, torch.float32, True)
    spoilt_gates, spoilt_c0 = gates.clone(), c0.clone()
    rows = spoilt_gates.view(6, 3, -1)[:, 1] if not layout.packed else spoilt_gates[6:12]
    rows[2:4] = bad
    spoilt_c0[1] = bad
    offsets = layout.offsets(device)

    def run(given_gates, given_c0):
        leaves = [t.to(device).requires_grad_() for t in (given_gates, given_c0)]
        h, c = fo_pool(*leaves, offsets)
        grad_gates, grad_c0 = torch.autograd.grad(h.sum() + c.sum(), leaves)
        per_sequence = [
            t.view(3, 6, -1) if layout.packed else t.transpose(0, 1) for t in (h, grad_gates)
        ]
        return [*per_sequence, c, grad_c0]

    for clean, spoilt in zip(run(gates, c0), run(spoilt_gates, spoilt_c0), strict=True):
        assert torch.equal(clean[[0, 2]], spoilt[[0, 2]])


def test_infinity_in_the_recurrence_is_the_reference_s(device):
    """Infinities travel through one sequence exactly as the definition says."""
    f = torch.tensor([0.5, 0.5, 1.0, 0.5]).view(4, 1, 1).expand(4, 3, 5)
    x = torch.zeros(4, 3, 5)
    x[0, 1], x[1, 1], x[0, 2] = float("inf"), -3.0, -float("inf")

    got = forget_mult(f.to(device), x.to(device))

    torch.testing.assert_close(got.cpu(), reference.forget_mult(f, x), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "constant"])
def test_long_memory(kind, dtype, device):
    """With f near 0.002 over 10,000 timesteps no error builds up, constant gates included."""
    timesteps, hidden = 10_000, 40
    forget = torch.full((timesteps, 1, hidden), -6.2126, dtype=torch.float64)
    fresh = torch.linspace(-2, 2, hidden, dtype=torch.float64).expand(timesteps, 1, hidden)
    if kind == "random":
        forget = forget + 0.2 * torch.randn_like(forget)
        fresh = torch.randn(timesteps, 1, hidden, dtype=torch.float64)
    gates = torch.cat([fresh, forget], dim=-1).to(dtype)
    expected = reference.fo_pool(gates.double(), output_gate=False)

    got = fo_pool(gates.to(device), output_gate=False)

    for value, want in zip(got, expected, strict=True):
        assert_near(value, want)


def test_inputs_are_not_changed(device):
    """The caller's tensors are the same after the call, zoneout included."""
    layout = dense(4, 2, 6)
    gates, c0 = (t.to(device) for t in pool_inputs(layout, torch.float32, True))
    f, x, h0 = (t.to(device) for t in forget_inputs(layout, torch.float32))
    before = [t.clone() for t in (gates, c0, f, x, h0)]

    first = fo_pool(gates, c0, zoneout=0.25)
    second = fo_pool(gates, c0, zoneout=0.25)
    forget_mult(f, x, h0)

    for old, new in zip(before, (gates, c0, f, x, h0), strict=True):
        assert torch.equal(old, new)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("zoneout", [0.0, 0.25, 1.0])
def test_zoneout_scales_the_gate_once(zoneout, device):
    """f of 0.8 acts as 0.8 * (1 - p), and p = 1 keeps the state."""
    gates = torch.tensor([30.0, float(np.log(4.0))], device=device).view(1, 1, 2)

    _, c = fo_pool(gates, output_gate=False, zoneout=zoneout)

    assert c.item() == pytest.approx(0.8 * (1 - zoneout), abs=1e-6)


@pytest.mark.parametrize("output_gate", [True, False])
def test_a_sequence_scores_the_same_alone_and_in_any_batch(output_gate, device):
    """Packed, dense or alone, the same rows give the same bits."""
    lengths = (5, 1, 9, 9)
    layout = packed(*lengths, hidden=37)
    gates, c0 = (t.to(device) for t in pool_inputs(layout, torch.float32, output_gate))
    h, c = fo_pool(gates, c0, layout.offsets(device), output_gate)

    start = 0
    for b, length in enumerate(lengths):
        rows = gates[start : start + length]
        alone_h, alone_c = fo_pool(rows[:, None], c0[b : b + 1], None, output_gate)
        assert torch.equal(alone_h[:, 0], h[start : start + length])
        assert torch.equal(alone_c[0], c[b])
        start += length
    pair = gates[6:24].view(2, 9, -1).transpose(0, 1)
    pair_h, pair_c = fo_pool(pair, c0[2:], None, output_gate)
    assert torch.equal(pair_h.transpose(0, 1).reshape(18, -1), h[6:])
    assert torch.equal(pair_c, c[2:])
