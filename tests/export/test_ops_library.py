"""The operator library: in a C++ program, in torch alone, and how it is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from qrnn_export import cli, ops_library
from qrnn_serve.core.errors import InputError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.kernels import reference
from support.closeness import max_abs
from support.exported import MODELS, make_model, random_batch, write
from support.golden import NAMES, STREAM, cell_columns, golden_model, initial_state
from support.libtorch import Host, call_operators, clean_environment, compile_host
from support.pool_cases import (
    DEVICES,
    DTYPES,
    SEQUENCES,
    assert_near,
    forget_inputs,
    packed,
    pool_inputs,
)

HOSTED = [
    "stack windows",
    "stack zoneout",
    "ids, every pooling, head",
    "head at every timestep",
    "last of two directions",
]
PORTABLE = pytest.mark.parametrize("portable", [False, True], ids=["library", "portable"])


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Built by the command, in its own process; or one that another torch built, for its tests."""
    if built := os.environ.get("QRNN_TEST_OPS_LIBRARY"):
        return Path(built)
    path = tmp_path_factory.mktemp("operators") / "new/libqrnn_torch_ops.so"
    command = [sys.executable, "-m", "qrnn_export.cli", "ops-library", "-o", path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}, built with torch {torch.__version__}" in done.stdout
    assert os.listdir(path.parent) == [path.name]
    return path


@pytest.fixture(scope="session")
def host(library, tmp_path_factory):
    """The program of the docs, with the library."""
    return Host(compile_host(tmp_path_factory.mktemp("host")), library)


def write_into(folder, model, portable):
    """The TorchScript file of a model, in a folder of its own."""
    folder.mkdir()
    return write(model, folder, "torchscript", portable=portable)[0]


@pytest.mark.parametrize("device", DEVICES)
@PORTABLE
def test_program_scores_the_golden_vectors(portable, device, host, tmp_path):
    """Every vector of the original implementations, the stream of three chunks included."""
    vectors = [golden_model(name, torch.float64) for name in NAMES]
    given = []
    for name, (model, x, _, arrays) in zip(NAMES, vectors, strict=True):
        state = initial_state(model, arrays, len(x), torch.float64)
        given.append((write_into(tmp_path / name, model, portable), [(x, None, state)]))

    scored = host.run_all(given, device, library=not portable)

    for name, (model, _, out, arrays), results in zip(NAMES, vectors, scored, strict=True):
        ((output, state),) = results
        assert max_abs(output, out) <= GOLDEN_FLOAT64_MAX_ABS, name
        last = arrays["h_n"][-1] if name == STREAM else arrays["h_n"]
        for part, cell in zip(cell_columns(model), last, strict=True):
            columns = state[:, part.start : part.stop]
            assert max_abs(columns, cell) <= GOLDEN_FLOAT64_MAX_ABS, name


def ragged_batches(model):
    """Batches (input, lengths, state) of many T and B, some parts left out."""
    batches = []
    for lengths in ([1], [4, 9, 1], [500, 3], [t % 7 + 1 for t in range(65)], [2, 2]):
        for with_state in (False, True):
            batch = random_batch(model, lengths, max(lengths), with_state=with_state)
            batches.append((batch.input, batch.lengths, batch.state))
    whole = random_batch(model, [6, 6], 6, with_state=False)
    return [*batches, (whole.input, None, None)]


@pytest.mark.parametrize("device", DEVICES)
@PORTABLE
def test_program_scores_ragged_batches(portable, device, host, tmp_path):
    """Any T and B in one process, with and without lengths and state."""
    models = [make_model(MODELS[name]) for name in HOSTED]
    given = [
        (write_into(tmp_path / str(number), model, portable), ragged_batches(model))
        for number, model in enumerate(models)
    ]

    scored = host.run_all(given, device, library=not portable)

    for model, (_, batches), results in zip(models, given, scored, strict=True):
        for batch, result in zip(batches, results, strict=True):
            with torch.no_grad():
                expected = model(*batch)
            for value, wanted in zip(result, expected, strict=True):
                assert max_abs(value, wanted) <= FLOAT32_MAX_ABS
                if device == "cpu" and not portable:
                    assert torch.equal(value, wanted)


