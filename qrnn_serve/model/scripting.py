"""Questions that eager Python and TorchScript answer in different ways. All can be scripted."""

import torch
from torch import Tensor


def values_can_be_read(tensor: Tensor) -> bool:
    """Whether looking at the values waits for no GPU and breaks no compiled graph."""
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():  # pyright: ignore[reportPrivateImportUsage]  (documented by torch)
        return False
    return tensor.device.type == "cpu"


def autocast_is_on(tensor: Tensor) -> bool:
    """Whether torch.autocast will cast this tensor; a scripted model takes its own dtype only."""
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  (documented by torch)
        return False
    else:  # noqa: RET505  (TorchScript skips the branch only when it is written out)
        kind = tensor.device.type
        # Asked of another kind, for example "meta", torch raises.
        return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as text; TorchScript itself knows dtypes as numbers."""
    name = "another dtype"
    if dtype == torch.float32:
        name = "float32"
    elif dtype == torch.float64:
        name = "float64"
    elif dtype == torch.float16:
        name = "float16"
    elif dtype == torch.bfloat16:
        name = "bfloat16"
    elif dtype == torch.int64:
        name = "int64"
    elif dtype == torch.int32:
        name = "int32"
    return name
