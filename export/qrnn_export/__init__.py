"""Export a QRNN to TorchScript, ONNX or torch.export, and prove that its numbers stayed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qrnn_export.errors import ParityError
    from qrnn_export.exporter import ExportReport, export
    from qrnn_export.options import ExportOptions, ImportHints
    from qrnn_export.verification import verify

__all__ = ["ExportOptions", "ExportReport", "ImportHints", "ParityError", "export", "verify"]

_HOMES = {
    "ExportOptions": "qrnn_export.options",
    "ExportReport": "qrnn_export.exporter",
    "ImportHints": "qrnn_export.options",
    "ParityError": "qrnn_export.errors",
    "export": "qrnn_export.exporter",
    "verify": "qrnn_export.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qrnn_export' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
