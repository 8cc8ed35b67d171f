"""Layouts of fastai, awd-lstm-lm and PASE+: what is read, left out and refused."""

from __future__ import annotations

import pytest
import torch

from qrnn_export.importer import import_saved
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.closeness import max_abs
from support.foreign_checkpoints import fastai_language_model, pase_encoder
from support.runners import runners


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1611)


def notes_of(imported):
    return "\n".join(imported.notes)


def check(foreign, directory):
    """Module and artefacts against the loops; the imported model is returned."""
    imported = import_saved(foreign.tensors, ImportHints())
    model = imported.model
    assert max_abs(model(foreign.input)[0], foreign.output) <= FLOAT32_MAX_ABS
    for way, run in runners(model, directory).items():
        output = torch.as_tensor(run(foreign.input, None)[0])
        assert max_abs(output, foreign.output) <= FLOAT32_MAX_ABS, way
    return imported


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "bidirectional"])
def test_fastai_2_gives_its_logits(bidirectional, tmp_path):
    """Levels are joined one by one, with and without a backward direction."""
    imported = check(fastai_language_model(bidirectional=bidirectional), tmp_path)

    assert "layout 'fastai_v2'" in notes_of(imported)
    assert imported.model.config.qrnn.zoneout_rule == "fastai"


@pytest.mark.parametrize("form", ["whole", "no layers.0", "encoder", "early encoder", "classifier"])
def test_fastai_1_names_are_recognised(form):
    """Early names, encoders alone and the prefix of classifiers are all the same weights."""
    foreign = fastai_language_model(bidirectional=False, version=1)
    whole = import_saved(foreign.tensors, ImportHints()).model
    alone = {k.removeprefix("0."): t for k, t in foreign.tensors.items() if k.startswith("0.")}
    tensors = {
        "whole": foreign.tensors,
        "no layers.0": {k.replace(".layers.0", ""): t for k, t in foreign.tensors.items()},
        "encoder": alone,
        "early encoder": {k.replace(".layers.0", ""): t for k, t in alone.items()},
        "classifier": {f"0.module.{k}": t for k, t in alone.items()},
    }[form]

    imported = import_saved(tensors, ImportHints())

    assert "layout 'fastai_v1'" in notes_of(imported)
    output, expected = (
        model.qrnn(model.embedding(foreign.input).transpose(0, 1))[0]
        for model in (imported.model, whole)
    )
    assert max_abs(output, expected) == 0


def test_a_fastai_classifier_is_refused_with_what_is_missing():
    """Its head cannot be said by SequenceModel; the encoder alone is not exported in silence."""
    tensors = fastai_language_model(bidirectional=False).tensors
    encoder = {f"0.module.{k[2:]}": t for k, t in tensors.items() if k.startswith("0.")}

    with pytest.raises(CheckpointError, match=r"batch normalisation and hidden layers.*encoder"):
        import_saved({**encoder, "1.layers.0.weight": torch.randn(18)}, ImportHints())


def test_two_copies_of_an_embedding_must_be_one():
    """A file whose two embeddings differ was changed by hand; neither is chosen in silence."""
    tensors = dict(fastai_language_model(bidirectional=False).tensors)
    tensors["0.encoder_dp.emb.weight"] = tensors["0.encoder.weight"] + 1

    with pytest.raises(CheckpointError, match="are one embedding"):
        import_saved(tensors, ImportHints())


def awd(**changes):
    tensors = {
        "encoder.weight": torch.randn(11, 6),
        "rnns.0.linear.module.weight_raw": torch.randn(30, 12),
        "rnns.0.linear.module.bias": torch.randn(30),
        "decoder.weight": torch.randn(11, 10),
        "decoder.bias": torch.randn(11),
    }
    return {**tensors, **changes}


def test_an_untied_decoder_reads_the_last_hidden_size():
    """The decoder's columns, not the embedding's, are the last layer's width."""
    tensors = awd()

    model = import_saved(tensors, ImportHints()).model

    assert model.config.qrnn.layers[-1].hidden_size == 10
    assert torch.equal(model.head.weight, tensors["decoder.weight"])


def test_a_tied_weight_that_is_stored_once_is_the_embedding():
    """A decoder with a bias alone is tied."""
    tensors = awd(
        **{
            "rnns.0.linear.module.weight_raw": torch.randn(18, 12),
            "rnns.0.linear.module.bias": torch.randn(18),
        }
    )
    del tensors["decoder.weight"]

    model = import_saved(tensors, ImportHints()).model

    assert torch.equal(model.head.weight, model.embedding.weight)


def test_two_true_weights_of_a_layer_are_refused():
    """Neither of two names for one weight is chosen in silence."""
    tensors = dict(fastai_language_model(bidirectional=False).tensors)
    tensors["0.rnns.0.linear.weight_raw"] = torch.randn(30, 12)

    with pytest.raises(CheckpointError, match="stand for the same tensor"):
        import_saved(tensors, ImportHints())


@pytest.mark.parametrize("beside", ["list", "dict", "same dict"])
def test_weights_of_a_loss_are_left_out_and_said(beside):
    """Tail weights of a split vocabulary are named, with what they mean for probabilities."""
    tail = {"tail_vectors": torch.randn(3, 10), "tail_bias": torch.randn(3)}
    saved = {
        "list": [awd(), tail],
        "dict": {"model": awd(), "criterion": tail},
        "same dict": awd(**{f"criterion.{k}": t for k, t in tail.items()}),
    }[beside]

    notes = notes_of(import_saved(saved, ImportHints()))

    assert "tail_vectors [3, 10]" in notes
    assert "plain softmax" in notes


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            awd(**{"rnns.0.linear.weight_raw": torch.zeros(30, 12)}),
            "not names of the layout 'fastai_v1': decoder.weight",
        ),
        (awd(**{"decoder.weight": torch.randn(11, 9)}), "do not form a stack"),
        (awd(**{"decoder.bias": torch.randn(7)}), "one for each of 11 words"),
        (awd(**{"rnns.1.module.weight_hh_l0_raw": torch.randn(40, 10)}), "LSTM weights found"),
        (awd(**{"pooler.weight": torch.randn(3)}), "no layout that is known"),
    ],
    ids=["of two programs", "decoder of another width", "short bias", "LSTM", "unknown name"],
)
def test_language_models_that_do_not_fit_are_refused(tensors, message):
    """Each says what was found."""
    with pytest.raises(CheckpointError, match=message):
        import_saved(tensors, ImportHints())


@pytest.mark.parametrize("timesteps", [1, 625])
def test_pase_gives_the_output_of_its_convolution(timesteps, tmp_path):
    """QRNN and convolution at every frame; what stays with the caller is listed."""
    notes = notes_of(check(pase_encoder(timesteps), tmp_path))

    for part in ("layout 'pase'", "left out: blocks", "left out: denseskips", "left out: norm_out"):
        assert part in notes


def test_a_wider_convolution_after_pase_is_refused():
    """Only width 1 is a linear head."""
    tensors = {**pase_encoder(1).tensors, "W.weight": torch.randn(5, 8, 3)}

    with pytest.raises(CheckpointError, match="convolution of width 1"):
        import_saved(tensors, ImportHints())


def test_an_encoder_that_never_uses_its_convolution_is_refused():
    """Other encoders of the same program have the same names for it, and do not run it."""
    tensors = {**pase_encoder(1).tensors, "ASPP_blocks.0.weight": torch.randn(3)}

    with pytest.raises(CheckpointError, match="ASPP_blocks"):
        import_saved(tensors, ImportHints())
