"""The window of a layer on CUDA tensors, and its gradient: one kernel each.

`model.window` has the same in torch's operators, for compiled, scripted and exported models; a test
compares the two.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from qrnn_serve.kernels import cuda
from qrnn_serve.kernels.arguments import Rows, rows, unit, unit_or_none
from qrnn_serve.kernels.cuda_compile import KernelKey
from qrnn_serve.kernels.plan import ROW_BYTES, THREADS_PER_BLOCK, widest_channels

# WindowArgs and WindowBackwardArgs of cuda_src/window.cuh: Sequences, lags, four times Rows.
_ARGUMENTS = struct.Struct("=7qq12q")


def window_columns(
    values: Tensor, offsets: Tensor | None, previous: Tensor | None, lags: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """As `model.window.window_columns`, differentiable once in values and previous.

    Args:
        values: Inputs, [T, B, I], or packed [N, I] with `offsets`.
        offsets: [B + 1] int32 or int64, or None for dense.
        previous: The inputs before the first timestep, oldest first, [B, lags, I]; None is zeros.
        lags: Timesteps before its own that a timestep sees, at least 1.
        reverse: Run each sequence from its last timestep to its first.

    Returns:
        The columns, [T, B, (1 + lags) * I] or [N, ...], and the inputs that the timestep after the
        last would need, [B, lags, I].
    """
    given = (values, previous)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return _Window.apply(values, offsets, previous, lags, reverse)
    return _columns(values, offsets, previous, lags, reverse)


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        values: Tensor,
        offsets: Tensor | None,
        previous: Tensor | None,
        lags: int,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(offsets)
        ctx.options = values.shape, lags, reverse
        ctx.set_materialize_grads(False)
        return _columns(values, offsets, previous, lags, reverse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_columns: Tensor | None, grad_carried: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        like = grad_carried if grad_columns is None else grad_columns
        if like is None:
            return (None,) * 5
        shape, lags, reverse = ctx.options
        grad_columns, grad_carried = unit_or_none(grad_columns), unit_or_none(grad_carried)
        grad_values = like.new_empty(shape)
        batch = shape[1] if offsets is None else offsets.shape[0] - 1
        grad_previous = None
        if ctx.needs_input_grad[2]:
            grad_previous = like.new_empty((batch, lags, shape[-1]))
        tensors = (grad_columns, grad_carried, grad_values, grad_previous)
        _launch("qrnn_window_backward", grad_values, offsets, lags, reverse, tensors)
        return grad_values, None, grad_previous, None, None


def _columns(
    values: Tensor, offsets: Tensor | None, previous: Tensor | None, lags: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    values, previous = unit(values), unit_or_none(previous)
    width = values.shape[-1]
    batch = values.shape[1] if offsets is None else offsets.shape[0] - 1
    columns = values.new_empty((*values.shape[:-1], (1 + lags) * width))
    carried = values.new_empty((batch, lags, width))
    tensors = (values, previous, columns, carried)
    _launch("qrnn_window", values, offsets, lags, reverse, tensors)
    return columns, carried


def _launch(
    kernel: str,
    like: Tensor,
    offsets: Tensor | None,
    lags: int,
    reverse: bool,
    tensors: tuple[Tensor | None, Tensor | None, Tensor, Tensor | None],
) -> None:
    """The first and third tensor have rows, the others places beside sequences."""
    width = like.shape[-1]
    batch = like.shape[1] if offsets is None else offsets.shape[0] - 1
    each, beside, other, other_beside = tensors
    offsets = unit_or_none(offsets)
    where = (0, 0) if offsets is None else (offsets.data_ptr(), offsets.element_size())
    arguments = _ARGUMENTS.pack(
        *(like.shape[0], batch, width, reverse, *where, 0, lags),
        *rows(each),
        *_places(beside),
        *rows(other),
        *_places(other_beside),
    )
    together = cuda.row_bytes(tensors, width)
    channels = widest_channels(like.dtype) if together else 1
    copied = together // like.element_size() if channels > 1 else 1
    items = (like.shape[:-1].numel() + batch * lags) * (width // copied)
    if items:
        blocks = -(-items // THREADS_PER_BLOCK)
        key = KernelKey(kernel, like.dtype, channels, False, together or ROW_BYTES[0])
        cuda.launch(key, blocks, like.get_device(), arguments)


def _places(tensor: Tensor | None) -> Rows:
    """[B, lags, I]: time_stride is that of the lags; None is no data."""
    if tensor is None:
        return 0, 0, 0
    return tensor.data_ptr(), tensor.stride(1), tensor.stride(0)
