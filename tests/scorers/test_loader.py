"""Files that cannot be served, and devices that are not there: what is wrong and what to do."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import onnx
import pytest
import torch

from qrnn_serve.core.errors import (
    ArtefactError,
    CheckpointError,
    ConfigError,
    UntrustedFileError,
)
from qrnn_serve.core.manifest import MANIFEST_KEY
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.scorers import load_scorer, memory
from support.artefacts import packed


def truncated(source, target, share):
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * share)])
    return target


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("engine", ["native", "torchscript", "onnx"])
def test_truncated_file_is_named(artefacts, tmp_path, engine, share):
    """A file cut anywhere is refused with its name, by every engine."""
    source = artefacts["features"].paths[engine]
    path = truncated(source, tmp_path / source.name, share)

    with pytest.raises((ArtefactError, CheckpointError)) as refused:
        load_scorer(path)

    assert path.name in str(refused.value)


@pytest.mark.parametrize("name", ["none.pt", "none.ts.pt", "none.onnx", "none.safetensors"])
def test_missing_file_is_named(tmp_path, name):
    """A path that does not exist is said to be missing."""
    with pytest.raises(ArtefactError, match="no such file"):
        load_scorer(tmp_path / name)


def test_folder_and_other_endings_are_refused(tmp_path):
    """A folder or a file of another kind gets the list of what can be served."""
    other = tmp_path / "model.txt"
    other.write_text("x")

    for path in (tmp_path, other):
        with pytest.raises(ArtefactError, match=r"\.onnx"):
            load_scorer(path)


class Foreign(torch.nn.Module):
    def forward(self, x):
        return x


def test_foreign_torchscript_is_refused(tmp_path):
    """A scripted module of another program has no manifest, and the message says how to get one."""
    path = tmp_path / "foreign.ts.pt"
    torch.jit.save(torch.jit.script(Foreign()), str(path))

    with pytest.raises(ArtefactError, match="qrnn-export"):
        load_scorer(path)


def test_foreign_onnx_is_refused(tmp_path):
    """An ONNX model of another program is refused."""
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    value = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in "xy"]
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    path = tmp_path / "foreign.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)

    with pytest.raises(ArtefactError, match="qrnn-export"):
        load_scorer(path)


def test_pickled_module_is_refused_without_running_it(tmp_path):
    """A pickle is never loaded: the error names the risk."""
    path = tmp_path / "pickled.pt"
    torch.save(Foreign(), path)

    with pytest.raises(UntrustedFileError, match="code"):
        load_scorer(path)


def edit_manifest(source, target, change):
    """Copy a TorchScript file with another manifest."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(MANIFEST_KEY):
                data = json.dumps(change(json.loads(data))).encode()
            new.writestr(entry.filename, data)
    return target


MANIFEST_CHANGES = {
    "newer format": (lambda m: m | {"format_version": 99}, "format 99"),
    "other kind": (lambda m: m | {"kind": "onnx"}, "says onnx"),
    "unknown key": (lambda m: m | {"surprise": 1}, "surprise"),
    "other weights": (lambda m: m | {"weights_sha256": "0" * 64}, "weights are not those"),
    "other state": (lambda m: m | {"state": m["state"][:1]}, "contradicts itself"),
    "no outputs": (lambda m: m | {"outputs": []}, "expected outputs"),
    "broken config": (lambda m: m | {"config": {}}, "missing keys"),
}


@pytest.mark.parametrize(("change", "message"), MANIFEST_CHANGES.values(), ids=MANIFEST_CHANGES)
def test_torchscript_that_differs_from_its_manifest_is_refused(
    artefacts, tmp_path, change, message
):
    """A manifest of another release, kind or model is found before the first score."""
    source = artefacts["features"].paths["torchscript"]
    path = edit_manifest(source, tmp_path / "edited.ts.pt", change)

    for engine in ("torchscript", "native"):
        with pytest.raises(ArtefactError, match=message):
            load_scorer(path, engine=engine, allow_unproven=True)


def test_torchscript_with_a_changed_weight_is_refused(artefacts, tmp_path):
    """One weight that is not the exported one is found, also when the archive is intact."""
    source = artefacts["features"].paths["torchscript"]
    files = {MANIFEST_KEY: ""}
    module = torch.jit.load(str(source), _extra_files=files)
    with torch.no_grad():
        module.head.bias[0] += 1
    path = tmp_path / "changed.ts.pt"
    torch.jit.save(module, str(path), _extra_files=files)

    with pytest.raises(ArtefactError, match="weights are not those"):
        load_scorer(path, allow_unproven=True)


