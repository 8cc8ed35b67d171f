"""The CUDA source without a GPU: run as plain C++ on the host, and compiled for real GPUs."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels import cuda, cuda_compile, cuda_module, reference
from support.pool_cases import SEQUENCES, assert_near, forget_inputs, packed, pool_inputs

SOURCE = cuda_compile.SOURCE_PATH
# float16 is converted by GPU instructions, so only a GPU can run it.
HOST_DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    """The source built for the host, one library a dtype."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler named c++ on PATH")
    folder = tmp_path_factory.mktemp("cuda_on_host")
    libraries = {}
    for dtype in HOST_DTYPES:
        path = folder / f"{cuda_compile.DTYPE_CODES[dtype]}.so"
        command = [
            *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"),
            f"-DQRNN_DTYPE={cuda_compile.DTYPE_CODES[dtype]}",
            f'-DQRNN_SOURCE="{SOURCE}"',
            *("-o", str(path), str(Path(__file__).parent / "cuda_on_host.cpp")),
        ]
        subprocess.run(command, check=True)
        libraries[dtype] = ctypes.CDLL(str(path))
    return libraries


@pytest.fixture
def on_host(host_kernels, monkeypatch):
    """Makes the CUDA implementation run on the host."""
    _run_on_host(host_kernels, monkeypatch, cuda_module.launch_shape)


@pytest.fixture
def on_host_with_few_threads(host_kernels, monkeypatch):
    """The same with six threads, which loop over all lines."""
    _run_on_host(host_kernels, monkeypatch, lambda lines: cuda_module.LaunchShape(3, 2))


def _run_on_host(host_kernels, monkeypatch, launch_shape):

    def launch(name, like, sizes, arguments):
        lines = sizes.batch * sizes.hidden
        if not lines:
            return
        shape = launch_shape(lines)
        library = host_kernels[like.dtype]
        size = library.launch(name.encode(), shape.blocks, shape.threads, arguments)
        assert size == len(arguments), "the packed arguments are not the kernel's struct"

    monkeypatch.setattr(cuda, "_launch", launch)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_kernels_on_the_host_match_reference(on_host, sequences, dtype, reverse):
    """Outputs and gradients of every kernel are those of the reference."""
    offsets = sequences.offsets("cpu", torch.int32 if reverse else torch.int64)
    f, x, h0 = forget_inputs(sequences, dtype)
    grad = torch.randn(sequences.shape()).to(dtype)
    wide = [t.double().requires_grad_() for t in (f, x, h0)]
    expected = reference.forget_mult(*wide, offsets, reverse)
    h = cuda.forget_mult(f, x, h0, offsets, reverse)
    got = [h, *cuda.forget_mult_backward(grad, f, x, h, h0, offsets, reverse)]
    want = [expected, *_gradients([expected], wide, [grad])]
    for output_gate in (True, False):
        gates, c0 = pool_inputs(sequences, dtype, output_gate)
        grads = [grad, torch.randn(c0.shape).to(dtype)]
        options = (offsets, output_gate, reverse, 0.3)
        wide = [t.double().requires_grad_() for t in (gates, c0)]
        expected = reference.fo_pool(*wide, *options)
        got += cuda.fo_pool(gates, c0, *options)
        got += cuda.fo_pool_backward(*grads, gates, c0, *options)
        want += [*expected, *_gradients(expected, wide, grads)]

    for number, (value, expected_value) in enumerate(zip(got, want, strict=True)):
        assert value.is_contiguous()
        assert_near(value, expected_value, f"result {number}")


def test_fewer_threads_than_lines(on_host_with_few_threads):
    """Threads loop until every channel of every sequence is done."""
    layout = packed(0, 30, 7, 2, hidden=33)
    gates, c0 = pool_inputs(layout, torch.float32, True)
    offsets = layout.offsets("cpu")
    grads = [torch.randn(layout.shape()), torch.randn(c0.shape)]
    wide = [t.double().requires_grad_() for t in (gates, c0)]
    expected = reference.fo_pool(*wide, offsets)

    got = [
        *cuda.fo_pool(gates, c0, offsets),
        *cuda.fo_pool_backward(*grads, gates, c0, offsets, True, False, 0.0),
    ]

    for value, want in zip(got, [*expected, *_gradients(expected, wide, grads)], strict=True):
        assert_near(value, want)


