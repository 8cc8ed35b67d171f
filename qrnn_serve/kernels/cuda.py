"""CUDA implementation of the operators: plans, scratch memory, and arguments of the kernels.

Every launch goes to torch's current stream of the tensors' device, and is asynchronous like torch's
own. Nothing here reads device memory or synchronises, so the operators can be captured in a CUDA
graph once they have run before on that device with tensors of that dtype and alignment. Scratch
memory is torch's and belongs to one call, so calls on several streams share none.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from qrnn_serve.kernels import checks
from qrnn_serve.kernels.arguments import NOTHING, rows, state, unit, unit_or_none
from qrnn_serve.kernels.checks import PoolSizes
from qrnn_serve.kernels.cuda_compile import KernelKey
from qrnn_serve.kernels.cuda_module import loaded_kernel
from qrnn_serve.kernels.plan import (
    CHUNK_TIMESTEPS,
    CHUNKS,
    ROW_BYTES,
    THREADS_PER_BLOCK,
    Plan,
    compute_dtype,
    magic,
    plan_scan,
    starts_shape,
    widest_channels,
)

# Fields of the argument blocks in cuda_src: Sequences and Work, then Rows of three fields each.
_FORGET_MULT = struct.Struct("=13q2Q12qq")
_FORGET_MULT_BACKWARD = struct.Struct("=13q2Q24qq")
_FO_POOL = struct.Struct("=13q2Qd12qq")
_FO_POOL_BACKWARD = struct.Struct("=13q2Qd18qq")
_PREPARE = struct.Struct("=7q4q")
_SLOT_BYTES = 32
# From here on the timesteps of a chunk are further apart than 32 bits can say.
_FAR_BYTES = 2**31 // CHUNK_TIMESTEPS


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
    call = _Call(f, sizes, offsets, reverse, (f, x, h0))
    plan = call.plan("qrnn_forget_mult")
    call.launch(
        plan,
        _FORGET_MULT.pack(*call.head(plan), *rows(f), *rows(x), *state(h0), *rows(h), 0),
    )
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
    call = _Call(f, sizes, offsets, reverse, (grad_h, f, x, h, h0))
    starts = None
    if f.dtype != compute_dtype(f.dtype):
        # h was rounded, so the states are computed again.
        plan = call.plan("qrnn_forget_mult")
        starts = _starts(f, sizes, offsets)
        call.launch(
            plan,
            _FORGET_MULT.pack(
                *call.head(plan), *rows(f), *rows(x), *state(h0), *NOTHING, starts.data_ptr()
            ),
        )
    plan = call.plan("qrnn_forget_mult_backward")
    arguments = _FORGET_MULT_BACKWARD.pack(
        *call.head(plan),
        *rows(grad_h),
        *rows(f),
        *rows(x),
        *rows(h),
        *state(h0),
        *rows(grad_f),
        *rows(grad_x),
        *state(grad_h0),
        _address(starts),
    )
    call.launch(plan, arguments)
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
    return _fo_pool(gates, c0, offsets, output_gate, reverse, zoneout, sizes, None)


def fo_pool_training(
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fo_pool`, and the states before all chunks, which its backward needs."""
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    starts = _starts(gates, sizes, offsets)
    h, c = _fo_pool(gates, c0, offsets, output_gate, reverse, zoneout, sizes, starts)
    return h, c, starts


