"""The paper's orientation, layouts that are recognised and refused, and names of wrappers."""

from __future__ import annotations

import pytest
import torch

from qrnn_export.cli import main
from qrnn_export.importer import import_saved
from qrnn_export.layouts.registry import LAYOUTS
from qrnn_export.options import ImportHints
from qrnn_export.wrappers import without_wrappers
from qrnn_serve import QRNN
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.core.tolerances import GOLDEN_FLOAT64_MAX_ABS
from support.closeness import max_abs

PAPER = ImportHints(layout="paper", hidden_size=(1,), window=(1,))


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (PAPER, [0.7, -0.575, -0.575, 5.0]),
        (ImportHints(hidden_size=(1,), window=(1,), zoneout=0.0), [0.7, 0.275, 2.0, 2.0]),
    ],
    ids=["paper", "salesforce"],
)
def test_orientation_gives_the_reference_vector(hints, expected):
    """f = 0.5, 0.25, 1, 0 on x = 1, -1, 2, 5 from 0.4, all of x and h a tenth to pass tanh."""
    f = torch.tensor([0.5, 0.25, 1.0, 0.0], dtype=torch.float64)
    x = torch.tensor([1.0, -1.0, 2.0, 5.0], dtype=torch.float64) / 10
    gates = torch.stack([torch.atanh(x), torch.logit(f, eps=1e-300).clamp(-800, 800)], dim=1)
    weights = {
        "linear.weight": torch.eye(2, dtype=torch.float64),
        "linear.bias": torch.zeros(2, dtype=torch.float64),
    }

    model = import_saved(weights, hints).model
    output, _ = model(gates[None], None, torch.tensor([[0.04]], dtype=torch.float64))

    assert (
        max_abs(output.flatten() * 10, torch.tensor(expected, dtype=torch.float64))
        <= GOLDEN_FLOAT64_MAX_ABS
    )


def test_paper_changes_the_sign_of_the_forget_rows_and_nothing_else():
    """The change is exact, for weights and biases of both directions."""
    stack = QRNN(3, [4, 5], 2, bidirectional=True)
    hints = ImportHints(layout="paper", window=(1,), hidden_size=(5,), bidirectional="per_layer")

    turned = import_saved(stack.state_dict(), hints).model.qrnn.state_dict()

    for name, tensor in stack.state_dict().items():
        H = (4, 5)[int(name.split(".")[1])]
        signed = tensor.clone()
        signed[H : 2 * H] *= -1
        assert torch.equal(turned[name], signed)


REFUSED = {
    "qrnn3d": ({"layers.0.conv.conv.weight": (8, 3, 3, 3, 3)}, "three-dimensional convolutions"),
    "sdqes": ({"layers.0.conv1d_z.weight": (4, 3, 2)}, "another activation than tanh"),
}


@pytest.mark.parametrize("named", [False, True], ids=["found", "named"])
@pytest.mark.parametrize("layout", REFUSED)
def test_known_layouts_are_refused_with_what_is_missing(layout, named):
    """The message names the feature, whether the layout was found or named."""
    shapes, message = REFUSED[layout]
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

    with pytest.raises(CheckpointError, match=message):
        import_saved(tensors, ImportHints(layout=layout if named else None))


def test_three_dimensional_gates_are_refused_with_the_paper_layout_too():
    """--layout paper speaks of orientation; it does not make a convolution linear."""
    with pytest.raises(CheckpointError, match="three-dimensional convolutions"):
        import_saved({"layers.0.conv.conv.weight": torch.randn(8, 3, 1, 1, 1)}, PAPER)


def test_the_help_names_every_layout_that_is_read():
    """A layout that can be exported is in the help of --layout."""
    option = next(p for p in main.commands["export"].params if p.name == "layout")

    for name in set(LAYOUTS) - set(REFUSED):
        assert name in option.help


@pytest.mark.parametrize(
    ("names", "unwrapped"),
    [
        (["module.a.b", "module.c"], ["a.b", "c"]),
        (["module.module.a"], ["a"]),
        (["rnn.module.a", "rnn.module.b.module.c", "out"], ["rnn.a", "rnn.b.c", "out"]),
        (["_orig_mod.module.a"], ["a"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["linear.module.weight_raw", "linear.module.bias"],) * 2,
        (["module.x.linear.module.bias"], ["x.linear.module.bias"]),
        (["a.module"], ["a.module"]),
    ],
    ids=["all", "twice", "inside", "compiled", "not all", "weight drop", "both", "a last name"],
)
def test_wrappers_are_taken_off_at_any_depth(names, unwrapped):
    """Only what every name below a parent has is a wrapper; weight drop is none."""
    notes = []

    tensors = without_wrappers({name: torch.zeros(()) for name in names}, notes)

    assert list(tensors) == unwrapped
    assert bool(notes) == (names != unwrapped)
