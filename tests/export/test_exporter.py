"""A whole export: what appears, what is proven first, what is left behind when it fails."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch

import qrnn_export
from qrnn_export import ExportOptions, ImportHints, ParityError, export, exporter, writers
from qrnn_export.cases import POINTS
from qrnn_export.onnx_file import external_files, read_manifest
from qrnn_serve import QRNN, save
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.checkpoint import weights_sha256
from support.closeness import max_abs
from support.exported import MODELS, make_model, random_batch, session

ONNX_ONLY = ExportOptions(formats=("onnx",))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One complete export of a checkpoint, with both formats: model, folder, report, steps."""
    torch.manual_seed(1611)
    directory = tmp_path_factory.mktemp("whole")
    model = make_model(MODELS["ids, every pooling, head"])
    save(model, directory / "model.pt")
    steps = []
    report = export(directory / "model.pt", progress=steps.append)
    return model, directory, report, steps


def test_both_artefacts_appear_beside_the_checkpoint(whole):
    """MODEL.ts.pt and MODEL.onnx with their proofs, and nothing else."""
    _, directory, report, steps = whole

    artefacts = {"model.onnx", "model.ts.pt"}
    proofs = {f"{name}.proof.json" for name in artefacts}
    assert {p.name for p in directory.iterdir()} == {"model.pt", *artefacts, *proofs}
    assert [a.path.name for a in report.artefacts] == ["model.ts.pt", "model.onnx"]
    assert ["deprecated TorchScript" in notice for notice in report.notices] == [True, False]
    assert ["onnx_ops_library()" in notice for notice in report.notices] == [False, True]
    assert steps[0] == "Reading model.pt"


def test_report_and_manifest_hold_the_parity(whole):
    """Every case in every way stands in the report, and with the file's own numbers in the file."""
    model, directory, report, _ = whole
    ways = [(m.artefact, m.way) for m in report.proof.measurements]
    manifest = read_manifest(directory / "model.onnx")

    assert len(ways) == 4 * len(POINTS)
    assert all(m.difference <= FLOAT32_MAX_ABS * m.scale for m in report.proof.measurements)
    assert len(manifest.parity) == 2 * len(POINTS)
    assert "custom op, T=500 B=3 uneven, state" in manifest.parity
    assert manifest == report.artefacts[1].manifest
    assert manifest.weights_sha256 == weights_sha256(model.state_dict())
    assert manifest.versions["onnx"] == onnx.__version__
    extra = {"qrnn_manifest.json": ""}
    torch.jit.load(report.artefacts[0].path, _extra_files=extra)
    assert qrnn_export.exporter.Manifest.from_json(extra["qrnn_manifest.json"]).parity
    for artefact in report.artefacts:
        assert artefact.sha256 == hashlib.sha256(artefact.path.read_bytes()).hexdigest()


def test_published_files_give_the_numbers_of_the_module(whole):
    """What was published, not only what was proven, computes the same."""
    model, directory, _, _ = whole
    batch = random_batch(model, [3, 8], 8, with_state=True)
    want = model(batch.input, batch.lengths, batch.state)

    scripted = torch.jit.load(directory / "model.ts.pt")
    answers = [scripted(batch.input, batch.lengths, batch.state)]
    answers += [
        session(directory / "model.onnx", library=library).run(None, batch.feed())
        for library in (True, False)
    ]

    for answer in answers:
        for actual, wanted in zip(answer, want, strict=True):
            assert max_abs(actual, wanted.detach()) <= FLOAT32_MAX_ABS


def test_existing_artefacts_are_kept_unless_said(whole):
    """Without overwrite nothing is touched, and the message names the flag."""
    _, directory, _, _ = whole
    before = {p.name: p.read_bytes() for p in directory.iterdir()}

    with pytest.raises(ConfigError, match=r"model\.ts\.pt.*--overwrite"):
        export(directory / "model.pt")

    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before


def test_a_module_is_exported_with_weights_beside_it_and_replaced(tmp_path):
    """External data: relative name, both files reported; a later export takes the old ones away."""
    options = ExportOptions(formats=("onnx",), external_data_bytes=1024, overwrite=True)
    stack = QRNN(16, 24, 2).eval()
    first = export(stack, tmp_path / "new" / "folder", options)
    with torch.no_grad():
        stack.layers[0].linear.weight.mul_(0.5)
    report = export(stack, tmp_path / "new" / "folder", options)
    (artefact,) = report.artefacts
    weights, proof = artefact.beside

    assert first.artefacts[0].beside[0] != weights
    names = {p.name for p in artefact.path.parent.iterdir()}
    assert names == {"model.onnx", weights.name, proof.name}
    assert external_files(artefact.path) == [weights]
    assert artefact.path.stat().st_size < weights.stat().st_size
    x = torch.randn(2, 6, 16)
    feed = {"input": x.numpy(), "lengths": np.array([6, 6], np.int64)}
    output, _ = session(artefact.path, library=True).run(None, feed)
    assert max_abs(output.swapaxes(0, 1), stack(x.transpose(0, 1))[0].detach()) <= FLOAT32_MAX_ABS
    weights.unlink()
    with pytest.raises(Exception, match=weights.name):
        session(artefact.path, library=True)


