"""A checkpoint gives back the same config and the same bits, and is written whole or not at all."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qrnn_serve import QRNN, SequenceModel, load, save
from qrnn_serve.core.errors import InputError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.checkpoint import unwrap, weights_sha256
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.closeness import max_abs
from support.devices import DEVICES
from support.stacks import STACKS
from support.whole_models import MODELS, random_input

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
SUFFIXES = [".pt", ".safetensors"]
SMALL = MODELS["windows-last_max_mean-ids-head"]


@pytest.fixture
def saved(tmp_path):
    """A small model saved in both formats: (model, folder)."""
    model = SequenceModel(SMALL).eval()
    for suffix in SUFFIXES:
        save(model, tmp_path / f"model{suffix}")
    return model, tmp_path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_saved_one(name, suffix, device, tmp_path):
    """Config, dtype, every bit of the weights, evaluation mode, trainable, on any device."""
    model = SequenceModel(MODELS[name], dtype=torch.float64)
    save(model, tmp_path / f"model{suffix}")

    loaded = load(tmp_path / f"model{suffix}", map_location=device)

    assert loaded.config == model.config
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert {str(parameter.device.type) for parameter in loaded.parameters()} == {device}
    weights = loaded.state_dict()
    assert all(torch.equal(weights[k].cpu(), t) for k, t in model.state_dict().items())
    x = torch.stack(random_input(model.config, [4, 4], torch.float64))
    assert torch.equal(loaded.cpu()(x)[0], model.eval()(x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_half_precision_weights_stay_as_they_are(suffix, dtype, tmp_path):
    """No dtype is widened or rounded on the way."""
    model = SequenceModel(SMALL, dtype=dtype)
    save(model, tmp_path / f"model{suffix}")

    weights = load(tmp_path / f"model{suffix}").state_dict()

    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert all(torch.equal(weights[k], t) for k, t in model.state_dict().items())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_checkpoints_of_the_first_format_load_for_ever(suffix):
    """The committed files give the outputs that were computed, in float64, when they were made."""
    expected = np.load(GOLDEN / "qrnn_serve_v1" / "expected.npz")
    model = load(GOLDEN / "qrnn_serve_v1" / f"model{suffix}")

    output, state = model(
        torch.from_numpy(expected["ids"]),
        torch.from_numpy(expected["lengths"]),
        torch.from_numpy(expected["state"]),
    )

    assert max_abs(output, expected["output"]) <= FLOAT32_MAX_ABS
    assert max_abs(state, expected["state_out"]) <= FLOAT32_MAX_ABS
    assert model.config.qrnn.layers == (
        LayerConfig(hidden_size=5, window=2, zoneout=0.125),
        LayerConfig(hidden_size=3, output_gate=False),
    )


def test_wrappers_are_taken_off(tmp_path):
    """C51: DataParallel around a compiled model is saved as the model itself."""
    model = SequenceModel(SMALL)
    wrapped = nn.DataParallel(torch.compile(nn.DataParallel(model)))

    save(wrapped, tmp_path / "model.pt")

    assert unwrap(wrapped) is model
    assert set(load(tmp_path / "model.pt").state_dict()) == set(model.state_dict())


def test_a_bare_stack_is_saved_as_a_model_without_the_rest(tmp_path):
    """A QRNN comes back inside a SequenceModel without embedding, pooling and head."""
    qrnn = QRNN.from_config(STACKS["joined"]).eval()
    save(qrnn, tmp_path / "model.pt")
    x = torch.randn(2, 5, 3)

    loaded = load(tmp_path / "model.pt")

    assert loaded.config == SequenceModelConfig(qrnn=STACKS["joined"])
    assert max_abs(loaded(x)[0], qrnn(x.transpose(0, 1))[0].transpose(0, 1)) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tied_and_viewed_weights_are_stored_whole_and_alone(suffix, tmp_path):
    """Tied weights come back equal; a view of a large buffer stores its own values only."""
    config = SequenceModelConfig(
        qrnn=QRNNConfig(input_size=4, layers=(LayerConfig(hidden_size=4),)),
        vocabulary_size=9,
        head_size=9,
    )
    model = SequenceModel(config)
    model.head.weight = model.embedding.weight
    model.head.bias = nn.Parameter(torch.randn(100_000)[7:16])

    save(model, tmp_path / f"model{suffix}")

    weights = load(tmp_path / f"model{suffix}").state_dict()
    assert torch.equal(weights["head.weight"], model.embedding.weight)
    assert torch.equal(weights["embedding.weight"], model.embedding.weight)
    assert torch.equal(weights["head.bias"], model.head.bias)
    assert (tmp_path / f"model{suffix}").stat().st_size < 20_000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_weights_that_are_not_finite_are_kept_and_reported(suffix, tmp_path, caplog):
    """A checkpoint changes no number; the log names the tensors, when saving and when loading."""
    model = SequenceModel(SMALL)
    with torch.no_grad():
        model.head.weight[1, 2] = float("nan")
        model.head.bias[0] = float("inf")

    with caplog.at_level(logging.WARNING, "qrnn_serve.model.checkpoint"):
        save(model, tmp_path / f"model{suffix}")
        weights = load(tmp_path / f"model{suffix}").state_dict()

    assert torch.equal(weights["head.weight"].isnan(), model.head.weight.isnan())
    assert weights["head.bias"][0] == float("inf")
    assert len(caplog.records) == 2
    assert all("head.bias, head.weight" in record.getMessage() for record in caplog.records)


def test_finite_weights_are_not_reported(saved, caplog):
    """No warning without cause."""
    _, folder = saved

    load(folder / "model.pt")

    assert caplog.records == []


def test_hash_is_of_names_dtypes_shapes_and_bytes():
    """Order does not matter; a name, a dtype, a shape and a single bit do."""
    base = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
    digest = weights_sha256(base)

    assert digest == weights_sha256(dict(reversed(base.items())))
    others = [
        {"c": base["a"], "b": base["b"]},
        {**base, "a": base["a"].view(3, 2)},
        {**base, "b": torch.zeros(2, dtype=torch.float16)},
        {**base, "b": torch.tensor([0.0, -0.0])},
        {**base, "c": torch.zeros(0)},
    ]
    assert len({digest, *(weights_sha256(other) for other in others)}) == 6


def test_saving_is_all_or_nothing(saved, monkeypatch):
    """A save that fails half-way leaves the old file and no other."""
    model, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for suffix in SUFFIXES:
        with pytest.raises(OSError, match="No space left"):
            save(model.double(), folder / f"model{suffix}")

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_readers_never_see_half_a_file(tmp_path):
    """While one thread saves over and over, another always loads a whole model."""
    path = tmp_path / "model.pt"
    model = SequenceModel(SMALL)
    save(model, path)
    done = threading.Event()

    def write():
        for _ in range(30):
            save(model, path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or reads == 0:
        load(path)
        reads += 1
    writer.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt"]


def test_saved_files_have_the_permissions_of_new_files(saved):
    """Both formats are as readable as any file that this process makes."""
    _, folder = saved
    (folder / "other").touch()
    expected = (folder / "other").stat().st_mode

    assert {(folder / f"model{suffix}").stat().st_mode for suffix in SUFFIXES} == {expected}


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (nn.LSTM(2, 3), "model.pt", "SequenceModel or a QRNN, got LSTM"),
        (QRNN(2, 3), "model.onnx", r"ends in \.pt or \.safetensors"),
    ],
)
def test_what_cannot_be_saved_is_refused(model, name, message, tmp_path):
    """Another module or ending is an error, and no file is made."""
    with pytest.raises(InputError, match=message):
        save(model, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
