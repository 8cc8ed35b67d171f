"""CUDA implementation: not yet here."""

from __future__ import annotations

from typing import Any

from qrnn_serve.core.errors import KernelError


def _missing(*arguments: Any) -> Any:
    raise KernelError("the CUDA kernels are not built yet")


forget_mult = forget_mult_backward = fo_pool = fo_pool_backward = _missing
