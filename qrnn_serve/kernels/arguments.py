"""How tensors become the fields of the kernels' argument blocks, on the CPU and on CUDA.

Both take the same `Rows`: address, element stride of time, element stride of sequence.
"""

from __future__ import annotations

from torch import Tensor

Rows = tuple[int, int, int]

NOTHING: Rows = (0, 0, 0)


def rows(tensor: Tensor | None) -> Rows:
    """A dense [T, B, C] or packed [N, C] tensor; None is no data."""
    if tensor is None:
        return NOTHING
    if tensor.dim() == 2:
        return tensor.data_ptr(), tensor.stride(0), 0
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


def state(tensor: Tensor | None) -> Rows:
    """A state [B, H]; None is no data."""
    return NOTHING if tensor is None else (tensor.data_ptr(), 0, tensor.stride(0))


def unit(tensor: Tensor) -> Tensor:
    """The tensor, with channels side by side; the kernels take any other stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def unit_or_none(tensor: Tensor | None) -> Tensor | None:
    """`unit` of a tensor that may be left out."""
    return None if tensor is None else unit(tensor)
