"""The window kernels: on the host, and on a GPU, against the same in torch's operators."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve.kernels import cuda_window
from qrnn_serve.model.window import window_columns
from support.pool_cases import dense, packed

LAYOUTS = [
    pytest.param(dense(6, 3, 5), id="dense-6x3x5"),
    pytest.param(dense(1, 2, 8), id="dense-1x2x8"),
    pytest.param(dense(0, 2, 8), id="dense-0x2x8"),
    pytest.param(dense(9, 0, 8), id="dense-9x0x8"),
    pytest.param(dense(40, 7, 24), id="dense-40x7x24"),
    pytest.param(packed(4, 0, 3, 1, 2, 70, hidden=3), id="packed-uneven"),
    pytest.param(packed(*[0, 1, 2, 3, 9] * 30, hidden=16), id="packed-150"),
]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the kernels run: as plain C++, or on a GPU."""
    if request.param == "cuda":
        return "cuda"
    request.getfixturevalue("on_host")
    return "cpu"


def _cases(layout, dtype, lags, device):
    values = torch.randn(layout.shape()).to(dtype)
    offsets = layout.offsets("cpu")
    batch = layout.shape()[1] if offsets is None else len(offsets) - 1
    previous = torch.randn(batch, lags, values.shape[-1]).to(dtype)
    return values.to(device), None if offsets is None else offsets.to(device), previous.to(device)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lags", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_and_gradients_are_those_of_torch(layout, lags, dtype, reverse, device):
    """The same bits forward; gradients as in float64, with and without inputs from before."""
    values, offsets, previous = _cases(layout, dtype, lags, device)
    leaves = [tensor.cpu().double().requires_grad_() for tensor in (values, previous)]
    cpu_offsets = None if offsets is None else offsets.cpu()
    want = window_columns(leaves[0], cpu_offsets, leaves[1], 1 + lags, reverse)
    grads = [torch.randn(part.shape).to(dtype) for part in want]
    wide = [grad.double() for grad in grads]
    want_grads = torch.autograd.grad(want, leaves, wide, materialize_grads=True)

    own = [tensor.requires_grad_() for tensor in (values, previous)]
    got = cuda_window.window_columns(own[0], offsets, own[1], lags, reverse)
    got_grads = torch.autograd.grad(got, own, [grad.to(device) for grad in grads])

    for part, expected in zip(got, want, strict=True):
        assert torch.equal(part.cpu().double(), expected)
    for grad, expected in zip(got_grads, want_grads, strict=True):
        # Summed in the compute type and rounded once.
        limit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}[dtype]
        assert grad.dtype == dtype
        assert torch.all((grad.cpu().double() - expected).abs() <= limit * (1 + expected.abs()))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_from_before_is_zeros(layout, reverse, device):
    """No previous inputs are inputs of exactly 0, beside NaN too."""
    values, offsets, previous = _cases(layout, torch.float32, 2, device)
    values = torch.full_like(values, float("nan"))
    zeros = torch.zeros_like(previous)

    with torch.no_grad():
        got = cuda_window.window_columns(values, offsets, None, 2, reverse)
        want = cuda_window.window_columns(values, offsets, zeros, 2, reverse)

    for part, expected in zip(got, want, strict=True):
        assert torch.equal(part.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_strides_and_alignment_do_not_matter(device):
    """Views of wider tensors, and rows that begin between multiples of 16 bytes."""
    whole = torch.randn(5, 3, 40).to(device)
    for values in (whole[..., 1:33], whole[..., 8:16], whole.transpose(0, 1), whole[::2]):
        fresh = values.contiguous()
        previous = torch.randn(3 if values.shape[1] == 3 else 5, 1, values.shape[-1]).to(device)
        got = cuda_window.window_columns(values, None, previous, 1, False)
        want = cuda_window.window_columns(fresh, None, previous, 1, False)
        assert all(map(torch.equal, got, want))
        assert torch.equal(got[0][1:, :, values.shape[-1] :], fresh[:-1])


@pytest.mark.parametrize("offsets", [[5, 9], [0, 9, 4], [0, 4, 1, 9], [0, -7, 20], [0, 2, 3]])
def test_wrong_offsets_give_nan_and_touch_nothing_else(offsets, device):
    """Wrong offsets on a GPU cannot be refused; what they spoil is NaN."""
    values = torch.randn(9, 8).to(device)

    columns, carried = cuda_window.window_columns(
        values, torch.tensor(offsets).to(device), None, 1, False
    )

    assert columns.isnan().any() or carried.isnan().any()


def test_only_one_gradient_may_come(device):
    """A model that uses the columns alone, or what is carried alone."""
    values = torch.randn(6, 2, 8).to(device).requires_grad_()
    for used in (0, 1):
        parts = cuda_window.window_columns(values, None, None, 1, False)
        grad = torch.autograd.grad(parts[used].sum(), values)[0]
        if used == 0:
            assert torch.equal(grad[:-1], torch.full_like(grad[:-1], 2.0))
            assert torch.equal(grad[-1], torch.ones_like(grad[-1]))
        else:
            assert torch.equal(grad[-1], torch.ones_like(grad[-1]))
            assert not grad[:-1].any()
