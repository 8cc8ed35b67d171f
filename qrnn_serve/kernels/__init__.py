"""The pool kernels: reference, operators, and one implementation a device."""

from qrnn_serve.kernels.diagnostics import describe, self_check
from qrnn_serve.kernels.library import native_library
from qrnn_serve.kernels.ops import fo_pool, forget_mult

__all__ = ["describe", "fo_pool", "forget_mult", "native_library", "self_check"]