def test_overwriting_removes_no_file_of_the_user(tmp_path):
    """What stands under the artefact's name may be no ONNX file, or name any other file."""
    tensor = onnx.TensorProto(name="w", data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="precious.bin")
    other = onnx.ModelProto()
    other.graph.initializer.append(tensor)
    (tmp_path / "precious.bin").write_text("mine")
    for content in (b"no model", other.SerializeToString()):
        (tmp_path / "model.onnx").write_bytes(content)
        targets = {"onnx": tmp_path / "model.onnx"}

        assert exporter.weights_beside(targets) == set()


def test_a_bare_state_dict_is_exported_with_its_notes(tmp_path):
    """The flags and what was inferred stand in the report and in the manifest."""
    torch.save(QRNN(5, 4, window=2).state_dict(), tmp_path / "old.pt")
    hints = ImportHints(hidden_size=(4,), window=(2,), zoneout=0.25)

    report = export(tmp_path / "old.pt", options=ExportOptions(formats=("onnx",), hints=hints))

    manifest = read_manifest(tmp_path / "old.onnx")
    assert manifest.notes == report.notes
    assert any("hidden size 4, window 2" in note for note in manifest.notes)
    assert manifest.config["qrnn"]["layers"][0]["zoneout"] == 0.25


@pytest.mark.parametrize("existing", [None, b"an older export"])
def test_a_failed_proof_leaves_the_folder_as_it_was(existing, monkeypatch, tmp_path):
    """When the file computes something else, it does not appear and an older one stays."""
    build = writers.build_model

    def build_wrong(config, weights, layout):
        wrong = {k: w * np.float32(1.01) for k, w in weights.items()}
        return build(config, wrong, layout)

    monkeypatch.setattr(writers, "build_model", build_wrong)
    if existing:
        (tmp_path / "model.onnx").write_bytes(existing)
    options = ExportOptions(formats=("onnx",), overwrite=True)

    with pytest.raises(ParityError, match="do not give the module's numbers") as caught:
        export(make_model(MODELS["stack windows"]), tmp_path, options)

    assert {m.way for m in caught.value.proof.failures()} == {"custom op", "function body"}
    left = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert left == ({"model.onnx": existing} if existing else {})


BLOCKED_EXPORT = """
import sys
from qrnn_export import cli, exporter
def prove(*_, **__):
    print("written", flush=True)
    sys.stdin.read()
exporter.prove = prove
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_export_leaves_no_half_file(how, tmp_path):
    """Killed after writing and before publishing: no artefact; after SIGTERM nothing at all."""
    save(make_model(MODELS["stack one"]), tmp_path / "model.pt")
    # Its pipes are closed and it is waited for, or a failure here would fail later tests as well.
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED_EXPORT, str(tmp_path / "model.pt"), "--format", "onnx"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        first = running.stdout.readline()
        running.send_signal(how)
        _, said = running.communicate(timeout=60)
    assert first == b"written\n", said.decode()

    left = [p.name for p in tmp_path.iterdir() if not p.name.startswith(".qrnn-export-")]
    assert left == ["model.pt"]
    if how == signal.SIGTERM:
        assert running.returncode == 128 + signal.SIGTERM
        assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_unwritable_folders_are_an_error_of_the_system(tmp_path):
    """A path that cannot be a folder is refused before the model is scripted."""
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        export(make_model(MODELS["stack one"]), tmp_path / "file" / "out", ONNX_ONLY)


@pytest.mark.parametrize(
    "options", [{"formats": ("tflite",)}, {"formats": ()}, {"external_data_bytes": 2**31 + 1}]
)
def test_options_are_checked(options):
    """An unknown format, no format, and weights that protobuf could not hold are refused."""
    with pytest.raises(ConfigError):
        ExportOptions(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xff\xff", "not an ONNX file"), (onnx.ModelProto().SerializeToString(), "no manifest")],
)
def test_foreign_onnx_files_have_no_manifest(content, message, tmp_path):
    """Reading the manifest of another file says what is wrong."""
    (tmp_path / "other.onnx").write_bytes(content)

    with pytest.raises(ArtefactError, match=message):
        read_manifest(tmp_path / "other.onnx")
