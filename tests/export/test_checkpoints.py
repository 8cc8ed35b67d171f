"""Checkpoints of the original programs, through the importer and both artefacts."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from qrnn_export.importer import import_file
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError, UntrustedFileError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.closeness import max_abs
from support.runners import runners

CHECKPOINTS = Path(__file__).parents[1] / "golden/checkpoints"
AWD = [
    "awd_lstm_lm/state_dict_saved_in_training.pt",
    "awd_lstm_lm/state_dict_saved_after_eval.pt",
    "awd_lstm_lm/state_dict_dataparallel.pt",
]
FASTAI = [
    "fastai_v1/learner_saved_in_training.pth",
    "fastai_v1/state_dict_saved_in_training.pth",
]
PICKLES = ["awd_lstm_lm/pickled_module.pt", "awd_lstm_lm/pickled_list.pt"]
CHUNK = 5


def load(name, *, trust=False, **hints):
    return import_file(CHECKPOINTS / name, ImportHints(**hints), trust_pickle=trust)


def expected(name):
    """Tokens [B, T] and logits [B, T, V] of the original program."""
    folder = name.split("/")[0]
    arrays = np.load(CHECKPOINTS / folder / "expected.npz")
    tokens, logits = arrays["tokens"], arrays["logits"]
    if folder == "awd_lstm_lm":
        tokens, logits = tokens.swapaxes(0, 1), logits.swapaxes(0, 1)
    return torch.from_numpy(tokens.copy()), logits


@pytest.fixture
def awd_classes(monkeypatch):
    """The classes of awd-lstm-lm under their names, as far as unpickling needs them."""
    for place in (
        "model.RNNModel",
        "weight_drop.WeightDrop",
        "locked_dropout.LockedDropout",
        "splitcross.SplitCrossEntropyLoss",
        "torchqrnn.qrnn.QRNNLayer",
    ):
        home, _, name = place.rpartition(".")
        module = types.ModuleType(home)
        setattr(module, name, type(name, (torch.nn.Module,), {"__module__": home}))
        monkeypatch.setitem(sys.modules, home, module)
    monkeypatch.setitem(sys.modules, "torchqrnn", types.ModuleType("torchqrnn"))


def check(model, name, directory):
    """One call, and two chunks with the state carried, in every way of running the model."""
    tokens, logits = expected(name)
    ways = {"module": lambda x, state: model(x, None, state), **runners(model, directory)}
    for way, run in ways.items():
        whole, _ = run(tokens, None)
        first, state = run(tokens[:, :CHUNK], None)
        second, _ = run(tokens[:, CHUNK:], state)

        chunks = np.concatenate([np.asarray(first), np.asarray(second)], axis=1)
        assert max_abs(np.asarray(whole), logits) <= FLOAT32_MAX_ABS, way
        assert max_abs(chunks, logits) <= FLOAT32_MAX_ABS, way


@pytest.mark.parametrize("name", AWD + FASTAI)
def test_state_dicts_give_the_logits_of_the_original(name, tmp_path):
    """Module and artefacts agree with the original program, without one flag."""
    check(load(name).model, name, tmp_path)


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_give_the_logits_of_the_original(name, awd_classes, tmp_path):
    """A trusted pickle gives its module; inputs remembered from another batch are not used."""
    with pytest.raises(UntrustedFileError, match="--trust-pickle"):
        load(name)

    check(load(name, trust=True).model, name, tmp_path)


@pytest.mark.parametrize("name", PICKLES)
def test_trusted_pickles_say_which_modules_are_missing(name):
    """Without their classes they cannot be loaded; the modules to install are listed."""
    with pytest.raises(CheckpointError, match=r"locked_dropout, model, .*torchqrnn, weight_drop"):
        load(name, trust=True)


def test_an_encoder_saved_alone_gives_hidden_states():
    """Its hidden states under the decoder of the whole file are the logits."""
    encoder, whole = load("fastai_v1/encoder_only.pth").model, load(FASTAI[0]).model
    tokens, logits = expected(FASTAI[0])

    hidden = encoder(tokens)[0]

    assert encoder.head is None
    assert max_abs(whole.head(hidden), logits) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize(
    ("name", "layout", "padding_id"),
    [(AWD[0], "awd_lstm_lm", None), (FASTAI[0], "fastai_v1", 1)],
)
def test_what_the_layout_fixes_stands_in_the_notes(name, layout, padding_id):
    """Layout, windows, zoneout and padding id are said, found or named."""
    for hints in ({}, {"layout": layout}):
        imported = load(name, **hints)
        notes = "\n".join(imported.notes)

        assert f"layout {layout!r}" in notes
        assert "zoneout 0, by the layout" in notes
        assert "layer 0: hidden size 10, window 2, with output gate" in notes
        assert imported.model.config.padding_id == padding_id


def test_pqrnn_gives_the_logits_of_the_original(tmp_path):
    """A Lightning file: Hardtanh, QRNN, mean and head, in every way of running the model."""
    arrays = np.load(CHECKPOINTS / "pqrnn/expected.npz")
    projection, logits = torch.from_numpy(arrays["projection"]), arrays["logits"]
    imported = load("pqrnn/lightning.ckpt")

    assert "layout 'pqrnn'" in "\n".join(imported.notes)
    assert max_abs(imported.model(projection)[0], logits) <= FLOAT32_MAX_ABS
    for way, run in runners(imported.model, tmp_path).items():
        output = torch.as_tensor(run(projection, None)[0])
        assert max_abs(output, logits) <= FLOAT32_MAX_ABS, way


def test_a_pqrnn_that_is_an_lstm_is_refused_by_name(tmp_path):
    """C22: without torchqrnn the program trains an LSTM, and its file still says QRNN."""
    saved = torch.load(CHECKPOINTS / "pqrnn/lightning.ckpt", weights_only=True)
    head = {k: t for k, t in saved["state_dict"].items() if k.startswith("output.")}
    lstm = torch.nn.LSTM(12, 6, num_layers=2).state_dict()
    saved["state_dict"] = {**{f"hidden.{k}": t for k, t in lstm.items()}, **head}
    torch.save(saved, tmp_path / "impostor.ckpt")

    with pytest.raises(CheckpointError, match=r"LSTM weights found.*hidden\.weight_hh_l0"):
        import_file(tmp_path / "impostor.ckpt", ImportHints(), trust_pickle=False)


def test_a_pickled_lightning_file_needs_trust(tmp_path):
    """Hyper-parameters of a class of its own make the file a pickle that runs code."""
    saved = torch.load(CHECKPOINTS / "pqrnn/lightning.ckpt", weights_only=True)
    saved["hyper_parameters"] = types.SimpleNamespace(**saved["hyper_parameters"])
    torch.save(saved, tmp_path / "pickled.ckpt")

    with pytest.raises(UntrustedFileError, match=r"SimpleNamespace.*--trust-pickle"):
        import_file(tmp_path / "pickled.ckpt", ImportHints(), trust_pickle=False)
    trusted = import_file(tmp_path / "pickled.ckpt", ImportHints(), trust_pickle=True)
    assert trusted.model.config == load("pqrnn/lightning.ckpt").model.config
