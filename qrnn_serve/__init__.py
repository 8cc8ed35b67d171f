"""Train, export and serve Quasi-Recurrent Neural Networks.

The public names are imported when they are first used, so that `qrnn_serve.core` and the client's
installation need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qrnn_serve.model.checkpoint import load, save
    from qrnn_serve.model.layer import QRNNLayer
    from qrnn_serve.model.sequence_model import SequenceModel
    from qrnn_serve.model.stack import QRNN

__all__ = ["QRNN", "QRNNLayer", "SequenceModel", "load", "onnx_ops_library", "save"]

_HOMES = {
    "QRNN": "qrnn_serve.model.stack",
    "QRNNLayer": "qrnn_serve.model.layer",
    "SequenceModel": "qrnn_serve.model.sequence_model",
    "load": "qrnn_serve.model.checkpoint",
    "save": "qrnn_serve.model.checkpoint",
}


def onnx_ops_library() -> str:
    """Path of the library to register with ONNX Runtime for the custom operators.

    It serves the CPU and the CUDA provider. For the latter, NVIDIA's run-time compiler is loaded
    too if it was installed by pip.

    Raises:
        KernelError: It was not built; the message says how to build it.
    """
    from qrnn_serve.kernels.library import load_cuda_compiler, native_library

    load_cuda_compiler()
    return str(native_library())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qrnn_serve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
