"""The pool kernels: reference, operators, and one implementation a device."""

from qrnn_serve.kernels.library import native_library
from qrnn_serve.kernels.ops import fo_pool, forget_mult

__all__ = ["fo_pool", "forget_mult", "native_library"]