def test_program_without_the_library_names_the_operator(host, tmp_path):
    """And with the library loaded before the program starts, as Triton does, it works."""
    model = make_model(MODELS["stack one"])
    batch = random_batch(model, [4, 9, 1], 9, with_state=True)
    given = [(batch.input, batch.lengths, batch.state)]
    (path,) = write(model, tmp_path, "torchscript")

    _, said = host.run(path, "cpu", given, library=False, code=1)
    ((output, _),), _ = host.run(path, "cpu", given, library=False, preload=True)

    assert "Unknown builtin op: qrnn::" in said
    assert max_abs(output, model(*given[0])[0].detach()) <= FLOAT32_MAX_ABS


def operator_calls(dtype):
    """Calls (operator, arguments) of every size and layout, and what each must give in float64."""
    calls, expected = [], []

    def add(name, values, state, *rest):
        calls.append((name, (*values, state, *rest)))
        wide = None if state is None else state.double()
        result = getattr(reference, name)(*(v.double() for v in values), wide, *rest)
        expected.append(result if isinstance(result, tuple) else (result,))

    for number, parameters in enumerate(SEQUENCES):
        (layout,) = parameters.values
        offsets = layout.offsets("cpu", torch.int32 if number % 2 else torch.int64)
        reverse, output_gate = number % 3 == 1, number % 4 != 1
        f, x, h0 = forget_inputs(layout, dtype)
        gates, c0 = pool_inputs(layout, dtype, output_gate)
        add("forget_mult", (f, x), h0, offsets, reverse)
        add("forget_mult", (f, x), None, offsets, not reverse)
        add("fo_pool", (gates,), c0, offsets, output_gate, reverse, 0.3)
        add("fo_pool", (gates,), None, offsets, output_gate, not reverse, 0.0)
    wide = torch.randn(3, 14, 2 * 3 * 9).to(dtype)
    for view in (
        wide.transpose(0, 1)[..., :27],
        wide[:, ::2, :27].transpose(0, 1),
        wide.transpose(0, 1)[..., ::2],
        wide.transpose(0, 1)[:, :1, :27].expand(14, 3, 27),
    ):
        add("fo_pool", (view,), torch.randn(9, 3).to(dtype).t(), None, True, False, 0.0)
    spread = torch.tensor([[0, 1], [5, 6], [14, 15]])[:, 0]
    add("fo_pool", (wide[0, :, :27],), None, spread, True, False, 0.0)
    return calls, expected


@pytest.mark.parametrize("device", DEVICES)
def test_operators_match_the_reference(device, library, tmp_path):
    """Every dtype, size, layout and stride; the schemas are those of the Python operators."""
    cases = [case for dtype in DTYPES for case in zip(*operator_calls(dtype), strict=True)]
    if device == "cuda":
        cases = [case for case in cases if case[0][0] == "fo_pool"]
    calls = [call for call, _ in cases]

    schemas, results = call_operators(library, calls, tmp_path, device)

    for ((name, arguments), want), got in zip(cases, results, strict=True):
        assert isinstance(got, tuple), got
        for value, wanted in zip(got, want, strict=True):
            assert value.dtype == arguments[0].dtype
            assert value.is_contiguous()
            assert_near(value, wanted, f"{name} {list(arguments[0].shape)}")
    here = [torch.ops.qrnn.forget_mult.default, torch.ops.qrnn.fo_pool.default]
    assert schemas == [str(operator._schema) for operator in here]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_sequence_does_not_reach_another(device, library, tmp_path):
    """NaN and infinities stay in their sequence, bit for bit."""
    gates, c0 = pool_inputs(packed(6, 6, 6, hidden=35), torch.float32, True)
    offsets = torch.tensor([0, 6, 12, 18])
    calls = []
    for bad in (0.0, float("nan"), float("inf")):
        spoilt = gates.clone()
        spoilt[8:10] += bad
        calls.append(("fo_pool", (spoilt, c0, offsets, True, False, 0.0)))

    _, ((h, c), *spoilt) = call_operators(library, calls, tmp_path, device)

    for spoilt_h, spoilt_c in spoilt:
        assert torch.equal(spoilt_h[:6], h[:6])
        assert torch.equal(spoilt_h[12:], h[12:])
        assert torch.equal(spoilt_c[::2], c[::2])


