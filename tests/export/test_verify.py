"""Proving an artefact once more: its own files, its checkpoint, real rows, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from qrnn_export import ExportOptions, ParityError, export, verify
from qrnn_export.artefact import read_artefact
from qrnn_export.cases import POINTS
from qrnn_export.cli import main
from qrnn_export.onnx_layers import weight_name
from qrnn_export.writers import WRITERS
from qrnn_serve import save
from qrnn_serve.core.errors import ArtefactError, InputError
from qrnn_serve.core.proof_file import proof_path, write_proof
from support.exported import MODELS, make_model, write

FORMATS = ("torchscript", "onnx", "pt2")
SUFFIXES = [WRITERS[name].suffix for name in FORMATS]
WAYS = {".ts.pt": 2, ".onnx": 2, ".pt2": 1}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two models with their artefacts: one of ids, one of features."""
    folders = {}
    for name, key in (("ids", "ids, every pooling, head"), ("features", "stack windows")):
        torch.manual_seed(1611)
        folders[name] = tmp_path_factory.mktemp(name)
        save(make_model(MODELS[key]), folders[name] / "model.pt")
        export(folders[name] / "model.pt", options=ExportOptions(formats=FORMATS))
    return folders


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of the model of features that a test may damage."""
    return Path(shutil.copytree(exported["features"], tmp_path / "copy"))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["ids", "features"])
def test_artefact_is_proven_again(exported, name, suffix):
    """With its own weights, and with the checkpoint: the same cases, the same small differences."""
    folder = exported[name]
    alone = verify(folder / f"model{suffix}")
    against = verify(folder / f"model{suffix}", folder / "model.pt")

    assert alone == against
    assert len(alone.measurements) == WAYS[suffix] * len(POINTS)
    assert not alone.failures()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_real_rows_are_compared_too(exported, suffix, tmp_path):
    """Rows of any length, from a Parquet file, at most 256 of them."""
    folder = exported["features"]
    random = np.random.default_rng(3)
    width = read_artefact(folder / "model.onnx")[1].config.qrnn.input_size
    rows = [random.standard_normal((1 + i % 9, width)).tolist() for i in range(300)]
    pq.write_table(pa.table({"features": rows}), tmp_path / "rows.parquet")
    proof = verify(folder / f"model{suffix}", data=tmp_path / "rows.parquet")

    names = {m.case for m in proof.measurements}
    assert len(proof.measurements) == WAYS[suffix] * (len(POINTS) + 8)
    assert {"rows 0 to 31", "rows 224 to 255"} <= names
    assert not proof.failures()


@pytest.mark.parametrize("name", MODELS)
def test_onnx_holds_the_weights_of_the_module(name, tmp_path):
    """Every tensor of every kind of model comes back from the graph, bit for bit."""
    torch.manual_seed(5)
    model = make_model(MODELS[name])
    (path,) = write(model, tmp_path, "onnx")
    _, read = read_artefact(path)

    assert read.config == model.config
    for key, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], tensor), key


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_checkpoint_of_another_model_is_refused(folder, suffix):
    """The message names both files, before anything is measured."""
    torch.manual_seed(2)
    save(make_model(MODELS["stack windows"]), folder / "other.pt")

    with pytest.raises(ParityError, match=r"other\.pt does not hold the weights that .*model"):
        verify(folder / f"model{suffix}", folder / "other.pt")


def test_onnx_with_a_changed_weight_is_found(folder):
    """Also where somebody made the proof file fit the changed artefact again."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    name = weight_name("qrnn.layers.0.linear.weight")
    (weight,) = (t for t in model.graph.initializer if t.name == name)
    content = bytearray(weight.raw_data)
    content[1] ^= 1
    weight.raw_data = bytes(content)
    onnx.save(model, path)

    with pytest.raises(ArtefactError, match="damaged, or not the file"):
        verify(path)
    write_proof(path, [], measured(folder))
    with pytest.raises(ArtefactError, match="weights are not those that were exported"):
        verify(path)


def measured(folder):
    return json.loads(proof_path(folder / "model.onnx").read_text())["measured"]


BAD_ROWS = {
    "width": ([[[1.0, 2.0]]], "row 0: expected lists of"),
    "text": (["text"], "row 0: expected lists of"),
    "empty": ([[]], "row 0: expected lists of"),
    "no rows": ([], "has no rows"),
}


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_do_not_fit_are_named(exported, tmp_path, rows, message):
    """File, row, what was expected and what came."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"features": pa.array(rows)}), path)

    with pytest.raises(InputError, match=message):
        verify(exported["features"] / "model.onnx", data=path)


def test_ids_out_of_range_and_missing_columns_are_named(exported, tmp_path):
    """An id above the vocabulary, a column that is not there, a file that is no Parquet."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"tokens": [[1, 2], [3, 99]]}), path)
    artefact = exported["ids"] / "model.onnx"

    with pytest.raises(InputError, match=r"row 1: expected ids from 0 to 10"):
        verify(artefact, data=path, column="tokens")
    with pytest.raises(InputError, match=r"no column 'features', only \['tokens'\]"):
        verify(artefact, data=path)
    with pytest.raises(InputError, match="expected a Parquet file"):
        verify(artefact, data=artefact)


def test_command_proves_and_says_so(exported):
    """`qrnn-export verify`: a table and status 0; bad input has status 2 and one line."""
    folder = exported["ids"]
    proven = CliRunner().invoke(
        main, ["verify", str(folder / "model.onnx"), "--against", str(folder / "model.pt")]
    )
    missing = CliRunner().invoke(main, ["verify", str(folder / "none.onnx")])

    assert proven.exit_code == 0, proven.output
    assert "custom op" in proven.output
    assert "function body" in proven.output
    assert missing.exit_code == 2
    assert "none.onnx.proof.json: missing" in missing.output
