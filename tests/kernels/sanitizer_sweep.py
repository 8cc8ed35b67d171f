"""Runs every CUDA kernel on small inputs, for compute-sanitizer: see test_sanitizer.py.

The numbers are checked as well, so that a kernel that was not reached cannot pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qrnn_serve.kernels import cuda_layer, cuda_window, fo_pool, forget_mult, reference
from qrnn_serve.kernels.ops import linear_fo_pool
from qrnn_serve.model.window import window_columns
from support.pool_cases import HALF_DTYPES, assert_near, dense, forget_inputs, packed, pool_inputs

# Longer than a block's share, so that blocks hand the state on; a tail; an empty sequence.
# Short enough for one block a sequence, of one tile and of two; rows that begin at 8 bytes.
LAYOUTS = [
    *(dense(330, 3, 33), dense(5, 4, 64), packed(0, 300, 70, 1, hidden=34)),
    *(dense(100, 2, 40), dense(300, 5, 36)),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def sweep_scans() -> None:
    """Forward and backward of both scans, both ways."""
    for layout in LAYOUTS:
        offsets = layout.offsets("cpu")
        on_gpu = None if offsets is None else offsets.cuda()
        for dtype in DTYPES:
            for reverse in (False, True):
                gates, c0 = pool_inputs(layout, dtype, True)
                leaves = gates.cuda().requires_grad_(), c0.cuda().requires_grad_()
                h, c = fo_pool(leaves[0], leaves[1], on_gpu, reverse=reverse)
                (h.sum() + c.sum()).backward()
                expected = reference.fo_pool(gates.double(), c0.double(), offsets, True, reverse)
                assert_near(h.detach(), expected[0])
                f, x, h0 = forget_inputs(layout, dtype)
                leaves = f.cuda().requires_grad_(), x.cuda().requires_grad_()
                h = forget_mult(leaves[0], leaves[1], h0.cuda(), on_gpu, reverse)
                h.sum().backward()
                expected = reference.forget_mult(
                    f.double(), x.double(), h0.double(), offsets, reverse
                )
                assert_near(h.detach(), expected)


def sweep_windows() -> None:
    """The columns of a window, and their gradient."""
    for layout in LAYOUTS:
        offsets = layout.offsets("cpu")
        on_gpu = None if offsets is None else offsets.cuda()
        for dtype in DTYPES:
            values = torch.randn(layout.shape()).to(dtype)
            previous = torch.randn(layout.batch, 2, layout.hidden).to(dtype)
            leaves = values.cuda().requires_grad_(), previous.cuda().requires_grad_()
            columns, carried = cuda_window.window_columns(leaves[0], on_gpu, leaves[1], 2, False)
            (columns.sum() + carried.sum()).backward()
            expected = window_columns(values, offsets, previous, 3, False)
            assert torch.equal(columns.cpu(), expected[0])
            assert torch.equal(carried.cpu(), expected[1])


def sweep_layers() -> None:
    """The kernel of a whole layer, where the GPU has it."""
    if torch.cuda.get_device_capability() != cuda_layer.ARCHITECTURE:
        return
    for dtype in HALF_DTYPES:
        for lengths in ((70, 0, 129), (3,)):
            x = torch.randn(sum(lengths), 64, dtype=dtype)
            weight = torch.randn(3 * 40, 64).div(8).to(dtype)
            bias, c0 = torch.randn(3 * 40, dtype=dtype), torch.randn(len(lengths), 40, dtype=dtype)
            offsets = torch.tensor([0, *lengths]).cumsum(0)
            x_gpu, weight_gpu, bias_gpu, c0_gpu, offsets_gpu = (
                t.cuda() for t in (x, weight, bias, c0, offsets)
            )
            h, _ = linear_fo_pool(
                x_gpu, weight_gpu, bias_gpu, c0_gpu, offsets_gpu, longest=max(lengths)
            )
            gates = F.linear(x.double(), weight.double(), bias.double())
            assert_near(h, reference.fo_pool(gates, c0.double(), offsets, True)[0])


if __name__ == "__main__":
    torch.manual_seed(0)
    sweep_scans()
    sweep_windows()
    sweep_layers()
    print("swept")