GATES, ROWS, F = torch.zeros(4, 2, 9), torch.zeros(5, 9), torch.rand(4, 2, 3)
WRONG_CALLS = [
    ("forget_mult", (F.half(), F)),
    ("forget_mult", (F.long(), F.long())),
    ("forget_mult", (F, F[:3])),
    ("forget_mult", (F[0], F[0])),
    ("forget_mult", (F, F, F[0].t())),
    ("forget_mult", (ROWS, ROWS, None, torch.tensor([0, 4, 2, 5]))),
    ("fo_pool", (GATES.to(torch.complex64),)),
    ("fo_pool", (GATES, torch.zeros(2, 3).double())),
    ("fo_pool", (ROWS, None, torch.tensor([0.0, 5.0]))),
    ("fo_pool", (GATES[..., :8],)),
    ("fo_pool", (GATES, None, None, False)),
    ("fo_pool", (GATES, None, None, True, False, 1.5)),
    ("fo_pool", (GATES, None, None, True, False, float("nan"))),
    ("fo_pool", (GATES, torch.zeros(1, 3))),
    ("fo_pool", (GATES, None, torch.tensor([0, 4]))),
    ("fo_pool", (ROWS, None, torch.tensor([[0, 5]]))),
    ("fo_pool", (ROWS, None, torch.zeros(0, dtype=torch.int64))),
    ("fo_pool", (ROWS, None, torch.tensor([1, 5], dtype=torch.int32))),
    ("fo_pool", (ROWS, None, torch.tensor([0, 4]))),
    ("fo_pool", (ROWS, None, torch.tensor([0, -1, 5]))),
]


def test_wrong_arguments_are_refused_in_the_same_words(library, tmp_path):
    """Each message is the one of the Python operators."""
    _, results = call_operators(library, WRONG_CALLS, tmp_path, "cpu")

    for (name, arguments), said in zip(WRONG_CALLS, results, strict=True):
        with pytest.raises(InputError) as caught:
            getattr(torch.ops.qrnn, name)(*arguments)
        assert said == str(caught.value)


