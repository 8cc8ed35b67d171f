"""The torch.export program: its numbers at every size, its bytes, and what is read from it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import qrnn_serve.kernels.ops  # noqa: F401  (a program calls them by name)
from qrnn_export import ExportOptions, export, verify
from qrnn_export.artefact import read_artefact
from qrnn_export.artefact_manifest import make_manifest
from qrnn_export.program_file import export_program, refuse_without_compiler, write_program
from qrnn_serve import save
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.model.precision import convert
from qrnn_serve.model.program_weights import read_program_weights, refuse_code
from qrnn_serve.scorers import load_scorer
from support.artefacts import packed, random_model, random_rows, scores_by_hand
from support.closeness import max_abs
from support.exported import MODELS, make_model, random_batch, reference_model, write

SOME = ("stack windows", "stack joined", "ids, every pooling, head", "last of two directions")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The file of each of SOME in float32, by name."""
    paths = {}
    for name in SOME:
        directory = tmp_path_factory.mktemp("program")
        (paths[name],) = write(convert(reference_model(name), "float32"), directory, "pt2")
    return paths


@pytest.fixture
def copy(programs, tmp_path):
    """A file that a test may damage."""
    path = tmp_path / "model.pt2"
    path.write_bytes(programs["stack windows"].read_bytes())
    return path


SIZES = {
    "one": ([1], 1),
    "two rows of one": ([1, 1], 1),
    "shorter than the windows": ([1, 2, 3], 3),
    "uneven": ([3, 0, 129, 1], 129),
    "all empty": ([0, 0], 4),
    "padding alone after the rows": ([2, 1], 9),
    "one long": ([2000], 2000),
    "many": ([2] * 70, 2),
    "no row": ([], 3),
    "no timestep": ([0, 0], 0),
}


@pytest.mark.parametrize("name", SOME)
def test_program_gives_the_float64_numbers_at_every_size(programs, name):
    """One file, any B and T, 0 and 1 among them; what stands at padding changes nothing."""
    program = torch.export.load(programs[name]).module()
    wide = convert(convert(reference_model(name), "float32"), "float64")
    torch.manual_seed(5)
    for size, (lengths, timesteps) in SIZES.items():
        batch = random_batch(convert(wide, "float32"), lengths, timesteps, with_state=True)
        inputs = [t.double() if t.is_floating_point() else t for t in (batch.input, batch.state)]

        got = program(batch.input, batch.lengths, batch.state)
        want = wide(inputs[0], batch.lengths, inputs[1])

        for actual, expected in zip(got, want, strict=True):
            scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
            assert actual.dtype == torch.float32
            assert max_abs(actual, expected) <= FLOAT32_MAX_ABS * scale, size


def test_float64_program_is_exact(tmp_path):
    """Traced in float64, it computes in float64."""
    model = reference_model("stack joined")
    (path,) = write(model, tmp_path, "pt2")
    batch = random_batch(model, [7, 3], 7, with_state=True)

    got = torch.export.load(path).module()(batch.input, batch.lengths, batch.state)

    for actual, expected in zip(got, model(batch.input, batch.lengths, batch.state), strict=True):
        assert max_abs(actual, expected) <= GOLDEN_FLOAT64_MAX_ABS


@pytest.mark.parametrize("lengths", [[5, 2], [-1, 2]])
def test_lengths_outside_the_input_stop_the_run(programs, lengths):
    """They would read other rows' timesteps."""
    program = torch.export.load(programs["stack windows"]).module()

    with pytest.raises(RuntimeError, match="lengths: expected 0 to the timesteps"):
        program(torch.zeros(2, 4, 3), torch.tensor(lengths), torch.zeros(2, 26))


@pytest.mark.parametrize(("rows", "states"), [(1, 2), (2, 1), (3, 3)])
def test_batches_that_do_not_fit_together_stop_the_run(programs, rows, states):
    """Lengths or states for another number of rows."""
    program = torch.export.load(programs["stack windows"]).module()

    with pytest.raises((AssertionError, RuntimeError)):
        program(torch.zeros(2, 4, 3), torch.full((rows,), 4), torch.zeros(states, 26))


def test_no_byte_depends_on_the_name_of_the_file(tmp_path):
    """Nor does a path of this machine stand in it. `test_torchscript_file` asks two processes."""
    model = make_model(MODELS["stack zoneout"])
    program, manifest = export_program(model), make_manifest("pt2", model, ())
    for name in ("a.pt2", "other.pt2"):
        write_program(program, tmp_path / name, manifest)

    content = (tmp_path / "a.pt2").read_bytes()
    assert content == (tmp_path / "other.pt2").read_bytes()
    assert b"qrnn_serve/" not in content
    assert b"qrnn_export/" not in content


def test_a_full_disk_is_an_error_of_the_system():
    """torch itself would end the process."""
    model = make_model(MODELS["stack zoneout"])

    with pytest.raises(OSError, match="No space left"):
        write_program(export_program(model), Path("/dev/full"), make_manifest("pt2", model, ()))


def test_weights_come_back_bit_for_bit(programs):
    """In every file, without torch.export.load."""
    for name, path in programs.items():
        manifest, read = read_artefact(path)

        assert (manifest.kind, manifest.precision) == ("pt2", "float32")
        assert [s.optional for s in manifest.inputs] == [False, False, False]
        for key, tensor in convert(reference_model(name), "float32").state_dict().items():
            assert torch.equal(read.state_dict()[key], tensor), key


