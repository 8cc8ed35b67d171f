"""Foreign state dicts: the salesforce layout, weight drop, other cells and unknown names."""

from __future__ import annotations

import pytest
import torch

from qrnn_export.importer import import_saved
from qrnn_export.options import ImportHints
from qrnn_serve import QRNN
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError, ConfigError
from support.closeness import max_abs

FACTS = ImportHints(hidden_size=(4,), window=(1,), zoneout=0.0)


def one_layer(**changes):
    tensors = {
        "layers.0.linear.weight": torch.randn(12, 5),
        "layers.0.linear.bias": torch.randn(12),
    }
    return {**tensors, **changes}


def test_a_bare_state_dict_becomes_the_module_it_came_from():
    """Weights, sizes and zoneout of a stack give the outputs of that stack."""
    stack = QRNN(5, [8, 6], window=[2, 1], zoneout=0.25).eval()
    hints = ImportHints(window=(2,), hidden_size=(6,), zoneout=0.25)

    imported = import_saved(stack.state_dict(), hints)

    x = torch.randn(9, 3, 5)
    output, _ = imported.model(x.transpose(0, 1))
    assert max_abs(output.transpose(0, 1), stack(x)[0].detach()) == 0
    assert imported.model.config.qrnn == stack.config
    assert imported.model.config.pooling == "none"
    assert imported.model.config.head_size is None


def test_notes_say_what_was_read_and_what_was_said():
    """The layout, each layer's sizes and the flags stand in the notes."""
    notes = "\n".join(import_saved(one_layer(), FACTS).notes)

    assert "layout 'salesforce'" in notes
    assert "layer 0: hidden size 4, window 1, with output gate, on an input of width 5" in notes
    assert "--hidden 4" in notes
    assert "--zoneout 0.0" in notes


def test_a_single_layer_has_no_number():
    """The state dict of one QRNNLayer is a stack of one."""
    tensors = {"linear.weight": torch.randn(12, 5), "linear.bias": torch.randn(12)}

    assert import_saved(tensors, FACTS).model.config.qrnn.input_size == 5


def test_missing_facts_are_asked_for_together():
    """One message names the sizes and the zoneout that the file cannot tell."""
    with pytest.raises(AmbiguousCheckpointError, match=r"(?s)--hidden.*--window.*--zoneout"):
        import_saved({"linear.weight": torch.randn(12, 8)}, ImportHints())


def test_zoneout_is_not_asked_for_where_it_changes_nothing():
    """By the fastai rule zoneout does nothing when evaluating."""
    hints = ImportHints(hidden_size=(4,), window=(1,), zoneout_rule="fastai")

    config = import_saved(one_layer(), hints).model.config.qrnn

    assert (config.zoneout_rule, config.layers[0].zoneout) == ("fastai", 0.0)


def test_two_directions_need_their_rule():
    """How the directions are joined cannot be told from the weights."""
    stacks = QRNN(5, 4, 2, bidirectional=True, bidirectional_rule="stacks").eval()
    hints = ImportHints(hidden_size=(4,), window=(1,), zoneout=0.0)
    said = ImportHints(hidden_size=(4,), window=(1,), zoneout=0.0, bidirectional="stacks")

    with pytest.raises(AmbiguousCheckpointError, match="--bidirectional"):
        import_saved(stacks.state_dict(), hints)
    model = import_saved(stacks.state_dict(), said).model

    x = torch.randn(6, 2, 5)
    assert max_abs(model(x.transpose(0, 1))[0].transpose(0, 1), stacks(x)[0].detach()) == 0


def test_one_direction_refuses_a_rule():
    """--bidirectional on a file with one direction is a mistake, not ignored."""
    hints = ImportHints(hidden_size=(4,), window=(1,), zoneout=0.0, bidirectional="per_layer")

    with pytest.raises(CheckpointError, match="one direction only"):
        import_saved(one_layer(), hints)


