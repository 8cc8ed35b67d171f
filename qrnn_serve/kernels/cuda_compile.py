"""Compiles the CUDA kernels with NVRTC and keeps the result on disk. Needs no GPU.

CuPy brings the compiler; it is imported at the first use, never when this module is. Compiled code
is kept under a name made of source, options, architecture and compiler version, so an upgrade of
any of them never meets old code.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from qrnn_serve.core.errors import KernelError

logger = logging.getLogger(__name__)

SOURCE_PATH = Path(__file__).parent / "cuda_src" / "qrnn.cu"
"""The scan kernels; other sources, and the .cuh files that are their headers, lie beside it."""
CACHE_VARIABLE = "QRNN_SERVE_CACHE_DIR"
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_DIGEST_BYTES = 32
KERNEL_CODES = {
    "qrnn_forget_mult": 0,
    "qrnn_forget_mult_backward": 2,
    "qrnn_fo_pool": 3,
    "qrnn_f_pool": 4,
    "qrnn_fo_pool_backward": 6,
    "qrnn_f_pool_backward": 7,
    "qrnn_prepare": 8,
    "qrnn_window": 9,
    "qrnn_window_backward": 10,
    "qrnn_forget_mult_short": 11,
    "qrnn_fo_pool_short": 12,
    "qrnn_f_pool_short": 13,
}
"""The kernels, by their numbers in cuda_src/qrnn.cu."""
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


class Compilation(Protocol):
    """What one compilation is for. Hashable: loaded kernels are kept by it."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """A key of DTYPE_CODES."""
        ...

    @property
    def source(self) -> str:
        """Name of the file to compile, beside SOURCE_PATH."""
        ...

    @property
    def architecture_suffix(self) -> str:
        """The letter a, for instructions of one architecture alone, or nothing."""
        ...

    @property
    def defines(self) -> tuple[str, ...]:
        """Options that choose the variant."""
        ...

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory that a launch asks for; None: as the compiled code says."""
        ...


class KernelKey(NamedTuple):
    """The compilation of one scan kernel.

    Attributes:
        kernel: A key of KERNEL_CODES.
        dtype: A key of DTYPE_CODES.
        channels: Neighbouring channels of a thread.
        far: Rows of one chunk may lie 2^31 bytes apart, which needs longer arithmetic.
        row_bytes: With more than one channel: rows begin at multiples of so many bytes, 16 or 8.
    """

    kernel: str
    dtype: torch.dtype
    channels: int
    far: bool = False
    row_bytes: int = 16

    @property
    def source(self) -> str:
        """As in Compilation."""
        return SOURCE_PATH.name

    @property
    def architecture_suffix(self) -> str:
        """As in Compilation."""
        return ""

    @property
    def defines(self) -> tuple[str, ...]:
        """As in Compilation."""
        return (
            f"-DQRNN_CHANNELS={self.channels}",
            f"-DQRNN_ONLY={KERNEL_CODES[self.kernel]}",
            f"-DQRNN_ROW_BYTES={self.row_bytes}",
            *(("-DQRNN_FAR",) if self.far else ()),
        )

    @property
    def shared_bytes(self) -> None:
        """As in Compilation."""
        return None


def cupy_cuda() -> ModuleType:
    """CuPy's cuda package.

    Raises:
        KernelError: CuPy is not installed or does not load; names the extra to install.
    """
    try:
        # Heavy, and absent from CPU installs.
        from cupy import cuda  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        built_for = torch.version.cuda
        extra = "cuda12" if (built_for or "").startswith("12") else "cuda13"
        raise KernelError(
            f"the CUDA kernels need CuPy, which cannot be imported ({error}). Install it with "
            f"`pip install 'qrnn-serve[{extra}]'` (this torch is built for CUDA {built_for}), move "
            "the tensors to the CPU, or use qrnn_serve.kernels.reference"
        ) from error
    return cuda


def cupy_version() -> str:
    """CuPy's version.

    Raises:
        KernelError: CuPy is missing.
    """
    package = cupy_cuda().__name__.partition(".")[0]
    return sys.modules[package].__version__


def compiler_version() -> str:
    """NVRTC's version, for example "13.0".

    Raises:
        KernelError: CuPy finds no NVRTC.
    """
    try:
        return ".".join(str(part) for part in cupy_cuda().nvrtc.getVersion())
    except RuntimeError as error:
        if isinstance(error, KernelError):
            raise
        raise KernelError(f"CuPy finds no CUDA compiler (NVRTC): {error}") from error


def compile_kernel(key: Compilation, architecture: int) -> bytes:
    """Compile one kernel to machine code (cubin).

    Args:
        key: Which kernel.
        architecture: Compute capability without the dot, for example 90.

    Raises:
        KernelError: The compiler is missing, does not know the architecture, or refuses the source.
    """
    version = compiler_version()
    nvrtc = cupy_cuda().nvrtc
    known = nvrtc.getSupportedArchs()
    if architecture not in known:
        names = ", ".join(f"sm_{number}" for number in known)
        raise KernelError(
            f"the CUDA compiler NVRTC {version} cannot compile for sm_{architecture}; it knows "
            f"{names}. Install the CuPy extra of a CUDA release that supports this GPU"
        )
    program = nvrtc.createProgram(_whole_source(key.source), key.source, (), ())
    try:
        nvrtc.compileProgram(program, _options(key, architecture))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise KernelError(
            f"NVRTC {version} could not compile {key.source} for sm_{architecture} and "
            f"{key.kernel} of {key.dtype}: {error}\n{nvrtc.getProgramLog(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def compiled_kernel(key: Compilation, architecture: int) -> bytes:
    """`compile_kernel` through the cache on disk.

    Args:
        key: Which kernel.
        architecture: Compute capability without the dot.

    Raises:
        KernelError: As `compile_kernel`.
    """
    path = cache_directory() / _cache_name(key, architecture)
    image = _kept(path)
    if image is None:
        image = compile_kernel(key, architecture)
        _keep(path, image)
    return image


def cache_directory() -> Path:
    """Where compiled kernels are kept: QRNN_SERVE_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qrnn-serve"


def _whole_source(source: str) -> str:
    # One text with the headers in place: the cache is keyed by it, and NVRTC needs no paths.
    seen: set[str] = set()

    def read(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (SOURCE_PATH.parent / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda include: read(include[1]), text)

    return read(source)


def _options(key: Compilation, architecture: int) -> tuple[str, ...]:
    return (
        f"--gpu-architecture=sm_{architecture}{key.architecture_suffix}",
        f"-DQRNN_DTYPE={DTYPE_CODES[key.dtype]}",
        *key.defines,
        "--std=c++17",
    )


def _cache_name(key: Compilation, architecture: int) -> str:
    parts = (_whole_source(key.source), *_options(key, architecture), compiler_version())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"qrnn-sm{architecture}-{digest[:32]}.cubin"


def _kept(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    # The driver takes an address without a length, so a file cut short could take the process down.
    if hashlib.sha256(image).digest() != digest:
        logger.warning("%s is damaged: compiling the kernels again", path)
        return None
    return image


def _keep(path: Path, image: bytes) -> None:
    # Written aside and renamed, so that no process ever reads half a file.
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.write_bytes(hashlib.sha256(image).digest() + image)
        aside.replace(path)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)
        with contextlib.suppress(OSError):
            aside.unlink()
