"""What the operators take: every argument is checked once, at the door, with named dimensions.

Only sizes, dtypes and devices are looked at here, so the same checks run on real and on fake
tensors. The values of `offsets` are checked on the host by `check_offset_values`, for CPU offsets
only: reading GPU offsets would stop the stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qrnn_serve.core.errors import DTypeError, InputError

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HALF = (torch.float16, torch.bfloat16)
LAYER_INPUTS_MULTIPLE = 8
"""qrnn::linear_fo_pool copies so many elements at once."""


class PoolSizes(NamedTuple):
    """Sizes of one call.

    Attributes:
        timesteps: T of dense input, N of packed input.
        batch: Sequences B.
        hidden: Channels H.
    """

    timesteps: int
    batch: int
    hidden: int


def check_forget_mult(f: Tensor, x: Tensor, h0: Tensor | None, offsets: Tensor | None) -> PoolSizes:
    """Check the arguments of qrnn::forget_mult.

    Raises:
        DTypeError: An integer or unsupported dtype, or dtypes that differ.
        InputError: Ranks, sizes or devices that do not fit together.
    """
    _check_values("forget_mult", "f", f, "H", offsets)
    _check_like("forget_mult", "x", x, "f", f)
    if x.shape != f.shape:
        raise InputError(
            f"forget_mult: x must have the shape of f, got x {list(x.shape)} and f {list(f.shape)}"
        )
    batch = f.shape[1] if offsets is None else offsets.shape[0] - 1
    sizes = PoolSizes(f.shape[0], batch, f.shape[-1])
    if h0 is not None:
        _check_state("forget_mult", "h0", h0, "f", f, sizes)
    return sizes


def check_fo_pool(
    gates: Tensor, c0: Tensor | None, offsets: Tensor | None, output_gate: bool, zoneout: float
) -> PoolSizes:
    """Check the arguments of qrnn::fo_pool.

    Raises:
        DTypeError: An integer or unsupported dtype, or dtypes that differ.
        InputError: Ranks, sizes, devices or zoneout that do not fit.
    """
    count = 3 if output_gate else 2
    _check_values("fo_pool", "gates", gates, f"{count}*H", offsets)
    width = gates.shape[-1]
    if width % count:
        raise InputError(
            f"fo_pool: the last dimension of gates must be {count}*H with "
            f"output_gate={output_gate}, got {width}, which is not a multiple of {count}"
        )
    if not 0.0 <= zoneout <= 1.0:
        raise InputError(f"fo_pool: zoneout must be from 0 to 1, got {zoneout}")
    batch = gates.shape[1] if offsets is None else offsets.shape[0] - 1
    sizes = PoolSizes(gates.shape[0], batch, width // count)
    if c0 is not None:
        _check_state("fo_pool", "c0", c0, "gates", gates, sizes)
    return sizes


def check_linear_fo_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    c0: Tensor | None,
    offsets: Tensor | None,
    previous: Tensor | None,
    zoneout: float,
) -> PoolSizes:
    """Check the arguments of qrnn::linear_fo_pool.

    Raises:
        DTypeError: Not a half type, or dtypes that differ.
        InputError: Ranks, sizes, devices or zoneout that do not fit.
    """
    op = "linear_fo_pool"
    _check_values(op, "x", x, "I", offsets)
    if x.dtype not in HALF:
        raise DTypeError(f"{op}: x must be float16 or bfloat16, got {x.dtype}")
    width = x.shape[-1]
    if width == 0 or width % LAYER_INPUTS_MULTIPLE:
        raise InputError(f"{op}: I must be a multiple of {LAYER_INPUTS_MULTIPLE}, got {width}")
    _check_like(op, "weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[0] % 3 or weight.shape[1] % width or not weight.shape[1]:
        raise InputError(
            f"{op}: weight must be [3*H, window*I] with I = {width}, got {list(weight.shape)}"
        )
    if not 0.0 <= zoneout <= 1.0:
        raise InputError(f"{op}: zoneout must be from 0 to 1, got {zoneout}")
    batch = x.shape[1] if offsets is None else offsets.shape[0] - 1
    sizes = PoolSizes(x.shape[0], batch, weight.shape[0] // 3)
    if bias is not None:
        _check_shape(op, "bias", bias, x, (weight.shape[0],))
    if previous is not None:
        _check_shape(op, "previous", previous, x, (batch, weight.shape[1] // width - 1, width))
    if c0 is not None:
        _check_state(op, "c0", c0, "x", x, sizes)
    return sizes


def check_grad(op: str, name: str, grad: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """Check one incoming gradient of a backward operator.

    Raises:
        InputError: It does not have the shape, dtype or device of what it is the gradient of.
    """
    if tuple(grad.shape) != tuple(shape):
        raise InputError(f"{op}: {name} must be {list(shape)}, got {list(grad.shape)}")
    _check_like(op, name, grad, "the forward input", like)


def check_starts(op: str, starts: Tensor, like: Tensor, shape: tuple[int, int, int]) -> None:
    """Check the states that a forward kept for its backward.

    Raises:
        InputError: They are not those of a forward with these sizes, dtype and device.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    fits = starts.dtype == dtype and starts.device == like.device and starts.is_contiguous()
    if not fits or tuple(starts.shape) != shape:
        raise InputError(
            f"{op}: starts must be what fo_pool_training returned for these gates, contiguous "
            f"{list(shape)} of {dtype} on {like.device}, got {list(starts.shape)} of "
            f"{starts.dtype} on {starts.device}"
        )


