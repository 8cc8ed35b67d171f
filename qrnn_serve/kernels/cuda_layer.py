"""One kernel for a whole layer at inference: the choice, and the operator on CUDA tensors.

`choose` says whether it serves a call; the layer runs it only then, and the matrix product and
`fo_pool` otherwise. Like the other operators it launches on torch's current stream, reads no device
memory and can be captured in a CUDA graph once it has run before.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels import checks
from qrnn_serve.kernels.arguments import rows, state, unit_or_none
from qrnn_serve.kernels.cuda_module import loaded_kernel
from qrnn_serve.kernels.layer_plan import (
    CHANNELS_PER_BLOCK,
    THREADS_PER_BLOCK,
    LayerPlan,
    LayerSizes,
    plan_layer,
)

# The only compute capability whose instructions the kernel uses.
ARCHITECTURE = (9, 0)

# LayerArgs of cuda_src/layer_tiles.cuh.
_ARGUMENTS = struct.Struct("=9qfiq3q2qq3q2q3q2q")
# Stands for 1 / 0: its reciprocal is exactly 0 on the GPU, and 0 times it is not NaN.
_NOTHING_KEPT = 3e38
_ELEMENTS_PER_COPY = checks.LAYER_INPUTS_MULTIPLE
_MOST_ROWS = 2**30


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernels compute a layer.

    Attributes:
        plan: Of the one kernel; None for two.
        reason: Why two; empty for one.
    """

    plan: LayerPlan | None
    reason: str = ""

    def __str__(self) -> str:
        if self.plan is None:
            return f"two kernels, matrix product and pool: {self.reason}"
        return f"one kernel: {self.plan}"


def choose(
    x: Tensor, weight: Tensor, c0: Tensor | None, offsets: Tensor | None, longest: int = 0
) -> Choice:
    """Choose the kernels of a layer with an output gate, at inference.

    Args:
        x: Inputs, [T, B, I] or packed [N, I].
        weight: [3 * H, window * I].
        c0: [B, H]; None is zeros.
        offsets: [B + 1], or None for dense input.
        longest: Timesteps of the longest sequence, or a bound; 0 when packed lengths are unknown.
    """
    if obstacle := _obstacle(x, weight, c0, offsets, longest):
        return Choice(None, obstacle)
    sizes = _sizes(x, weight, offsets, longest)
    plan = plan_layer(sizes, x.dtype, _processors(x.get_device()))
    if plan is None:
        return Choice(None, f"weights of {sizes.columns} columns do not fit in shared memory")
    if not plan.pays:
        return Choice(None, f"one would not pay: {plan}")
    return Choice(plan)


