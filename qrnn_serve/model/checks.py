"""What a module is called with is checked once, at the door, with errors that say what to do."""

import warnings
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from qrnn_serve.core.errors import DTypeError, InputError
from qrnn_serve.model.scripting import autocast_is_on


def check_input(
    input: Tensor | PackedSequence, width: int, weight: Tensor, batch_first: bool = False
) -> None:
    """Check rank, width, dtype and device of a module's input.

    Raises:
        InputError: A rank, size or device does not fit.
        DTypeError: A dtype does not fit.
    """
    packed = isinstance(input, PackedSequence)
    tensor = input.data if packed else input
    order = "[batch, time, input]" if batch_first else "[time, batch, input]"
    if not packed and tensor.dim() not in (2, 3):
        raise InputError(
            f"input: expected {order} or one sequence [time, input], got shape {list(tensor.shape)}"
        )
    if tensor.shape[-1] != width:
        raise InputError(
            f"input: expected width {width} on the last axis of {order}, got {tensor.shape[-1]} in "
            f"shape {list(tensor.shape)}"
        )
    check_like_weights("input", tensor, weight)


def check_like_weights(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Check that a tensor from the caller fits the weights.

    Under autocast any floating dtype fits: the matrix product casts both.

    Raises:
        DTypeError: Another dtype than the weights.
        InputError: Another device.
    """
    if tensor.device != weight.device:
        raise InputError(
            f"{name}: it is on {tensor.device} and the module on {weight.device}; "
            "move one of them with .to(device)"
        )
    if tensor.dtype == weight.dtype:
        return
    if autocast_is_on(weight) and tensor.is_floating_point():
        return
    raise DTypeError(
        f"{name}: expected {weight.dtype} like the module, got {tensor.dtype}; convert the tensor, "
        "or use torch.autocast for mixed precision"
    )


def warn_if_use_cuda_contradicts(module: Any, weight: Tensor) -> None:
    """Tell old code once that its `use_cuda` is not what decides. Called by a module's forward."""
    if module.use_cuda is None:
        return
    told, module.use_cuda = module.use_cuda, None
    if told != weight.is_cuda:
        warnings.warn(
            f"use_cuda={told} has no effect: the module is on {weight.device}, and the kernel is "
            "chosen by the device; move the module with .to(device) and leave use_cuda out",
            UserWarning,
            # The caller of the module: past this function, two of forward and two of torch.
            stacklevel=6,
        )
