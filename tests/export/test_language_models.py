"""Layouts of whole programs: what is read, left out and refused."""

from __future__ import annotations

import pytest
import torch

from qrnn_export.importer import import_saved
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError, ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.closeness import max_abs
from support.foreign_checkpoints import (
    fastai_classifier,
    fastai_language_model,
    health_records,
    pase_encoder,
    pqrnn_classifier,
)
from support.runners import runners


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1611)


def notes_of(imported):
    return "\n".join(imported.notes)


def check(foreign, directory, hints=ImportHints()):  # noqa: B008  (frozen)
    """Module and artefacts against the loops; the imported model is returned."""
    imported = import_saved(foreign.tensors, hints)
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


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("hidden", [(), (8,), (8, 4)], ids=["no", "one", "two"])
def test_fastai_classifiers_give_their_logits(version, hidden, tmp_path):
    """Pooled states through batch norms, hidden layers and dropout that is not there any more."""
    imported = check(fastai_classifier(version=version, hidden=hidden), tmp_path)

    notes = notes_of(imported)
    assert f"layout 'fastai_v{version}'" in notes
    assert "batch norms 1.layers.0" in notes
    assert "max_len" in notes
    assert imported.model.config.head_hidden_sizes == hidden
    assert imported.model.config.padding_id == 1


@pytest.mark.parametrize("version", [1, 2])
def test_fastai_leaves_out_a_dropout_of_zero(version, tmp_path):
    """The numbers in the names move when a head was trained without dropout."""
    check(fastai_classifier(version=version, dropout=0), tmp_path)


def test_a_bidirectional_fastai_classifier_is_refused():
    """Its backward direction depends on chunks."""
    language_model = fastai_language_model(bidirectional=True).tensors
    encoder = {f"0.module.{k[2:]}": t for k, t in language_model.items() if k.startswith("0.")}
    head = {k: t for k, t in fastai_classifier(version=2).tensors.items() if k.startswith("1.")}

    with pytest.raises(CheckpointError, match=r"bidirectional fastai classifier.*save_encoder"):
        import_saved({**encoder, **head}, ImportHints())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.layers.1.2.weight": torch.randn(3, 7)}, "expected 8 columns, the width of the batch"),
        ({"1.layers.1.2.bias": torch.randn(2)}, "expected one for each of 3 rows"),
        ({"1.layers.1.0.running_var": torch.randn(7)}, "expected a batch norm with four vectors"),
        ({"1.layers.2.0.weight": torch.randn(3, 2)}, "expected 3 columns, the rows of"),
        ({"1.layers.1.2.weight": torch.randn(3)}, r"expected a linear layer, weight \[out, in\]"),
        ({"1.layers.1.3.running_mean": torch.randn(3)}, "expected a batch norm"),
        ({"1.layers.9": torch.randn(3)}, "not names of the layout 'fastai_v2': 1.layers.9"),
    ],
    ids=["columns", "bias", "norm", "chain", "one axis", "half a norm", "unknown"],
)
def test_a_head_that_does_not_fit_is_refused(change, message):
    """Each message names the tensor and what was expected."""
    with pytest.raises(CheckpointError, match=message):
        import_saved(fastai_classifier(version=2).tensors | change, ImportHints())


def test_pqrnn_gives_its_logits(tmp_path):
    """Hardtanh on values beyond it, which the original's projections never have."""
    imported = check(pqrnn_classifier(), tmp_path)

    assert "layout 'pqrnn'" in notes_of(imported)


def test_health_records_give_their_probabilities(tmp_path):
    """Sums of codes, the last layer's cell state, a sigmoid; code 0 adds nothing."""
    foreign, hints = health_records(), ImportHints(ids_per_timestep=4)

    imported = check(foreign, tmp_path, hints)

    notes = notes_of(imported)
    assert "layout 'pytorch_ehr'" in notes
    assert "the head reads its cell state" in notes
    assert imported.model.config.output_name == "output"
    # A visit may be filled further, and codes stand in any order.
    wider = import_saved(foreign.tensors, ImportHints(ids_per_timestep=6)).model
    filled = torch.nn.functional.pad(foreign.input.flip(2), (1, 1))
    assert max_abs(wider(filled)[0], foreign.output) <= FLOAT32_MAX_ABS


def test_health_records_ask_for_the_codes_of_a_visit():
    """The file cannot tell; one code a visit is an ordinary embedding."""
    foreign = health_records()

    with pytest.raises(AmbiguousCheckpointError, match="give --ids-per-timestep"):
        import_saved(foreign.tensors, ImportHints())
    with pytest.raises(ConfigError, match="--ids-per-timestep: expected at least 1, got 0"):
        ImportHints(ids_per_timestep=0)
    one = import_saved(foreign.tensors, ImportHints(ids_per_timestep=1)).model
    four = import_saved(foreign.tensors, ImportHints(ids_per_timestep=4)).model
    first = foreign.input[:, :, :1]
    filled = torch.nn.functional.pad(first, (0, 3))
    assert max_abs(one(first.squeeze(2))[0], four(filled)[0].numpy()) <= FLOAT32_MAX_ABS


def test_health_records_with_a_trained_fill_code_say_so(tmp_path):
    """Code 0 adds nothing, whatever its embedding holds; the note says what the original does."""
    hints = ImportHints(ids_per_timestep=4)

    imported = check(health_records(fill_is_zero=False), tmp_path, hints)

    assert "the embedding of code 0 is not zero" in notes_of(imported)


def test_health_records_with_times_are_refused():
    """One more input than the embedding gives is the time since the last visit."""
    tensors = dict(health_records().tensors)
    weight = tensors["rnn_c.layers.0.linear.weight"]
    tensors["rnn_c.layers.0.linear.weight"] = torch.cat([weight, weight[:, :1]], dim=1)

    with pytest.raises(CheckpointError, match=r"time=True"):
        import_saved(tensors, ImportHints(ids_per_timestep=4))


def test_ids_per_timestep_is_refused_where_nothing_is_summed():
    """A flag that changes nothing is a mistake, not ignored."""
    foreign = fastai_language_model(bidirectional=False)

    with pytest.raises(CheckpointError, match="--ids-per-timestep 4: models of the layout"):
        import_saved(foreign.tensors, ImportHints(ids_per_timestep=4))


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
