"""When an operator may be called without torch's dispatcher.

The dispatcher reaches an implementation in Python by way of two more Python functions, which takes
longer than launching a kernel. Where nothing listens on the way (no tracing, no fake or wrapped
tensors, no mode, no compiler) the results are the same without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEY = torch._C.DispatchKey
_KEYS_OF_PLAIN_TENSORS = (
    *(_KEY.CPU, _KEY.CUDA, _KEY.ADInplaceOrView),
    *(_KEY.AutogradCPU, _KEY.AutogradCUDA, _KEY.AutocastCPU, _KEY.AutocastCUDA),
)
_KEYS_OF_EAGER_THREADS = (_KEY.BackendSelect, _KEY.ADInplaceOrView)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _other_keys(keys: tuple[torch._C.DispatchKey, ...]) -> int:
    mask = 0
    for key in keys:
        mask |= torch._C.DispatchKeySet(key).raw_repr()
    return ~mask


_OTHER_TENSORS = _other_keys(_KEYS_OF_PLAIN_TENSORS)
_OTHER_THREADS = _other_keys(_KEYS_OF_EAGER_THREADS)


def goes_straight(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher would do no more than choose by device and by gradient.

    Args:
        *tensors: All tensors of a call, on CPU or CUDA; None is none.
    """
    # First, since a compiler cannot trace the rest.
    if torch.compiler.is_compiling():
        return False
    if torch._C._dispatch_tls_local_include_set().raw_repr() & _OTHER_THREADS:
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES
            or torch._C._dispatch_keys(tensor).raw_repr() & _OTHER_TENSORS
        ):
            return False
    return not torch._C._is_torch_function_mode_enabled()
