"""Wrong arguments are refused by name, before anything runs."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve.core.errors import DTypeError, InputError
from qrnn_serve.kernels import fo_pool, forget_mult

GATES = torch.zeros(4, 2, 9)
ROWS = torch.zeros(5, 9)
F = torch.rand(4, 2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: forget_mult(F.half(), F),
            r"x and f must have one dtype, got x torch\.float32 and f torch\.float16",
            id="mixed",
        ),
        pytest.param(lambda: forget_mult(F.long(), F.long()), "got torch.int64", id="integer"),
        pytest.param(
            lambda: fo_pool(GATES.to(torch.complex64)), "got torch.complex64", id="complex"
        ),
        pytest.param(
            lambda: fo_pool(GATES, torch.zeros(2, 3).double()),
            r"c0 and gates must have one dtype, got c0 torch\.float64 and gates torch\.float32",
            id="state",
        ),
        pytest.param(
            lambda: fo_pool(ROWS, None, torch.tensor([0.0, 5.0])),
            "offsets must be int32 or int64, got torch.float32",
            id="offsets",
        ),
    ],
)
def test_dtypes_are_named(call, message):
    """A wrong or mixed dtype is a TypeError that names what came, both sides of it."""
    with pytest.raises(DTypeError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: forget_mult(F, F[:3]), r"got x \[3, 2, 3\] and f \[4, 2, 3\]", id="x"),
        pytest.param(lambda: forget_mult(F[0], F[0]), "packed .N, H. with offsets", id="rank"),
        pytest.param(
            lambda: forget_mult(F, F, F[0].t()),
            r"h0 must be \[B, H\] = \[2, 3\], got \[3, 2\]",
            id="h0",
        ),
        pytest.param(lambda: fo_pool(GATES[..., :8]), r"3\*H .* got 8", id="width"),
        pytest.param(
            lambda: fo_pool(GATES, output_gate=False), r"2\*H with output_gate=False, got 9", id="f"
        ),
        pytest.param(lambda: fo_pool(GATES, zoneout=1.5), "0 to 1, got 1.5", id="zoneout"),
        pytest.param(lambda: fo_pool(GATES, zoneout=float("nan")), "0 to 1, got nan", id="nan"),
        pytest.param(
            lambda: fo_pool(GATES, torch.zeros(1, 3)), r"c0 must be \[B, H\] = \[2, 3\]", id="c0"
        ),
        pytest.param(
            lambda: fo_pool(GATES, None, torch.tensor([0, 4])), r"packed \[N, 3\*H\]", id="dense"
        ),
        pytest.param(
            lambda: fo_pool(ROWS, None, torch.tensor([[0, 5]])),
            r"offsets must be \[B \+ 1\]",
            id="2d",
        ),
        pytest.param(
            lambda: fo_pool(ROWS, None, torch.zeros(0, dtype=torch.int64)),
            r"offsets must be \[B \+ 1\]",
            id="no-offsets",
        ),
        pytest.param(
            lambda: fo_pool(GATES, torch.zeros(2, 3, device="meta")),
            "gates is on cpu and c0 on meta",
            id="devices",
        ),
    ],
)
def test_shapes_and_devices_are_named(call, message):
    """A size that does not fit names the dimensions, what was expected and what came."""
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        pytest.param([1, 5], "must start at 0, got 1", id="start"),
        pytest.param([0, 4], "must end at N = 5, the rows of the packed input, got 4", id="short"),
        pytest.param([0, 6], "must end at N = 5, the rows of the packed input, got 6", id="long"),
        pytest.param([0, 4, 2, 5], "must not decrease, got 4 at 1 and 2 at 2", id="down"),
        pytest.param([0, 9, 5], "must not decrease, got 9 at 1 and 5 at 2", id="past-the-end"),
        pytest.param([0, -1, 5], "must not decrease, got 0 at 0 and -1 at 1", id="negative"),
        pytest.param([0], "must end at N = 5, the rows of the packed input, got 0", id="none"),
    ],
)
def test_offsets_that_do_not_fit(offsets, message, dtype):
    """Offsets that do not rise from 0 to N name the first position that is wrong."""
    offsets = torch.tensor(offsets, dtype=dtype)

    with pytest.raises(InputError, match=message):
        fo_pool(ROWS, None, offsets)
    with pytest.raises(InputError, match=message):
        forget_mult(ROWS, ROWS, None, offsets)


def test_backward_checks_its_gradient():
    """A gradient of another shape or dtype is refused by name."""
    backward = torch.ops.qrnn.fo_pool_backward.default
    with pytest.raises(InputError, match=r"grad_h must be \[4, 2, 3\], got \[4, 2, 2\]"):
        backward(F[..., :2], None, GATES, None, None, True, False, 0.0)
    with pytest.raises(DTypeError, match="grad_c"):
        backward(None, F[0].double(), GATES, None, None, True, False, 0.0)
    with pytest.raises(InputError, match="grad_h must be"):
        torch.ops.qrnn.forget_mult_backward(F[:2], F, F, F, None, None, False)


@pytest.mark.gpu
def test_devices_that_differ_are_named():
    """Tensors on two devices name both."""
    with pytest.raises(InputError, match="f is on cuda:0 and x on cpu"):
        forget_mult(F.cuda(), F)
    with pytest.raises(InputError, match="f is on cpu and x on cuda:0"):
        forget_mult(F, F.cuda())
    with pytest.raises(InputError, match="gates is on cuda:0 and offsets on cpu"):
        fo_pool(ROWS.cuda(), None, torch.tensor([0, 5]))


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[1, 5], [0, 9, 5], [0, 3, 1, 5], [-4, 2, 5], [0, 2, 4]])
def test_wrong_offsets_on_a_gpu_give_nan(offsets):
    """They cannot be read without stopping the stream, so the sequences they break come out NaN."""
    rows = torch.randn(5, 9, device="cuda")
    guarded = torch.zeros(64, 9, device="cuda")
    guarded[:5] = rows

    h, c = fo_pool(guarded[:5], None, torch.tensor(offsets, device="cuda"))

    assert h.shape == (5, 3)
    assert c.isnan().any()
    assert torch.equal(guarded[5:], torch.zeros_like(guarded[5:]))
