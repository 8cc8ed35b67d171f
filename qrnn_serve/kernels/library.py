"""Finds the built C code: in this package in a wheel, in site-packages in an editable install."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from importlib import metadata
from pathlib import Path

from qrnn_serve.core.errors import KernelError

LIBRARY_NAME = "libqrnn_kernels.so"
ARCHIVE_NAME = "libqrnn_kernels.a"
# The first CUDA release whose compiler takes the kernels.
_OLDEST_RELEASE = 12
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


@functools.cache
def load_cuda_compiler() -> None:
    """Load CUDA's run-time compiler from NVIDIA's Python packages, where the library looks for it.

    The library compiles its CUDA kernels with the NVRTC that the process has loaded, or that the
    loader finds, of a release that the driver supports; what pip installs lies where no loader
    looks. Does nothing where there is none, or no driver: then the library says so when a kernel
    is needed.
    """
    names = _compiler_names()
    if any(_loads(name, os.RTLD_NOLOAD) for name in names):
        return
    packages = importlib.util.find_spec("nvidia")
    folders = list((packages and packages.submodule_search_locations) or ())
    for name in names:
        installed = [path for folder in folders for path in Path(folder).glob(f"*/lib/{name}")]
        if any(_loads(path) for path in (name, *map(str, sorted(installed)))):
            return


def _compiler_names() -> list[str]:
    # As csrc/cuda_driver.cpp: a driver takes no code of compilers newer than itself.
    version = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    releases = range(version.value // 1000, _OLDEST_RELEASE - 1, -1)
    return [f"libnvrtc.so.{release}" for release in releases]


def _loads(name: str, mode: int = 0) -> bool:
    try:
        ctypes.CDLL(name, mode)
    except OSError:
        return False
    return True


def _installed_files(name: str) -> list[Path]:
    # An editable install leaves the Python files in the checkout and puts what CMake installs into
    # site-packages; the distribution's record lists it.
    try:
        files = metadata.distribution(_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == name]
