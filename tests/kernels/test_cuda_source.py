"""The CUDA source without a GPU: run as plain C++ on the host, and compiled for real GPUs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qrnn_serve.core.errors import InputError, KernelError
from qrnn_serve.kernels import cuda, cuda_compile, plan, reference
from qrnn_serve.kernels.cuda_compile import DTYPE_CODES, KernelKey
from qrnn_serve.kernels.plan import THREADS_PER_BLOCK
from support.pool_cases import SEQUENCES, assert_near, dense, forget_inputs, packed, pool_inputs

SOURCE = cuda_compile.SOURCE_PATH
HOST_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
RESIDENT_BLOCKS = 3


class HostKernels:
    """The source built for the host, one library a dtype and width, when it is first needed."""

    def __init__(self, folder):
        self._compiler = shutil.which("c++")
        if self._compiler is None:
            pytest.skip("needs a C++ compiler named c++ on PATH")
        self.folder = folder
        self._libraries = {}

    def launch(self, key, blocks, index, arguments):
        """Run one kernel, as `cuda._launch`."""
        library = self.built(key)
        launch = library.launch
        launch.argtypes = [
            *(ctypes.c_char_p, ctypes.c_longlong),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_char_p),
        ]
        name = key.kernel.encode()
        size = launch(name, blocks, THREADS_PER_BLOCK, RESIDENT_BLOCKS, arguments)
        assert size == len(arguments), "the packed arguments are not the kernel's struct"

    def built(self, key):
        """The library for a dtype and width."""
        key = key._replace(kernel="qrnn_fo_pool")  # a library holds them all
        if key not in self._libraries:
            far = "far" if key.far else ""
            path = self.folder / f"{DTYPE_CODES[key.dtype]}{key.channels}{far}.so"
            options = [o for o in cuda_compile._options(key, 90) if o.startswith("-DQRNN")]
            command = [
                *(self._compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"),
                *(option for option in options if "ONLY" not in option),
                f'-DQRNN_SOURCE="{SOURCE}"',
                *("-o", str(path), str(Path(__file__).parent / "cuda_on_host.cpp")),
            ]
            subprocess.run(command, check=True)
            self._libraries[key] = ctypes.CDLL(str(path))
        return self._libraries[key]


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    """The kernels as a library for the CPU."""
    return HostKernels(tmp_path_factory.mktemp("cuda_on_host"))


@pytest.fixture
def on_host(host_kernels, monkeypatch):
    """Makes the CUDA implementation run on the host, by the plans of a large GPU."""
    monkeypatch.setattr(cuda, "_launch", host_kernels.launch)
    monkeypatch.setattr(cuda, "_processors", lambda index: 132)
    monkeypatch.setattr(cuda, "_has_wide_copies", lambda index: True)


@pytest.fixture
def in_single_tiles(on_host, monkeypatch):
    """The same with every sequence cut into tiles that hand their state on, also short ones."""
    monkeypatch.setattr(plan, "_SHORT_TIMESTEPS", 0)
    plan.plan_scan.cache_clear()
    yield
    plan.plan_scan.cache_clear()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_kernels_on_the_host_match_reference(on_host, sequences, dtype, reverse):
    """Outputs and gradients of every kernel are those of the reference."""
    _assert_all_match(sequences, dtype, reverse)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param(dense(200, 3, 5), id="dense-200x3x5"),
        pytest.param(dense(64, 2, 4), id="dense-64x2x4"),
        pytest.param(dense(2600, 1, 2), id="dense-2600x1x2"),
        pytest.param(packed(64, 0, 65, 63, 1, 128, 129, hidden=3), id="packed-tile-edges"),
        pytest.param(packed(0, 700, 0, 0, 9, 300, hidden=34), id="packed-uneven"),
        # Rows that allow wide copies, in whole channel tiles and in part of one.
        pytest.param(dense(200, 3, 64), id="dense-200x3x64"),
        pytest.param(packed(0, 700, 0, 0, 9, 300, hidden=72), id="packed-uneven-aligned"),
        pytest.param(packed(*[2, 0, 66, 1] * 10, *[1, 3] * 120, hidden=8), id="packed-280x8"),
    ],
)
def test_tiles_hand_their_state_on(in_single_tiles, sequences, dtype, reverse):
    """Blocks that take one tile each find the state that the blocks before them left."""
    _assert_all_match(sequences, dtype, reverse)


def _assert_all_match(sequences, dtype, reverse):
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
        *outputs, starts = cuda.fo_pool_training(gates, c0, *options)
        assert all(map(torch.equal, outputs, got[-4:-2]))
        kept = cuda.fo_pool_backward(*grads, gates, c0, *options, starts)
        assert all(map(torch.equal, kept, got[-2:])), "states kept and computed again differ"

    for number, (value, expected_value) in enumerate(zip(got, want, strict=True)):
        assert value.is_contiguous()
        assert_near(value, expected_value, f"result {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tiles_keep_long_memory(in_single_tiles, dtype):
    """Constant gates near 0.002 over 10,000 timesteps stay right through 157 hand-overs."""
    fresh = torch.linspace(-2, 2, 33, dtype=torch.float64).expand(10_000, 1, 33)
    gates = torch.cat([fresh, torch.full_like(fresh, -6.2126)], dim=-1).to(dtype)
    expected = reference.fo_pool(gates.double(), output_gate=False)

    for value, want in zip(cuda.fo_pool(gates, output_gate=False), expected, strict=True):
        assert_near(value, want)


def test_tiles_keep_and_reset_the_state_exactly(in_single_tiles):
    """f of 0 keeps every bit of the state across tiles, and f of 1 drops what was before."""
    f = torch.zeros(200, 2, 5)
    f[0], f[150] = 1.0, 1.0
    x = torch.randn(200, 2, 5)

    h = cuda.forget_mult(f, x)

    assert torch.equal(h[:150], x[:1].expand(150, 2, 5))
    assert torch.equal(h[150:], x[150:151].expand(50, 2, 5))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_tiles_keep_bad_numbers_in_their_sequence(in_single_tiles, bad):
    """Infinity and NaN pass from tile to tile of one sequence only."""
    layout = packed(130, 200, 70, hidden=5)
    f, x, h0 = forget_inputs(layout, torch.float32)
    clean = cuda.forget_mult(f, x, h0, layout.offsets("cpu"))
    x[140] = bad

    spoilt = cuda.forget_mult(f, x, h0, layout.offsets("cpu"))

    assert torch.equal(clean[:140], spoilt[:140])
    assert torch.equal(clean[330:], spoilt[330:])
    assert not spoilt[140:330].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_give_the_bits_of_whole_sequences(on_host, monkeypatch, dtype):
    """However the work is shared, alone or packed, the same rows give the same bits."""
    layout = packed(300, 0, 65, 700, hidden=34)
    gates, c0 = pool_inputs(layout, dtype, True)
    whole = cuda.fo_pool(gates[365:, None], c0[3:])
    with monkeypatch.context() as patch:
        # Short enough for one block a sequence.
        patch.setattr(plan, "_SHORT_TIMESTEPS", 10_000)
        plan.plan_scan.cache_clear()
        uncut = cuda.fo_pool(gates, c0, layout.offsets("cpu"))
    plan.plan_scan.cache_clear()
    cut = cuda.fo_pool(gates, c0, layout.offsets("cpu"))

    assert all(map(torch.equal, cut, uncut))
    assert torch.equal(whole[0][:, 0], cut[0][365:])
    assert torch.equal(whole[1][0], cut[1][3])


@pytest.mark.parametrize("offsets", [[5, 900], [0, 900, 400], [0, 400, 100, 900], [0, -7, 2000]])
def test_wrong_offsets_in_tiles_end_and_give_nan(in_single_tiles, offsets):
    """Blocks that wait for tiles which wrong offsets took away still come to an end."""
    gates, layout = torch.randn(900, 9), torch.tensor(offsets)

    _, c = cuda.fo_pool(gates, None, layout)

    assert c.isnan().any()


def test_rows_far_apart(on_host, monkeypatch):
    """Rows too far apart for short arithmetic run the kernel with long arithmetic."""
    gates, c0 = pool_inputs(dense(70, 2, 5), torch.float32, True)
    near = cuda.fo_pool(gates, c0)
    monkeypatch.setattr(cuda, "_FAR_BYTES", 0)

    far = cuda.fo_pool(gates, c0)

    assert all(map(torch.equal, near, far))


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


def test_starts_of_another_call_are_refused(on_host):
    """Kept states that do not fit are an error, since the kernel would read past their end."""
    gates, grad = torch.randn(70, 2, 12), torch.randn(70, 2, 4)
    starts = cuda.fo_pool_training(gates[:60], None, None, True, False, 0.0)[2]

    with pytest.raises(InputError, match=r"starts must be .*\[4, 8, 4\].*got \[2, 8, 4\]"):
        cuda.fo_pool_backward(grad, None, gates, None, None, True, False, 0.0, starts)


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
    call = cuda._Call(gates, sizes, layout, reverse, (gates,))
    plan = call.plan("qrnn_fo_pool")
    arguments = cuda._FO_POOL.pack(
        *(*call.head(plan), 0.0),
        *(*cuda.rows(gates), *cuda.state(None), *cuda.rows(h), *cuda.state(c), 0),
    )

    call.launch(plan, arguments)

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


@pytest.fixture(scope="session")
def without_python(host_kernels):
    """Runs the calls of call_cuda_host.py: the C host of the kernels, over a driver on the host."""
    folder = host_kernels.folder / "driver"
    folder.mkdir()
    source = Path(__file__).with_name("cuda_driver_on_host.cpp")
    for name in ("libcuda.so.1", "libnvrtc.so.13"):
        command = ["c++", "-std=c++17", "-shared", "-fPIC", "-o", str(folder / name), str(source)]
        subprocess.run([*command, "-ldl"], check=True)
    for dtype in HOST_DTYPES:
        for channels in {1, plan.widest_channels(dtype)}:
            host_kernels.built(KernelKey("qrnn_fo_pool", dtype, channels))
    host_kernels.built(KernelKey("qrnn_prepare", torch.float32, 1))

    def run(calls, **environment):
        environment = {
            "LD_LIBRARY_PATH": str(folder),
            "QRNN_HOST_KERNELS": str(host_kernels.folder),
        } | environment
        files = [str(folder / name) for name in ("calls.pt", "results.pt")]
        torch.save(calls, files[0])
        script = Path(__file__).with_name("call_cuda_host.py")
        command = [sys.executable, "-W", "ignore", str(script), *files]
        subprocess.run(command, check=True, env=os.environ | environment)
        return torch.load(files[1])

    return run


def test_the_host_without_python_matches_reference(without_python):
    """Dense, packed and padded rows, whole and in tiles, aligned and not, in every dtype."""
    calls, expected = [], []
    cases = [
        (layout.values[0], dtype, output_gate, reverse)
        for layout in [*SEQUENCES, pytest.param(packed(300, 0, 65, 700, hidden=64))]
        for dtype in HOST_DTYPES
        for output_gate, reverse in ((True, False), (False, True))
    ]
    for layout, dtype, output_gate, reverse in cases:
        gates, c0 = pool_inputs(layout, dtype, output_gate)
        options = {"output_gate": output_gate, "reverse": reverse, "zoneout": 0.3}
        offsets = layout.offsets("cpu")
        want = reference.fo_pool(
            gates.double(), c0.double(), offsets, output_gate, reverse, zoneout=0.3
        )
        calls.append({"gates": gates, "c0": c0, "offsets": offsets, **options})
        expected.append(want)
        if layout.packed:
            lengths = torch.tensor(layout.lengths, dtype=torch.int64)
            real = torch.arange(max([*layout.lengths, 1])) < lengths[:, None]
            padded = torch.full((*real.shape, gates.shape[1]), float("nan"), dtype=dtype)
            padded[real] = gates
            h = torch.zeros(*real.shape, layout.hidden, dtype=torch.float64)
            h[real] = want[0]
            calls.append({"gates": padded, "c0": c0, "lengths": lengths, **options})
            expected.append((h, want[1]))

    results = without_python(calls)

    for (status, message, h, c), (want_h, want_c) in zip(results, expected, strict=True):
        assert (status, message) == (0, "")
        assert_near(h, want_h)
        assert_near(c, want_c)


def test_the_host_without_python_says_what_is_wrong(without_python):
    """A refusal of the compiler, of wrong arguments, and of memory that is not the GPU's."""
    gates, c0 = pool_inputs(dense(3, 2, 5), torch.float32, True)
    call = {"gates": gates, "c0": c0, "output_gate": True, "reverse": False, "zoneout": 0.0}
    offsets = torch.tensor([0, 2, 3])

    ((status, message, *_),) = without_python([call], QRNN_COMPILER_FAILS="1")
    assert status == 5
    assert "cuda:1: NVRTC 13.0 cannot compile qrnn_fo_pool for sm_90" in message
    assert "line one" in message
    both = without_python(
        [{**call, "zoneout": 1.5}, {**call, "offsets": offsets, "lengths": offsets[:2]}]
    )
    assert [status for status, *_ in both] == [1, 1]
    assert "zoneout: expected 0 to 1" in both[0][1]
    assert "exclude offsets" in both[1][1]


