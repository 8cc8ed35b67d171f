"""CPU implementation of the operators: hands pointers and strides to the C library.

The library is loaded at the first call, through ctypes, which releases the interpreter lock while a
kernel runs. Each argument block is packed by one struct.pack: every field of csrc/qrnn_kernels.h is
eight bytes.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch
from torch import Tensor

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels import checks
from qrnn_serve.kernels.arguments import rows, state, unit, unit_or_none
from qrnn_serve.kernels.checks import PoolSizes
from qrnn_serve.kernels.library import native_library

_ABI_VERSION = 1
_OK, _BAD_OFFSETS, _OUT_OF_MEMORY = 0, 2, 4
_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}

# qrnn_sequences and qrnn_parallel, then qrnn_rows of three fields each.
_SEQUENCES = "10q"
_FORGET_MULT = struct.Struct(f"={_SEQUENCES}12q")
_FORGET_MULT_BACKWARD = struct.Struct(f"={_SEQUENCES}24q")
_FO_POOL = struct.Struct(f"={_SEQUENCES}qd12q")
_FO_POOL_BACKWARD = struct.Struct(f"={_SEQUENCES}qd18q")


def forget_mult(
    f: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    offsets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """qrnn::forget_mult on CPU tensors; see `ops.forget_mult`."""
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    f, x, h0, bounds = unit(f), unit(x), unit_or_none(h0), _bounds(offsets)
    h = f.new_empty(f.shape)
    arguments = _FORGET_MULT.pack(
        *_sequences(f, sizes, bounds, reverse), *rows(f), *rows(x), *state(h0), *rows(h)
    )
    _check(_library().qrnn_forget_mult(arguments), "forget_mult", sizes, bounds)
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
    """Gradients of f, x and h0 on CPU tensors."""
    op = "forget_mult_backward"
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    checks.check_grad(op, "grad_h", grad_h, f, f.shape)
    checks.check_grad(op, "h", h, f, f.shape)
    if f.dtype in (torch.float16, torch.bfloat16):
        return _forget_mult_backward_wide(grad_h, f, x, h0, offsets, reverse)
    f, x, h, grad_h = unit(f), unit(x), unit(h), unit(grad_h)
    h0, bounds = unit_or_none(h0), _bounds(offsets)
    grad_f, grad_x = f.new_empty(f.shape), f.new_empty(f.shape)
    grad_h0 = f.new_empty((sizes.batch, sizes.hidden))
    arguments = _FORGET_MULT_BACKWARD.pack(
        *_sequences(f, sizes, bounds, reverse),
        *rows(grad_h),
        *rows(f),
        *rows(x),
        *rows(h),
        *state(h0),
        *rows(grad_f),
        *rows(grad_x),
        *state(grad_h0),
    )
    _check(_library().qrnn_forget_mult_backward(arguments), op, sizes, bounds)
    return grad_f, grad_x, grad_h0


def _forget_mult_backward_wide(
    grad_h: Tensor, f: Tensor, x: Tensor, h0: Tensor | None, offsets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # grad_f holds x_t - h_{t-1}, and h was rounded to the half type: the states are computed again.
    f_wide, x_wide, h0_wide = f.float(), x.float(), None if h0 is None else h0.float()
    h_wide = forget_mult(f_wide, x_wide, h0_wide, offsets, reverse)
    grads = forget_mult_backward(grad_h.float(), f_wide, x_wide, h_wide, h0_wide, offsets, reverse)
    return grads[0].to(f.dtype), grads[1].to(f.dtype), grads[2].to(f.dtype)


def fo_pool(
    gates: Tensor,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """qrnn::fo_pool on CPU tensors; see `ops.fo_pool`."""
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    h = gates.new_empty((*gates.shape[:-1], sizes.hidden))
    c = gates.new_empty((sizes.batch, sizes.hidden))
    fo_pool_into(h, c, gates, c0, offsets, output_gate, reverse, zoneout)
    return h, c


def fo_pool_into(
    h: Tensor,
    c: Tensor,
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> None:
    """fo_pool into contiguous tensors that are there already, of the sizes that it returns."""
    sizes = PoolSizes(gates.shape[0], *c.shape)
    gates, c0, bounds = unit(gates), unit_or_none(c0), _bounds(offsets)
    arguments = _FO_POOL.pack(
        *_sequences(gates, sizes, bounds, reverse),
        output_gate,
        zoneout,
        *rows(gates),
        *state(c0),
        *rows(h),
        *state(c),
    )
    _check(_library().qrnn_fo_pool(arguments), "fo_pool", sizes, bounds)


def fo_pool_training(
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fo_pool`, and nothing beside it: the backward on the CPU needs no more."""
    h, c = fo_pool(gates, c0, offsets, output_gate, reverse, zoneout)
    return h, c, gates.new_empty(0)