def test_a_view_of_a_larger_tensor_is_written_alone(tmp_path):
    """A row of a matrix, a transposed one: their bytes, not those around them."""
    model = make_model(MODELS["stack one"])
    linear = model.qrnn.layers[0].linear
    wide = torch.randn(30, 4)
    linear.weight = torch.nn.Parameter(wide[5:17], requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(12, 2)[:, 1], requires_grad=False)
    (path,) = write(model, tmp_path, "pt2")

    weights = read_program_weights(path, model)

    assert torch.equal(weights["qrnn.layers.0.linear.weight"], wide[5:17])
    assert torch.equal(weights["qrnn.layers.0.linear.bias"], linear.bias)


def rewrite(path, name, change):
    """The archive with one entry changed, or a new one."""
    with zipfile.ZipFile(path) as archive:
        entries = {i.filename: archive.read(i) for i in archive.infolist()}
    entries[f"archive/{name}"] = change(entries.get(f"archive/{name}", b""))
    with zipfile.ZipFile(path, "w") as archive:
        for filename, content in entries.items():
            archive.writestr(filename, content)


CODE = {
    "expression": (
        "models/model.json",
        lambda b: b.replace(b"Symbol('u0', integer=True)", b"__import__('os').system('id')", 1),
    ),
    "expression by attributes": (
        "models/model.json",
        lambda b: b.replace(b"Symbol('u0', integer=True)", b"Add(1).__class__", 1),
    ),
    "guard": (
        "models/model.json",
        lambda b: b.replace(b"L['state'].size()[0] ==", b"print('here') or 1 ==", 1),
    ),
    "operator": (
        "models/model.json",
        lambda b: b.replace(b"torch.ops.aten.cumsum.default", b"torch.ops.load_library", 1),
    ),
    "pickled example": ("data/sample_inputs/model.pt", lambda _: b"\x80\x02."),
    "pickled weight": (
        "data/weights/model_weights_config.json",
        lambda b: b.replace(b'"use_pickle": false', b'"use_pickle": true', 1),
    ),
    "object": ("data/constants/opaque_obj_0", lambda _: b"\x80\x02."),
    "machine code": ("data/aotinductor/model/model.so", lambda _: b"\x7fELF"),
}


@pytest.mark.parametrize(("name", "change"), CODE.values(), ids=CODE)
def test_a_file_that_would_run_code_when_loaded_is_refused(copy, name, change):
    """torch.export.load would unpickle it, evaluate it or load it; an honest file passes."""
    refuse_code(copy)
    before = copy.read_bytes()
    rewrite(copy, name, change)

    assert copy.read_bytes() != before
    with pytest.raises(ArtefactError, match=r"might run|does not write|never writes"):
        refuse_code(copy)


def test_damaged_weights_are_found(copy):
    """Cut off, of another size, under another name, or no archive at all."""
    model = convert(reference_model("stack windows"), "float32")
    config = "data/weights/model_weights_config.json"
    whole = copy.read_bytes()

    rewrite(copy, "data/weights/weight_0", lambda b: b[:-4])
    with pytest.raises(ArtefactError, match="has 536 bytes, its shape says 540"):
        read_program_weights(copy, model)
    rewrite(copy, config, lambda b: b.replace(b"layers.0", b"layers.7"))
    with pytest.raises(ArtefactError, match="expected weights"):
        read_program_weights(copy, model)
    rewrite(copy, config, lambda _: b"{")
    with pytest.raises(ArtefactError, match="is not JSON"):
        read_program_weights(copy, model)
    copy.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtefactError, match="damaged, or not written"):
        read_artefact(copy)


def test_server_scores_it_natively(tmp_path):
    """Loaded without running it, by our own module; and proven again with its checkpoint."""
    model = random_model("ids")
    save(model, tmp_path / "model.pt")
    (written,) = export(tmp_path / "model.pt", options=ExportOptions(formats=("pt2",))).artefacts
    rows = random_rows(model.config, [3, 1, 40, 129])

    scorer = load_scorer(written.path, threads=1)
    scored = scorer.score(packed(rows))

    assert scorer.engine == "native"
    expected = scores_by_hand(model, rows)
    np.testing.assert_allclose(scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
    assert {m.way for m in verify(written.path, tmp_path / "model.pt").measurements} == {"program"}
    with pytest.raises(ConfigError, match="engine 'torchscript' does not run"):
        load_scorer(written.path, engine="torchscript")


@pytest.mark.timeout(900)  # a C++ compiler at work, half a minute on a machine of its own
def test_machine_code_gives_the_same_numbers(tmp_path):
    """Compiled by AOTInductor, proven in a fresh process, refused where loading would run it."""
    model = make_model(MODELS["stack one"])
    (written,) = export(model, tmp_path, ExportOptions(formats=("aot",))).artefacts

    rows = json.loads(written.beside[-1].read_text())["measured"]["measurements"]
    assert {row["run as"] for row in rows} == {"compiled"}
    assert written.path.name == "model.aot.pt2"
    with pytest.raises(ArtefactError, match="machine code"):
        verify(written.path)
    with pytest.raises(ArtefactError, match="machine code"):
        load_scorer(written.path)


def test_no_compiler_is_said_before_any_work(monkeypatch, tmp_path):
    """What torch looked for, and what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(ConfigError, match=r"--aot: torch compiles with g\+\+.*CXX"):
        refuse_without_compiler()
    with pytest.raises(ConfigError, match="--aot"):
        export(tmp_path / "nowhere.pt", options=ExportOptions(formats=("aot",)))