def test_the_host_without_python_needs_a_driver(without_python):
    """Where there is none, the message says so, and the process goes on."""
    gates, c0 = pool_inputs(dense(3, 2, 5), torch.float32, True)
    call = {"gates": gates, "c0": c0, "output_gate": True, "reverse": False, "zoneout": 0.0}
    if torch.cuda.is_available():
        pytest.skip("this machine has one")

    ((status, message, *_),) = without_python([call], LD_LIBRARY_PATH="")

    assert status == 5
    assert "cannot load the CUDA driver" in message


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(
    ("architecture", "code", "channels"),
    [(80, 0, 1), (75, 2, 2), (90, 0, 1), (90, 1, 1), (90, 1, 2), (90, 2, 2), (90, 3, 1)],
)
def test_nvcc_compiles_the_source(architecture, code, channels, tmp_path):
    """The source is CUDA that nvcc takes without a warning."""
    command = [
        *("nvcc", "-std=c++17", "-Werror", "all-warnings", f"-arch=sm_{architecture}"),
        *(f"-DQRNN_DTYPE={code}", f"-DQRNN_CHANNELS={channels}"),
        *("-cubin", "-o", str(tmp_path / "out.cubin"), str(SOURCE)),
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    symbols = (tmp_path / "out.cubin").read_bytes()
    assert all(name.encode() in symbols for name in cuda_compile.KERNEL_CODES)


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


def _gradients(outputs, leaves, grads):
    wide = [g.double() for g in grads]
    return torch.autograd.grad(outputs, leaves, wide, materialize_grads=True)


def _never(*arguments):
    raise AssertionError("compiled again")