def linear_fo_pool(  # noqa: PLR0913, PLR0917  (the operator's arguments)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    previous: Tensor | None = None,
    reverse: bool = False,
    zoneout: float = 0.0,
    longest: int = 0,
) -> tuple[Tensor, Tensor]:
    """qrnn::linear_fo_pool on CUDA tensors; see `ops.linear_fo_pool`."""
    checks.check_linear_fo_pool(x, weight, bias, c0, offsets, previous, zoneout)
    capability = _capability(x.get_device())
    if capability != ARCHITECTURE:
        major, minor = capability
        raise KernelError(
            f"linear_fo_pool needs a Hopper GPU (sm_90), and {x.device} is sm_{major}{minor}"
        )
    sizes = _sizes(x, weight, offsets, longest)
    plan = plan_layer(sizes, x.dtype, _processors(x.get_device()))
    if plan is None:
        raise KernelError(
            f"linear_fo_pool: the weight has {sizes.columns} columns, too many for shared memory"
        )
    h = x.new_empty((*x.shape[:-1], sizes.hidden))
    c = x.new_empty((sizes.batch, sizes.hidden))
    if c.numel() > 0:
        # Kept until the kernel is queued; then torch may hand copies to later work of the stream.
        x, weight, previous = _aligned(x), _aligned(weight), _aligned_or_none(previous)
        bias, c0, offsets = unit_or_none(bias), unit_or_none(c0), unit_or_none(offsets)
        tickets = None
        if offsets is not None:
            sets = -(-sizes.hidden // CHANNELS_PER_BLOCK)
            tickets = torch.zeros(sets, dtype=torch.int32, device=x.device)
        keep = 1.0 - zoneout
        arguments = _ARGUMENTS.pack(
            *sizes[:3],
            reverse,
            0 if offsets is None else offsets.data_ptr(),
            0 if offsets is None else offsets.element_size(),
            sizes.inputs,
            sizes.window,
            plan.workers,
            1.0 / keep if keep > 0.0 else _NOTHING_KEPT,
            sizes.hidden % _ELEMENTS_PER_COPY == 0,
            0 if tickets is None else tickets.data_ptr(),
            *rows(x),
            *(weight.data_ptr(), weight.stride(0)),
            0 if bias is None else bias.data_ptr(),
            *_previous(previous),
            *_state(c0),
            *rows(h),
            *_state(c),
        )
        _launch(plan, x, arguments)
    return h, c


def _obstacle(
    x: Tensor, weight: Tensor, c0: Tensor | None, offsets: Tensor | None, longest: int
) -> str:
    # Asked at every call of a layer, so what is cheap and common comes first.
    if not x.is_cuda:
        return f"there is one for CUDA devices only, not for {x.device}"
    given = (x, weight) if c0 is None else (x, weight, c0)
    if x.dtype not in checks.HALF or any(tensor.dtype != x.dtype for tensor in given):
        return "one takes float16 or bfloat16, the same for inputs and weights"
    if _capability(x.get_device()) != ARCHITECTURE:
        return "one needs a Hopper GPU (sm_90)"
    if torch.is_autocast_enabled("cuda"):
        return "autocast chooses the dtypes"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return "one has no gradient"
    return _size_obstacle(x, offsets, longest)


def _size_obstacle(x: Tensor, offsets: Tensor | None, longest: int) -> str:
    if x.shape[-1] % checks.LAYER_INPUTS_MULTIPLE:
        return f"one takes multiples of {checks.LAYER_INPUTS_MULTIPLE} inputs"
    batch = x.shape[1] if offsets is None else offsets.shape[0] - 1
    if max(x.shape[0], batch) > _MOST_ROWS:
        return f"one takes at most {_MOST_ROWS} timesteps or sequences"
    if offsets is not None and longest == 0:
        return "the longest sequence is not known"
    return ""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _launch(plan: LayerPlan, like: Tensor, arguments: bytes) -> None:
    index = like.get_device()
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        loaded_kernel(index, plan.key).launch(plan.blocks, THREADS_PER_BLOCK, stream, arguments)


def _sizes(x: Tensor, weight: Tensor, offsets: Tensor | None, longest: int) -> LayerSizes:
    packed = offsets is not None
    return LayerSizes(
        timesteps=x.shape[0],
        batch=offsets.shape[0] - 1 if offsets is not None else x.shape[1],
        hidden=weight.shape[0] // 3,
        inputs=x.shape[-1],
        window=weight.shape[1] // x.shape[-1],
        longest=longest if packed else x.shape[0],
        packed=packed,
    )


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose rows start where 16 bytes can be read at once."""
    starts = tensor.data_ptr() // tensor.element_size()
    for stride in tensor.stride()[:-1]:
        starts |= stride
    if tensor.stride(-1) == 1 and starts % _ELEMENTS_PER_COPY == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _aligned_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _aligned(tensor)


def _previous(previous: Tensor | None) -> tuple[int, int, int]:
    if previous is None:
        return 0, 0, 0
    return previous.data_ptr(), previous.stride(0), previous.stride(1)


def _state(tensor: Tensor | None) -> tuple[int, int]:
    address, _, sequence_stride = state(tensor)
    return address, sequence_stride


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
