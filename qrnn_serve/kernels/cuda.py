"""CUDA implementation of the operators: hands pointers and strides to the kernels.

Every launch goes to torch's current stream of the tensors' device, and is asynchronous like torch's
own. Nothing here reads device memory or synchronises, so the operators can be captured in a CUDA
graph once they have run before on that device and dtype.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from qrnn_serve.kernels import checks
from qrnn_serve.kernels.arguments import rows, state, unit, unit_or_none
from qrnn_serve.kernels.checks import PoolSizes
from qrnn_serve.kernels.cuda_module import kernel_module, launch_shape

# Fields of the argument blocks in cuda_src/qrnn.cu: Sequences, then Rows of three fields each.
_FORGET_MULT = struct.Struct("=6q12q")
_FORGET_MULT_BACKWARD = struct.Struct("=6q24qq")
_FO_POOL = struct.Struct("=6qd12q")
_FO_POOL_BACKWARD = struct.Struct("=6qd18qq")


def forget_mult(
    f: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    offsets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """qrnn::forget_mult on CUDA tensors; see `ops.forget_mult`."""
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    f, x, h0, offsets = unit(f), unit(x), unit_or_none(h0), unit_or_none(offsets)
    h = f.new_empty(f.shape)
    arguments = _FORGET_MULT.pack(
        *_sequences(sizes, offsets, reverse), *rows(f), *rows(x), *state(h0), *rows(h)
    )
    _launch("qrnn_forget_mult", f, sizes, arguments)
    return h


def forget_mult_backward(
    grad_h: Tensor,
    f: Tensor,
    x: Tensor,
    h: Tensor,
    h0: Tensor | None,
    offsets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of f, x and h0 on CUDA tensors."""
    op = "forget_mult_backward"
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    checks.check_grad(op, "grad_h", grad_h, f, f.shape)
    checks.check_grad(op, "h", h, f, f.shape)
    f, x, h, grad_h = unit(f), unit(x), unit(h), unit(grad_h)
    h0, offsets = unit_or_none(h0), unit_or_none(offsets)
    grad_f, grad_x = f.new_empty(f.shape), f.new_empty(f.shape)
    grad_h0 = f.new_empty((sizes.batch, sizes.hidden))
    # grad_f holds x_t - h_{t-1}, and h of a half type was rounded: its states are computed again.
    cells = None if f.dtype == _compute_dtype(f) else f.new_empty(f.shape, dtype=torch.float32)
    arguments = _FORGET_MULT_BACKWARD.pack(
        *_sequences(sizes, offsets, reverse),
        *rows(grad_h),
        *rows(f),
        *rows(x),
        *rows(h),
        *state(h0),
        *rows(grad_f),
        *rows(grad_x),
        *state(grad_h0),
        0 if cells is None else cells.data_ptr(),
    )
    _launch("qrnn_forget_mult_backward", f, sizes, arguments)
    return grad_f, grad_x, grad_h0


def fo_pool(
    gates: Tensor,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """qrnn::fo_pool on CUDA tensors; see `ops.fo_pool`."""
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    gates, c0, offsets = unit(gates), unit_or_none(c0), unit_or_none(offsets)
    h = gates.new_empty((*gates.shape[:-1], sizes.hidden))
    c = gates.new_empty((sizes.batch, sizes.hidden))
    arguments = _FO_POOL.pack(
        *_sequences(sizes, offsets, reverse),
        zoneout,
        *rows(gates),
        *state(c0),
        *rows(h),
        *state(c),
    )
    _launch("qrnn_fo_pool" if output_gate else "qrnn_f_pool", gates, sizes, arguments)
    return h, c


def fo_pool_backward(
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of gates and c0 on CUDA tensors; a gradient that is None is zeros."""
    op = "fo_pool_backward"
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    hidden_shape = (*gates.shape[:-1], sizes.hidden)
    if grad_h is not None:
        checks.check_grad(op, "grad_h", grad_h, gates, hidden_shape)
    if grad_c is not None:
        checks.check_grad(op, "grad_c", grad_c, gates, (sizes.batch, sizes.hidden))
    gates, c0, offsets = unit(gates), unit_or_none(c0), unit_or_none(offsets)
    grad_h, grad_c = unit_or_none(grad_h), unit_or_none(grad_c)
    grad_gates = gates.new_empty(gates.shape)
    grad_c0 = gates.new_empty((sizes.batch, sizes.hidden))
    cells = gates.new_empty(hidden_shape, dtype=_compute_dtype(gates))
    arguments = _FO_POOL_BACKWARD.pack(
        *_sequences(sizes, offsets, reverse),
        zoneout,
        *rows(grad_h),
        *state(grad_c),
        *rows(gates),
        *state(c0),
        *rows(grad_gates),
        *state(grad_c0),
        cells.data_ptr(),
    )
    name = "qrnn_fo_pool_backward" if output_gate else "qrnn_f_pool_backward"
    _launch(name, gates, sizes, arguments)
    return grad_gates, grad_c0


def _launch(name: str, like: Tensor, sizes: PoolSizes, arguments: bytes) -> None:
    lines = sizes.batch * sizes.hidden
    if lines == 0:
        return
    index = like.get_device()
    if torch.cuda.current_device() == index:
        _launch_on_current(name, like, lines, arguments)
    else:
        with torch.cuda.device(index):
            _launch_on_current(name, like, lines, arguments)


def _launch_on_current(name: str, like: Tensor, lines: int, arguments: bytes) -> None:
    index = like.get_device()
    stream = torch.cuda.current_stream(index).cuda_stream
    kernel_module(index, like.dtype).launch(name, launch_shape(lines), stream, arguments)


def _sequences(sizes: PoolSizes, offsets: Tensor | None, reverse: bool) -> tuple[int, ...]:
    if offsets is None:
        return (*sizes, reverse, 0, 0)
    return (*sizes, reverse, offsets.data_ptr(), offsets.element_size())


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
