"""The CUDA source is compiled for real GPUs, and what was compiled is kept on disk."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels import cuda_compile
from qrnn_serve.kernels.cuda_compile import KernelKey

SOURCE = cuda_compile.SOURCE_PATH


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(
    ("architecture", "code", "channels"),
    [
        *((75, 0, 1), (75, 2, 2), (75, 3, 1), (80, 0, 1), (86, 3, 1), (89, 2, 2)),
        *((90, 0, 1), (90, 1, 1), (90, 1, 2), (90, 2, 2), (90, 3, 1), (100, 1, 2), (120, 0, 2)),
    ],
)
def test_nvcc_compiles_the_source(architecture, code, channels, tmp_path):
    """The source is CUDA that nvcc takes without a warning, and all shared memory is counted."""
    command = [
        *("nvcc", "-std=c++17", "-Werror", "all-warnings", f"-arch=sm_{architecture}"),
        *(f"-DQRNN_DTYPE={code}", f"-DQRNN_CHANNELS={channels}", "--resource-usage"),
        *("-cubin", "-o", str(tmp_path / "out.cubin"), str(SOURCE)),
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    symbols = (tmp_path / "out.cubin").read_bytes()
    assert all(name.encode() in symbols for name in cuda_compile.KERNEL_CODES)
    # A launch asks for what `_shared_bytes` says; static shared memory would come on top.
    used = re.findall(r"ptxas info +: Used .*", done.stderr)
    assert len(used) == len(cuda_compile.KERNEL_CODES)
    assert not any("smem" in line for line in used), used


FLOAT32_POOL = KernelKey("qrnn_fo_pool", torch.float32, 1)


def test_nvrtc_compiles_once_and_keeps_it(tmp_path, monkeypatch):
    """NVRTC compiles each kernel; a second call reads the file."""
    pytest.importorskip("cupy")
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path))
    keys = [KernelKey("qrnn_fo_pool", dtype, 1) for dtype in cuda_compile.DTYPE_CODES]
    keys += [KernelKey(kernel, torch.bfloat16, 2) for kernel in cuda_compile.KERNEL_CODES]
    images = {key: cuda_compile.compiled_kernel(key, 90) for key in keys}

    assert len(list(tmp_path.iterdir())) == len(images)
    monkeypatch.setattr(cuda_compile, "compile_kernel", _never)
    for key, image in images.items():
        assert key.kernel.encode() in image
        assert cuda_compile.compiled_kernel(key, 90) == image


def test_an_unknown_architecture_is_named():
    """A GPU that the compiler does not know is an error with both sides."""
    pytest.importorskip("cupy")
    with pytest.raises(KernelError, match=r"NVRTC \d+\.\d+ cannot compile for sm_20; it knows sm_"):
        cuda_compile.compile_kernel(FLOAT32_POOL, 20)


class _FakeCompiler:
    """NVRTC's functions as CuPy offers them, counting compilations."""

    class NVRTCError(RuntimeError):
        """What CuPy raises."""

    def __init__(self, version):
        self.version = version
        self.compilations = 0

    def getVersion(self):  # noqa: N802  # CuPy's name
        return self.version

    def getSupportedArchs(self):  # noqa: N802  # CuPy's name
        return (80, 90)

    def createProgram(self, *source):  # noqa: N802  # CuPy's name
        return source

    def compileProgram(self, program, options):  # noqa: N802  # CuPy's name
        self.compilations += 1
        if "sm_80" in options[0]:
            raise self.NVRTCError("compilation failed")

    def getCUBIN(self, program):  # noqa: N802  # CuPy's name
        return b"image of " + str(self.version).encode()

    def getProgramLog(self, program):  # noqa: N802  # CuPy's name
        return "line 1: what is wrong"

    def destroyProgram(self, program):  # noqa: N802  # CuPy's name
        """Nothing to give back."""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that needs no CUDA, and an empty cache."""

    class Cuda:
        nvrtc = _FakeCompiler((13, 0))

    monkeypatch.setattr(cuda_compile, "cupy_cuda", lambda: Cuda)
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path / "cache"))
    return Cuda.nvrtc


def test_cache_is_keyed_by_source_kernel_and_compiler(compiler, tmp_path, monkeypatch):
    """Another source, kernel or compiler compiles anew, so an upgrade loads no old code."""
    first = cuda_compile.compiled_kernel(FLOAT32_POOL, 90)
    cuda_compile.compiled_kernel(FLOAT32_POOL, 90)
    assert compiler.compilations == 1
    cuda_compile.compiled_kernel(FLOAT32_POOL._replace(dtype=torch.float16), 90)
    cuda_compile.compiled_kernel(FLOAT32_POOL._replace(channels=2), 90)
    cuda_compile.compiled_kernel(FLOAT32_POOL._replace(kernel="qrnn_f_pool"), 90)
    assert compiler.compilations == 4
    compiler.version = (13, 1)
    assert cuda_compile.compiled_kernel(FLOAT32_POOL, 90) != first
    assert compiler.compilations == 5
    changed = shutil.copytree(SOURCE.parent, tmp_path / "cuda_src")
    monkeypatch.setattr(cuda_compile, "SOURCE_PATH", changed / SOURCE.name)
    cuda_compile.compiled_kernel(FLOAT32_POOL, 90)
    assert compiler.compilations == 5
    header = changed / "carry.cuh"
    header.write_text(header.read_text() + "\n")
    cuda_compile.compiled_kernel(FLOAT32_POOL, 90)
    assert compiler.compilations == 6
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("damage", [lambda c: c[:40], lambda c: c[:-1] + b"?", lambda c: b""])
def test_a_damaged_cache_file_is_replaced(compiler, tmp_path, damage, caplog):
    """A file cut short or changed is never handed to the driver; it is compiled again."""
    image = cuda_compile.compiled_kernel(FLOAT32_POOL, 90)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))

    assert cuda_compile.compiled_kernel(FLOAT32_POOL, 90) == image

    assert compiler.compilations == 2
    assert path.read_bytes() == whole
    assert "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_is_only_a_warning(compiler, tmp_path, monkeypatch, caplog):
    """Kernels still compile when nothing can be kept, and the log says so."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path / "file"))

    assert cuda_compile.compiled_kernel(FLOAT32_POOL, 90)

    assert "cannot be kept" in caplog.text


def test_a_failed_compilation_shows_the_compilers_words(compiler):
    """The log of the compiler is in the error, with architecture and dtype."""
    with pytest.raises(
        KernelError,
        match=r"(?s)qrnn\.cu for sm_80 and qrnn_fo_pool of torch\.float32.*line 1: what",
    ):
        cuda_compile.compiled_kernel(FLOAT32_POOL, 80)


def test_without_cupy_the_extra_is_named(monkeypatch):
    """A machine without CuPy says what to install and what works instead."""
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(KernelError, match=r"qrnn-serve\[cuda1[23]\].*kernels\.reference"):
        cuda_compile.cupy_cuda()


def _never(*arguments):
    raise AssertionError("compiled again")