def test_left_out_tensors_on_the_host(on_host):
    """No state and no gradient mean zeros."""
    gates = torch.randn(5, 2, 12)
    zeros = torch.zeros(2, 4)
    options = (None, True, False, 0.0)

    assert all(
        map(torch.equal, cuda.fo_pool(gates, None, *options), cuda.fo_pool(gates, zeros, *options))
    )
    for grads in ((torch.randn(5, 2, 4), None), (None, torch.randn(2, 4))):
        full = [
            torch.zeros(shape) if g is None else g
            for g, shape in zip(grads, ((5, 2, 4), (2, 4)), strict=True)
        ]
        got = cuda.fo_pool_backward(*grads, gates, None, *options)
        want = cuda.fo_pool_backward(*full, gates, zeros, *options)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_on_the_host(on_host, dtype):
    """Batch-major views and expanded gradients are read right."""
    gates = torch.randn(3, 7, 24).to(dtype).transpose(0, 1)[..., :12]
    c0 = torch.randn(4, 3).to(dtype).t()
    wide = [t.double().requires_grad_() for t in (gates, c0)]
    expected = reference.fo_pool(*wide)
    grads = [torch.ones(1, 1, 1).to(dtype).expand(7, 3, 4), torch.ones(1, 1).to(dtype).expand(3, 4)]

    got = [
        *cuda.fo_pool(gates, c0),
        *cuda.fo_pool_backward(*grads, gates, c0, None, True, False, 0.0),
    ]

    for value, want in zip(got, [*expected, *_gradients(expected, wide, grads)], strict=True):
        assert_near(value, want)


@pytest.mark.parametrize(
    "offsets", [[1, 5], [0, 9, 5], [0, 3, 1, 5], [-4, 2, 5], [0, 2, 4], [9, -9]]
)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_wrong_offsets_stay_inside_and_give_nan(on_host, offsets, reverse):
    """Kernels cannot refuse offsets, so those that are wrong write nowhere else and give NaN."""
    guard = 20
    memory = torch.full((guard + 5 + guard, 9), 7.0)
    gates = memory[guard : guard + 5]
    results = torch.full((guard + 5 + guard, 3), 7.0)
    layout = torch.tensor(offsets)
    sizes = cuda.PoolSizes(5, len(offsets) - 1, 3)
    c = torch.zeros(sizes.batch, 3)
    h = results[guard : guard + 5]
    arguments = cuda._FO_POOL.pack(
        *cuda._sequences(sizes, layout, reverse),
        0.0,
        *cuda.rows(gates),
        *cuda.state(None),
        *cuda.rows(h),
        *cuda.state(c),
    )

    cuda._launch("qrnn_fo_pool", gates, sizes, arguments)

    assert c.isnan().any()
    assert (results[:guard] == 7).all()
    assert (results[guard + 5 :] == 7).all()
    assert not (h == 7).any() or sorted(offsets) != offsets


def test_sequences_beside_a_bad_one_on_the_host(on_host):
    """NaN in one packed sequence reaches no other."""
    layout = packed(3, 4, 2, hidden=5)
    gates, c0 = pool_inputs(layout, torch.float32, True)
    clean = cuda.fo_pool(gates, c0, layout.offsets("cpu"))
    gates[3:7] = float("nan")

    spoilt = cuda.fo_pool(gates, c0, layout.offsets("cpu"))

    assert torch.equal(clean[0][:3], spoilt[0][:3])
    assert torch.equal(clean[0][7:], spoilt[0][7:])
    assert torch.equal(clean[1][[0, 2]], spoilt[1][[0, 2]])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(("architecture", "code"), [(80, 0), *itertools.product((90,), range(4))])