def _fo_pool(
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
    sizes: PoolSizes,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    gates, c0, offsets = unit(gates), unit_or_none(c0), unit_or_none(offsets)
    h = gates.new_empty((*gates.shape[:-1], sizes.hidden))
    c = gates.new_empty((sizes.batch, sizes.hidden))
    call = _Call(gates, sizes, offsets, reverse, (gates, c0))
    plan = call.plan("qrnn_fo_pool" if output_gate else "qrnn_f_pool")
    ends = *rows(h), *state(c), _address(starts)
    arguments = _FO_POOL.pack(*call.head(plan), zoneout, *rows(gates), *state(c0), *ends)
    call.launch(plan, arguments)
    return h, c


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
    """Gradients of gates and c0 on CUDA tensors; a gradient that is None is zeros.

    `starts` are those of `fo_pool_training`; without them one more pass makes them.
    """
    op = "fo_pool_backward"
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    if grad_h is not None:
        checks.check_grad(op, "grad_h", grad_h, gates, (*gates.shape[:-1], sizes.hidden))
    if grad_c is not None:
        checks.check_grad(op, "grad_c", grad_c, gates, (sizes.batch, sizes.hidden))
    gates, c0, offsets = unit(gates), unit_or_none(c0), unit_or_none(offsets)
    grad_h, grad_c = unit_or_none(grad_h), unit_or_none(grad_c)
    grad_gates = gates.new_empty(gates.shape)
    grad_c0 = gates.new_empty((sizes.batch, sizes.hidden))
    call = _Call(gates, sizes, offsets, reverse, (grad_h, grad_c, gates, c0))
    if starts is not None:
        checks.check_starts(op, starts, gates, starts_shape(sizes, offsets is not None))
    else:
        plan = call.plan("qrnn_f_pool")
        starts = _starts(gates, sizes, offsets)
        nothing = (*NOTHING, *NOTHING, starts.data_ptr())
        call.launch(
            plan,
            _FO_POOL.pack(*call.head(plan), zoneout, *rows(gates), *state(c0), *nothing),
        )
    plan = call.plan("qrnn_fo_pool_backward" if output_gate else "qrnn_f_pool_backward")
    arguments = _FO_POOL_BACKWARD.pack(
        *call.head(plan),
        zoneout,
        *rows(grad_h),
        *state(grad_c),
        *rows(gates),
        *state(c0),
        *rows(grad_gates),
        *state(grad_c0),
        starts.data_ptr(),
    )
    call.launch(plan, arguments)
    return grad_gates, grad_c0


def _starts(like: Tensor, sizes: PoolSizes, offsets: Tensor | None) -> Tensor:
    """Memory for the states before all chunks."""
    shape = starts_shape(sizes, offsets is not None)
    return like.new_empty(shape, dtype=compute_dtype(like.dtype))


class _Call:
    """What the launches of one call of an operator share."""

    def __init__(
        self,
        like: Tensor,
        sizes: PoolSizes,
        offsets: Tensor | None,
        reverse: bool,
        given: tuple[Tensor | None, ...],
    ) -> None:
        self._like = like
        self._sizes = sizes
        self._offsets = offsets
        self._reverse = reverse
        # Tensors made here are aligned as soon as H is, and no further apart than 3 * B * H.
        widest = widest_channels(like.dtype) if _has_wide_copies(like.get_device()) else 1
        self._row_bytes = row_bytes(given, sizes.hidden)
        self._channels = widest if self._row_bytes else 1
        apart = max(3 * sizes.batch * sizes.hidden, *(_apart(tensor) for tensor in given))
        self._far = apart * like.element_size() >= _FAR_BYTES
        self._memory: list[Tensor] = []

    def plan(self, kernel: str) -> Plan:
        like = self._like
        return plan_scan(
            kernel,
            self._sizes,
            self._offsets is not None,
            like.dtype,
            self._channels,
        )

    def head(self, plan: Plan) -> tuple[int, ...]:
        """The fields that every argument block starts with."""
        words = slots = claimed = 0
        if plan.single_tiles:
            words, slots, claimed = self._prepared(plan)
        tiles_each = plan.tiles // self._sizes.batch if self._sizes.batch else 0
        return (
            *self._sequences(),
            *(plan.channel_tiles, plan.blocks, words, slots, tiles_each, claimed),
            *(magic(plan.channel_tiles), magic(self._sizes.batch)),
        )

    def _sequences(self) -> tuple[int, ...]:
        offsets = self._offsets
        where = (0, 0) if offsets is None else (offsets.data_ptr(), offsets.element_size())
        # The last says that rows are padded, which tensors of torch come without.
        return (*self._sizes, self._reverse, *where, 0)

    def _prepared(self, plan: Plan) -> tuple[int, int, int]:
        # Zeros: a word for each slot and channel, and how many tiles are claimed. Memory is kept
        # until the kernel is queued; then torch may hand it to later work of the stream.
        count = plan.slots * self._sizes.hidden + 1
        if self._offsets is None:
            words = self._like.new_zeros(count, dtype=torch.int64)
            self._memory.append(words)
            return words.data_ptr(), 0, words.data_ptr() + 8 * (count - 1)
        words = self._like.new_empty(count, dtype=torch.int64)
        slots = self._like.new_empty((plan.slots, _SLOT_BYTES), dtype=torch.uint8)
        self._memory += [words, slots]
        where = words.data_ptr(), slots.data_ptr(), words.data_ptr() + 8 * (count - 1)
        arguments = _PREPARE.pack(*self._sequences(), where[1], plan.slots, where[0], count)
        # A warp for each slot, and enough of them to fill memory at its speed.
        blocks = max(-(-plan.slots // CHUNKS), 4 * _processors(self._like.get_device()))
        key = KernelKey("qrnn_prepare", torch.float32, 1)
        launch(key, blocks, self._like.get_device(), arguments)
        return where

    def launch(self, plan: Plan, arguments: bytes) -> None:
        if plan.blocks > 0:
            # One compilation for all rows where it makes no difference.
            together = self._row_bytes if plan.channels > 1 else ROW_BYTES[0]
            key = KernelKey(plan.kernel, self._like.dtype, plan.channels, self._far, together)
            launch(key, plan.blocks, self._like.get_device(), arguments, plan.threads)


def launch(
    key: KernelKey, blocks: int, index: int, arguments: bytes, threads: int = THREADS_PER_BLOCK
) -> None:
    """Queue a kernel on the current stream of a device.

    Args:
        key: Which kernel.
        blocks: At most; never more than the device holds, since more would find nothing to do.
        index: Of the device.
        arguments: The kernel's argument block.
        threads: Of a block.
    """
    if torch.cuda.current_device() == index:
        _launch_on_current(key, blocks, index, arguments, threads)
    else:
        with torch.cuda.device(index):
            _launch_on_current(key, blocks, index, arguments, threads)


def _launch_on_current(
    key: KernelKey, blocks: int, index: int, arguments: bytes, threads: int
) -> None:
    # torch.cuda.current_stream makes an object, which takes longer than the launch.
    stream = torch._C._cuda_getCurrentRawStream(index)
    kernel = loaded_kernel(index, key)
    blocks = min(blocks, kernel.resident_blocks(threads))
    kernel.launch(blocks, threads, stream, arguments)


def row_bytes(tensors: tuple[Tensor | None, ...], hidden: int) -> int:
    """The most of ROW_BYTES that all rows begin at multiples of; 0 for neither.

    Args:
        tensors: With channels side by side; None has no rows.
        hidden: Channels of tensors still to be made.
    """
    together = 0
    for tensor in tensors:
        if tensor is not None:
            itemsize = tensor.element_size()
            together |= tensor.data_ptr() | hidden * itemsize
            for stride in tensor.stride()[:-1]:
                together |= stride * itemsize
    return next((size for size in ROW_BYTES if together % size == 0), 0)


@functools.cache
def _has_wide_copies(index: int) -> bool:
    """Whether a device copies into shared memory by itself, and has room for two channels."""
    return torch.cuda.get_device_capability(index) >= (8, 0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _apart(tensor: Tensor | None) -> int:
    """Elements from a timestep to the next."""
    return 0 if tensor is None or tensor.dim() < 2 else tensor.stride(0)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