def check_offset_values(op: str, offsets: Tensor, timesteps: int) -> None:
    """Check that CPU `offsets` start at 0, never go down and end at N.

    Raises:
        InputError: They do not; the message names the first position that is wrong.
    """
    if int(offsets[0]) != 0:
        raise InputError(f"{op}: offsets must start at 0, got {int(offsets[0])}")
    if int(offsets[-1]) != timesteps:
        raise InputError(
            f"{op}: offsets must end at N = {timesteps}, the rows of the packed input, "
            f"got {int(offsets[-1])}"
        )
    down = (offsets[1:] < offsets[:-1]).nonzero()
    if len(down):
        b = int(down[0])
        raise InputError(
            f"{op}: offsets must not decrease, got {int(offsets[b])} at {b} "
            f"and {int(offsets[b + 1])} at {b + 1}"
        )


def _check_values(op: str, name: str, tensor: Tensor, width: str, offsets: Tensor | None) -> None:
    if tensor.dtype not in FLOATING:
        raise DTypeError(
            f"{op}: {name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}"
        )
    if offsets is None:
        if tensor.dim() != 3:
            raise InputError(
                f"{op}: {name} must be [T, B, {width}], or packed [N, {width}] with offsets, "
                f"got {tensor.dim()} dimensions {list(tensor.shape)} without offsets"
            )
        return
    if tensor.dim() != 2:
        raise InputError(
            f"{op}: with offsets, {name} must be packed [N, {width}], "
            f"got {tensor.dim()} dimensions {list(tensor.shape)}"
        )
    if offsets.dtype not in (torch.int64, torch.int32):
        raise DTypeError(f"{op}: offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise InputError(
            f"{op}: offsets must be [B + 1] with at least the entry 0, got {list(offsets.shape)}"
        )
    if offsets.device != tensor.device:
        raise InputError(
            f"{op}: {name} is on {tensor.device} and offsets on {offsets.device}; "
            "move them to one device"
        )


def _check_like(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise DTypeError(
            f"{op}: {name} and {other_name} must have one dtype, "
            f"got {name} {tensor.dtype} and {other_name} {other.dtype}"
        )
    if tensor.device != other.device:
        raise InputError(
            f"{op}: {other_name} is on {other.device} and {name} on {tensor.device}; "
            "move them to one device"
        )


def _check_shape(op: str, name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    _check_like(op, name, tensor, "x", like)
    if tuple(tensor.shape) != shape:
        raise InputError(f"{op}: {name} must be {list(shape)}, got {list(tensor.shape)}")


def _check_state(
    op: str, name: str, state: Tensor, other_name: str, other: Tensor, sizes: PoolSizes
) -> None:
    _check_like(op, name, state, other_name, other)
    if state.dim() != 2 or state.shape[0] != sizes.batch or state.shape[1] != sizes.hidden:
        raise InputError(
            f"{op}: {name} must be [B, H] = [{sizes.batch}, {sizes.hidden}], "
            f"got {list(state.shape)}"
        )
