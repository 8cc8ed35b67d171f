"""Finds the built C code: in this package in a wheel, in site-packages in an editable install."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

from qrnn_serve.core.errors import KernelError

LIBRARY_NAME = "libqrnn_kernels.so"
ARCHIVE_NAME = "libqrnn_kernels.a"
_DISTRIBUTION = "qrnn-serve"


def native_library() -> Path:
    """The path of libqrnn_kernels.so, which also holds the ONNX Runtime operators.

    Raises:
        KernelError: It was not built; the message says how to build it.
    """
    return _built(LIBRARY_NAME)


def native_archive() -> Path:
    """The path of libqrnn_kernels.a: the same kernels, to be linked into another library.

    Raises:
        KernelError: It was not built; the message says how to build it.
    """
    return _built(ARCHIVE_NAME)


@functools.cache
def _built(name: str) -> Path:
    beside = Path(__file__).parent / name
    if beside.is_file():
        return beside
    for path in _installed_files(name):
        if path.is_file():
            return path
    raise KernelError(
        f"{name} was not found: the C library of the CPU kernels is not built. "
        "In a checkout run `pip install -e .` (needs CMake and a C++17 compiler); "
        "otherwise install qrnn-serve from a wheel."
    )


def _installed_files(name: str) -> list[Path]:
    # An editable install leaves the Python files in the checkout and puts what CMake installs into
    # site-packages; the distribution's record lists it.
    try:
        files = metadata.distribution(_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == name]