def test_nvcc_compiles_the_source(architecture, code, tmp_path):
    """The source is CUDA that nvcc takes without a warning."""
    command = [
        *("nvcc", "-std=c++17", "-Werror", "all-warnings", f"-arch=sm_{architecture}"),
        *(f"-DQRNN_DTYPE={code}", "-cubin", "-o", str(tmp_path / "out.cubin"), str(SOURCE)),
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    symbols = (tmp_path / "out.cubin").read_bytes()
    assert all(name.encode() in symbols for name in cuda_module.KERNEL_NAMES)


def test_nvrtc_compiles_once_and_keeps_it(tmp_path, monkeypatch):
    """NVRTC compiles the source for each dtype; a second call reads the file."""
    pytest.importorskip("cupy")
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path))
    images = {d: cuda_compile.compiled_kernels(d, 90) for d in cuda_compile.DTYPE_CODES}

    assert len(list(tmp_path.iterdir())) == len(images)
    monkeypatch.setattr(cuda_compile, "compile_kernels", _never)
    for dtype, image in images.items():
        assert cuda_compile.compiled_kernels(dtype, 90) == image


def test_an_unknown_architecture_is_named():
    """A GPU that the compiler does not know is an error with both sides."""
    pytest.importorskip("cupy")
    with pytest.raises(KernelError, match=r"NVRTC \d+\.\d+ cannot compile for sm_20; it knows sm_"):
        cuda_compile.compile_kernels(torch.float32, 20)


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


def test_cache_is_keyed_by_source_dtype_architecture_and_compiler(compiler, tmp_path, monkeypatch):
    """Another source, dtype or compiler version compiles anew, so an upgrade loads no old code."""
    first = cuda_compile.compiled_kernels(torch.float32, 90)
    cuda_compile.compiled_kernels(torch.float32, 90)
    assert compiler.compilations == 1
    cuda_compile.compiled_kernels(torch.float16, 90)
    assert compiler.compilations == 2
    compiler.version = (13, 1)
    assert cuda_compile.compiled_kernels(torch.float32, 90) != first
    assert compiler.compilations == 3
    changed = shutil.copytree(SOURCE.parent, tmp_path / "cuda_src")
    monkeypatch.setattr(cuda_compile, "SOURCE_PATH", changed / SOURCE.name)
    cuda_compile.compiled_kernels(torch.float32, 90)
    assert compiler.compilations == 3
    header = changed / "lines.cuh"
    header.write_text(header.read_text() + "\n")
    cuda_compile.compiled_kernels(torch.float32, 90)
    assert compiler.compilations == 4
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("damage", [lambda c: c[:40], lambda c: c[:-1] + b"?", lambda c: b""])
def test_a_damaged_cache_file_is_replaced(compiler, tmp_path, damage, caplog):
    """A file cut short or changed is never handed to the driver; it is compiled again."""
    image = cuda_compile.compiled_kernels(torch.float32, 90)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))

    assert cuda_compile.compiled_kernels(torch.float32, 90) == image

    assert compiler.compilations == 2
    assert path.read_bytes() == whole
    assert "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_is_only_a_warning(compiler, tmp_path, monkeypatch, caplog):
    """Kernels still compile when nothing can be kept, and the log says so."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path / "file"))

    assert cuda_compile.compiled_kernels(torch.float32, 90)

    assert "cannot be kept" in caplog.text


def test_a_failed_compilation_shows_the_compilers_words(compiler):
    """The log of the compiler is in the error, with architecture and dtype."""
    with pytest.raises(
        KernelError, match=r"(?s)qrnn\.cu for sm_80 and torch\.float32.*line 1: what"
    ):
        cuda_compile.compiled_kernels(torch.float32, 80)


def test_without_cupy_the_extra_is_named(monkeypatch):
    """A machine without CuPy says what to install and what works instead."""
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(KernelError, match=r"qrnn-serve\[cuda1[23]\].*kernels\.reference"):
        cuda_compile.cupy_cuda()


def test_launch_shapes():
    """One thread a line in whole blocks, and never more blocks than a grid takes."""
    assert cuda_module.launch_shape(1) == cuda_module.LaunchShape(1, 128)
    assert cuda_module.launch_shape(129).blocks == 2
    assert cuda_module.launch_shape(2**45).blocks == 2**31 - 1


def _gradients(outputs, leaves, grads):
    wide = [g.double() for g in grads]
    return torch.autograd.grad(outputs, leaves, wide, materialize_grads=True)


def _never(*arguments):
    raise AssertionError("compiled again")