@pytest.mark.parametrize("raw", ["linear.weight_raw", "linear.module.weight_raw"])
def test_weight_drop_uses_the_true_weight(raw):
    """The copy that weight drop damaged is dropped, with one note that says so."""
    true, copy = torch.ones(12, 5), torch.zeros(12, 5)
    tensors = {
        f"layers.0.{raw}": true,
        "layers.0.linear.module.weight": copy,
        "layers.0.linear.module.bias": torch.zeros(12),
    }

    imported = import_saved(tensors, FACTS)

    assert torch.equal(imported.model.state_dict()["qrnn.layers.0.linear.weight"], true)
    assert len([n for n in imported.notes if "damaged by weight drop" in n]) == 1


def test_weight_drop_without_the_true_weight_is_refused():
    """A file with the damaged copy alone cannot be exported."""
    tensors = {
        "layers.0.linear.module.weight": torch.zeros(12, 5),
        "layers.0.linear.module.bias": torch.zeros(12),
    }

    with pytest.raises(CheckpointError, match="only the copy"):
        import_saved(tensors, FACTS)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (torch.nn.LSTM(5, 4), "LSTM weights found, not QRNN"),
        (torch.nn.GRU(5, 4), "GRU weights found, not QRNN"),
        (torch.nn.RNN(5, 4), "plain RNN weights found, not QRNN"),
        (torch.nn.LSTMCell(5, 4), "LSTM weights found, not QRNN"),
    ],
    ids=["LSTM", "GRU", "RNN", "LSTMCell"],
)
def test_other_cells_are_refused_by_name(module, name):
    """Weights of another cell are named, alone or beside other layers."""
    inside = torch.nn.ModuleDict({"hidden": module, "output": torch.nn.Linear(4, 2)})

    for tensors in (module.state_dict(), inside.state_dict()):
        with pytest.raises(CheckpointError, match=name):
            import_saved(dict(tensors), FACTS)


def test_sru_is_refused_by_name():
    """SRU weights are not taken for a QRNN."""
    tensors = {"rnn_lst.0.weight": torch.randn(5, 12), "rnn_lst.0.weight_c": torch.randn(8)}

    with pytest.raises(CheckpointError, match="SRU weights found, not QRNN"):
        import_saved(tensors, FACTS)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"encoder.weight": torch.randn(3, 2)}, "no layout that is known.*encoder.weight"),
        (one_layer(**{"head.weight": torch.randn(2, 4)}), "no layout that is known"),
        (one_layer(**{"layers.2.linear.weight": torch.randn(12, 4)}), r"found \[0, 2\]"),
        (
            one_layer(**{"layers.0.linear.bias": torch.randn(11)}),
            "expected one for each of 12 rows",
        ),
        (one_layer(**{"layers.1.linear.weight": torch.randn(12, 4)}), "some have none"),
        (one_layer(**{"layers.0.linear.weight": torch.randn(12)}), "expected 2 axes"),
        ({"linear.weight": torch.randn(11, 5)}, "do not form a stack"),
        ({"layers_bwd.0.linear.weight": torch.randn(12, 5)}, "no forward one"),
        (one_layer(**{"layers.0.linear.bias": torch.randn(12).double()}), "one floating dtype"),
        ({"linear.weight": torch.ones(12, 5, dtype=torch.int64)}, "one floating dtype"),
        (one_layer(**{"layers.0.linear.bias": torch.full((12,), float("nan"))}), "holds NaN"),
        (one_layer(**{"layers.0.linear.weight": torch.ones(1).expand(12, 5)}), "does not hold all"),
    ],
    ids=[
        "unknown names",
        "names beside the stack",
        "missing layer",
        "short bias",
        "half a bias",
        "one axis",
        "no QRNN shape",
        "backward alone",
        "mixed dtypes",
        "integers",
        "NaN",
        "declared over a few bytes",
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, message):
    """Each says what was found."""
    with pytest.raises(CheckpointError, match=message):
        import_saved(tensors, FACTS)


def test_unknown_layout_name_is_refused():
    """--layout takes the names that exist."""
    with pytest.raises(ConfigError, match="--layout: expected one of"):
        import_saved(one_layer(), ImportHints(layout="fastai_v9"))


def test_half_precision_weights_are_widened():
    """float16 weights are exported as float32, with a note."""
    half = {name: tensor.half() for name, tensor in one_layer().items()}

    imported = import_saved(half, FACTS)

    assert imported.model.head is None
    assert {t.dtype for t in imported.model.state_dict().values()} == {torch.float32}
    assert any("exported as float32" in note for note in imported.notes)