def fo_pool_backward(  # noqa: PLR0913, PLR0917  (the operator's arguments)
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of gates and c0 on CPU tensors; a gradient that is None is zeros.

    Computes all states again, so that it needs no `starts`.
    """
    op = "fo_pool_backward"
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    if grad_h is not None:
        checks.check_grad(op, "grad_h", grad_h, gates, (*gates.shape[:-1], sizes.hidden))
    if grad_c is not None:
        checks.check_grad(op, "grad_c", grad_c, gates, (sizes.batch, sizes.hidden))
    gates, c0, bounds = unit(gates), unit_or_none(c0), _bounds(offsets)
    grad_h, grad_c = unit_or_none(grad_h), unit_or_none(grad_c)
    grad_gates = gates.new_empty(gates.shape)
    grad_c0 = gates.new_empty((sizes.batch, sizes.hidden))
    arguments = _FO_POOL_BACKWARD.pack(
        *_sequences(gates, sizes, bounds, reverse),
        output_gate,
        zoneout,
        *rows(grad_h),
        *state(grad_c),
        *rows(gates),
        *state(c0),
        *rows(grad_gates),
        *state(grad_c0),
    )
    _check(_library().qrnn_fo_pool_backward(arguments), op, sizes, bounds)
    return grad_gates, grad_c0


def instruction_set() -> str:
    """The instruction set that the C library uses here: "avx512", "avx2" or "portable"."""
    return _library().qrnn_instruction_set().decode()


def select_instruction_set(name: str) -> None:
    """Use another instruction set from now on, for tests and measurements.

    Raises:
        KernelError: This build or this processor does not have it.
    """
    if _library().qrnn_select_instruction_set(name.encode()) != _OK:
        raise KernelError(f"this build or this processor has no {name!r} kernels")


@functools.cache
def _library() -> ctypes.CDLL:
    path = native_library()
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.qrnn_abi_version())
    except (OSError, AttributeError) as error:
        raise KernelError(f"cannot load the CPU kernels from {path}: {error}") from error
    if version != _ABI_VERSION:
        raise KernelError(
            f"{path} has interface version {version}, this release needs {_ABI_VERSION}; "
            "install qrnn-serve again to rebuild it"
        )
    for name in ("forget_mult", "forget_mult_backward", "fo_pool", "fo_pool_backward"):
        function = getattr(library, f"qrnn_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int32
    library.qrnn_instruction_set.restype = ctypes.c_char_p
    library.qrnn_select_instruction_set.argtypes = [ctypes.c_char_p]
    return library


def _sequences(
    like: Tensor, sizes: PoolSizes, bounds: Tensor | None, reverse: bool
) -> tuple[int, ...]:
    return (
        _DTYPE_CODES[like.dtype],
        *sizes,
        reverse,
        0 if bounds is None else bounds.data_ptr(),
        0,  # no lengths: uneven rows come packed
        torch.get_num_threads(),
        0,  # the library's own thread pool
        0,
    )


def _bounds(offsets: Tensor | None) -> Tensor | None:
    return None if offsets is None else offsets.to(torch.int64).contiguous()


def _check(status: int, op: str, sizes: PoolSizes, bounds: Tensor | None) -> None:
    if status == _OK:
        return
    if status == _BAD_OFFSETS and bounds is not None:
        checks.check_offset_values(op, bounds, sizes.timesteps)
    if status == _OUT_OF_MEMORY:
        raise KernelError(f"{op}: no memory for the cell states of one sequence, {sizes}")
    raise KernelError(f"{op}: the CPU kernel refused {sizes} with status {status}. This is a bug.")
