"""Finds the C library: in this package in a wheel, in site-packages in an editable install."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

from qrnn_serve.core.errors import KernelError

LIBRARY_NAME = "libqrnn_kernels.so"
_DISTRIBUTION = "qrnn-serve"


@functools.cache
def native_library() -> Path:
    """The path of libqrnn_kernels.so, which also holds the ONNX Runtime operators.

    Raises:
        KernelError: It was not built; the message says how to build it.
    """
    beside = Path(__file__).parent / LIBRARY_NAME
    if beside.is_file():
        return beside
    for path in _installed_files():
        if path.is_file():
            return path
    raise KernelError(
        f"{LIBRARY_NAME} was not found: the C library of the CPU kernels is not built. "
        "In a checkout run `pip install -e .` (needs CMake and a C++17 compiler); "
        "otherwise install qrnn-serve from a wheel."
    )


def _installed_files() -> list[Path]:
    # An editable install leaves the Python files in the checkout and puts what CMake installs into
    # site-packages; the distribution's record lists it.
    try:
        files = metadata.distribution(_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == LIBRARY_NAME]