@pytest.mark.gpu
def test_wrong_arguments_on_a_gpu(library, tmp_path):
    """Sizes are checked there too, and what the library does not run on GPUs is said."""
    calls = [
        ("fo_pool", (GATES[..., :8],)),
        ("fo_pool", (GATES, torch.zeros(1, 3))),
        ("forget_mult", (F, F)),
    ]

    _, results = call_operators(library, calls, tmp_path, "cuda")

    assert "which is not a multiple of 3" in results[0]
    assert "c0 must be [B, H] = [2, 3], got [1, 3]" in results[1]
    assert "forget_mult: the operator library runs it on CPUs only" in results[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_offsets_on_a_gpu_give_nan(dtype, library, tmp_path):
    """The library cannot read them there: the sequences they break are NaN, short and in tiles."""
    small, large = torch.randn(5, 9).to(dtype), torch.randn(900, 9).to(dtype)
    wrong = [(small, o) for o in ([1, 5], [0, 9, 5], [0, 3, 1, 5], [-4, 2, 5], [0, 2, 4])]
    wrong += [(large, o) for o in ([5, 900], [0, 900, 400], [0, 400, 100, 900], [0, -7, 2000])]
    right = torch.tensor([0, 400, 900])
    calls = [*((gates, torch.tensor(offsets)) for gates, offsets in wrong), (large, right)]
    given = [("fo_pool", (gates, None, offsets)) for gates, offsets in calls]

    _, results = call_operators(library, given, tmp_path, "cuda")

    for (gates, _), (h, c) in zip(calls[:-1], results[:-1], strict=True):
        assert h.shape == (len(gates), 3)
        assert c.isnan().any()
    # They came last, in the process that had the wrong ones.
    expected = reference.fo_pool(large.double(), None, right)
    for value, want in zip(results[-1], expected, strict=True):
        assert_near(value, want)


OURS_FIRST = """
import sys, torch, qrnn_serve.kernels
torch.ops.load_library(sys.argv[1])
gates = torch.randn(4, 2, 9, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(qrnn_serve.kernels.fo_pool, (gates,))
"""
TWICE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.ops.load_library(sys.argv[2])
h, c = torch.ops.qrnn.fo_pool(torch.zeros(4, 2, 9), torch.ones(2, 3))
assert torch.equal(c, torch.full((2, 3), 0.5**4))
"""
OURS_LAST = """
import sys, torch
torch.ops.load_library(sys.argv[1])
import qrnn_serve.kernels
"""


def test_operators_are_registered_once(library, tmp_path):
    """Whoever comes second says so: another copy does nothing, our Python refuses."""
    copy = shutil.copy(library, tmp_path / "copy.so")
    done = [
        subprocess.run(
            [sys.executable, "-c", program, library, copy],
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        for program in (OURS_FIRST, TWICE, OURS_LAST)
    ]

    assert [d.returncode for d in done] == [0, 0, 1], done
    for second in done[:2]:
        assert second.stderr.count("has the operators qrnn::* already") == 1
    assert "import qrnn_serve.kernels` registers all operators" in done[2].stderr


def build(target, code):
    """Run the command in this process: what it said."""
    arguments = ["ops-library", "-o", str(target)]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == code, result.output
    return result.output


def compiler(folder, script):
    """A command that stands for a C++ compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler_is_said_before_any_work(tmp_path, monkeypatch):
    """None installed, or a CXX that is not there."""
    target = tmp_path / "out/ops.so"
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install g++" in build(target, 2)
    monkeypatch.setenv("CXX", "icpc-2017 -fast")
    assert "CXX names a compiler that is not there: icpc-2017" in build(target, 2)

    assert os.listdir(tmp_path) == []


def test_an_old_torch_is_refused(tmp_path, monkeypatch):
    """The message names both versions and what works instead."""
    monkeypatch.setattr(ops_library, "torch_release", lambda: (2, 9))

    said = build(tmp_path / "ops.so", 2)

    assert "torch 2.10 or newer" in said
    assert "found 2.9" in said
    assert "--portable" in said


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """Its words are shown, with the command."""
    failing = compiler(tmp_path, 'touch "${@: -1}"; echo "error: no such standard" >&2; exit 3')
    monkeypatch.setenv("CXX", failing)

    said = build(tmp_path / "out/ops.so", 2)

    assert "error: no such standard" in said
    assert "C++17" in said
    assert "torch_ops.cpp" in said
    assert os.listdir(tmp_path / "out") == []


def test_a_library_that_does_not_work_is_not_written(tmp_path, monkeypatch):
    """The check in a fresh process fails: status 1."""
    empty = r'while [ "$1" != -o ]; do shift; done; echo | gcc -shared -x c - -o "$2"'
    monkeypatch.setenv("CXX", compiler(tmp_path, empty))

    said = build(tmp_path / "out/ops.so", 1)

    assert "nothing was written" in said
    assert "fo_pool" in said
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["file/ops.so", "/proc/ops.so"])
def test_a_place_that_cannot_be_written_to(name, tmp_path):
    """Below a file, and in a folder that takes no files."""
    (tmp_path / "file").write_text("kept")

    build(tmp_path / name, 2)

    assert (tmp_path / "file").read_text() == "kept"


def test_an_existing_file_needs_overwrite(tmp_path):
    """It is not touched without the flag."""
    target = tmp_path / "ops.so"
    target.write_text("kept")

    assert "--overwrite" in build(target, 2)
    assert target.read_text() == "kept"


def test_help_teaches():
    """What it does, how to use the result, and the exit status."""
    result = CliRunner().invoke(cli.main, ["ops-library", "--help"])

    for text in ("dlopen", "LD_PRELOAD", "--portable", "Exit status", "libqrnn_torch_ops.so"):
        assert text in result.output