def test_onnx_that_differs_from_its_manifest_is_refused(artefacts, tmp_path):
    """An ONNX graph whose outputs are not those of its manifest is refused."""
    model = onnx.load(artefacts["features"].paths["onnx"])
    for entry in model.metadata_props:
        if entry.key == MANIFEST_KEY:
            manifest = json.loads(entry.value)
            manifest["config"]["head_size"] = None
            manifest["outputs"][0] |= {"name": "output", "shape": ["batch", "time", 14]}
            entry.value = json.dumps(manifest)
    path = tmp_path / "edited.onnx"
    onnx.save(model, path)

    with pytest.raises(ArtefactError, match="output"):
        load_scorer(path, allow_unproven=True)


def test_checkpoint_named_as_torchscript_is_refused(artefacts, tmp_path):
    """A checkpoint under the wrong name gets an error that says what it lacks."""
    path = tmp_path / "model.ts.pt"
    path.write_bytes(artefacts["ids"].paths["native"].read_bytes())

    with pytest.raises(ArtefactError, match="manifest"):
        load_scorer(path, allow_unproven=True)


def test_torchscript_under_another_name_is_recognised(artefacts, tmp_path):
    """A TorchScript file is known by its content, whatever its name before .pt."""
    path = tmp_path / "renamed.pt"
    path.write_bytes(artefacts["ids"].paths["torchscript"].read_bytes())

    assert load_scorer(path, threads=1, allow_unproven=True).engine == "torchscript"


@pytest.mark.parametrize("engine", ["native", "torchscript", "onnx"])
@pytest.mark.parametrize("device", ["cuda:99", "gpu", "mps"])
def test_device_that_is_not_there_is_an_error(artefacts, engine, device):
    """The device asked for is the one used: another one is never taken in its place."""
    with pytest.raises(ConfigError, match="device"):
        load_scorer(artefacts["ids"].paths[engine], device)


@pytest.mark.parametrize(
    ("file", "engine"), [("native", "onnx"), ("native", "torchscript"), ("onnx", "native")]
)
def test_engine_that_does_not_fit_the_file_is_an_error(artefacts, file, engine):
    """An engine that cannot run a file is refused with those that can."""
    with pytest.raises(ConfigError, match=f"engine '{engine}'"):
        load_scorer(artefacts["ids"].paths[file], engine=engine)


def test_memory_limit_follows_the_widest_layer():
    """A timestep's bytes are those of the widest layer's input, window, gates and results."""
    layers = (LayerConfig(hidden_size=100, window=2), LayerConfig(hidden_size=10))
    config = SequenceModelConfig(qrnn=QRNNConfig(input_size=50, layers=layers))

    numbers = 50 * 3 + 100 * 5 + 50 + 10
    assert memory.bytes_per_timestep(config, "float32") == 4 * numbers
    assert memory.most_timesteps(config, "float32", free_bytes=4 * numbers * 20) == 10
    assert memory.most_timesteps(config, "float32", free_bytes=0) == 1
    numbers += 100 * 7  # the scan of a portable file
    assert memory.bytes_per_timestep(config, "float32", portable=True) == 4 * numbers
    assert memory.free_host_bytes() > 1 << 20


def test_scorer_that_was_closed_is_not_used(artefacts):
    """After close a scorer refuses work instead of crashing."""
    for engine in ("native", "onnx"):
        scorer = load_scorer(artefacts["features"].paths[engine], threads=1)
        scorer.close()
        with pytest.raises(RuntimeError, match="closed"):
            scorer.score(packed([np.zeros((1, 5), np.float32)]))


def test_compressed_manifest_of_great_size_is_not_unpacked(tmp_path):
    """A manifest that declares a great size is refused before it takes memory."""
    path = tmp_path / "bomb.ts.pt"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"model/extra/{MANIFEST_KEY}", bytes(64 << 20))
    path.write_bytes(data.getvalue())

    with pytest.raises(ArtefactError, match="larger than any"):
        load_scorer(path, allow_unproven=True)


def test_a_chain_of_stages_says_what_to_serve(tmp_path):
    """The file that qrnn-export --stages writes is no model; the whole can be placed."""
    path = tmp_path / "model.stages.json"
    path.write_text("{}")

    with pytest.raises(ArtefactError, match=r"serve the checkpoint.*--placement layers"):
        load_scorer(path)
