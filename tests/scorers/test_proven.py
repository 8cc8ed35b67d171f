"""The proof beside an artefact: what is refused without it; no byte changes unseen."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from qrnn_export import ExportOptions, export
from qrnn_serve import QRNN
from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.proof_file import proof_path
from qrnn_serve.scorers import load_scorer

ENGINES = ["torchscript", "onnx"]


@pytest.fixture
def copied(artefacts, tmp_path):
    """Copies an artefact and its proof, under the name given."""

    def copy(engine, name=None):
        source = artefacts["features"].paths[engine]
        target = tmp_path / (name or source.name)
        shutil.copy(source, target)
        shutil.copy(proof_path(source), proof_path(target))
        return target

    return copy


@pytest.mark.parametrize("engine", ENGINES)
def test_proven_artefact_loads_under_another_name(copied, engine):
    """Both files renamed together are still what was proven."""
    suffix = {"torchscript": ".ts.pt", "onnx": ".onnx"}[engine]

    assert load_scorer(copied(engine, f"renamed{suffix}"), threads=1).engine == engine


@pytest.mark.parametrize("engine", ENGINES)
def test_artefact_without_its_proof_is_refused(copied, caplog, engine):
    """The message names the file and the flag; with the flag it loads and a warning says so."""
    path = copied(engine)
    proof_path(path).unlink()

    with pytest.raises(ArtefactError, match=r"proof\.json: missing.*--allow-unproven"):
        load_scorer(path)
    load_scorer(path, threads=1, allow_unproven=True)

    assert "without its proof" in caplog.text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_one_changed_bit_is_found(copied, engine, share):
    """One bit of the artefact, wherever it lies: ONNX itself has no checksum of its weights."""
    path = copied(engine)
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)

    with pytest.raises(ArtefactError, match="damaged, or not the file"):
        load_scorer(path)


@pytest.mark.parametrize("engine", ENGINES)
def test_proof_that_was_edited_is_refused(copied, engine):
    """A difference that somebody made smaller is not what the artefact's manifest vouches for."""
    path = copied(engine)
    proof = json.loads(proof_path(path).read_text())
    proof["measured"]["measurements"][0]["difference"] /= 2
    proof["measured"]["tolerance"] *= 2
    proof_path(path).write_text(json.dumps(proof))

    with pytest.raises(ArtefactError, match="was changed, or is the proof of another export"):
        load_scorer(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("[1]", "proof format None"),
        ('{"format_version": 2}', "proof format 2"),
        ('{"format_version": 1}', "missing keys"),
    ],
)
def test_proof_that_cannot_be_read_is_named(copied, content, message):
    """A damaged proof, or one of another release, is named."""
    path = copied("onnx")
    proof_path(path).write_text(content)

    with pytest.raises(ArtefactError, match=rf"proof\.json.*{message}"):
        load_scorer(path)


def test_weights_beside_an_artefact_are_part_of_the_proof(tmp_path):
    """External data of ONNX: missing or damaged is found before the runtime reads it."""
    torch.manual_seed(3)
    options = ExportOptions(formats=("onnx",), external_data_bytes=1024)
    report = export(QRNN(16, 24, 2).eval(), tmp_path, options)
    (artefact,) = report.artefacts
    (weights,) = (path for path in artefact.beside if path.suffix == ".data")
    load_scorer(artefact.path, threads=1)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)

    with pytest.raises(ArtefactError, match=f"{weights.name}: damaged"):
        load_scorer(artefact.path)
    weights.unlink()
    with pytest.raises(ArtefactError, match=f"needs {weights.name} beside it"):
        load_scorer(artefact.path)
