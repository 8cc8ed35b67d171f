"""Sizes inferred from the shapes of the weights: settled, refused or asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrnn_export.layouts.sizes import LayerSizes, StackShapes, settle
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError, ConfigError


def shapes_of(*weights, directions=1):
    names = tuple(f"layers.{n}.linear.weight" for n in range(len(weights)))
    return StackShapes(weights, names, directions)


def test_a_lone_weight_is_ambiguous_and_every_reading_is_listed():
    """(12, 8) can be four layers; the message lists them and names the flags."""
    with pytest.raises(AmbiguousCheckpointError) as caught:
        settle(shapes_of((12, 8)), ImportHints())

    message = str(caught.value)
    assert "layers.0.linear.weight is [12, 8]" in message
    for reading in (
        "hidden size 4 with output gate, window 1 on an input of width 8",
        "hidden size 4 with output gate, window 2 on an input of width 4",
        "hidden size 6 without output gate, window 1 on an input of width 8",
        "hidden size 6 without output gate, window 2 on an input of width 4",
    ):
        assert reading in message
    assert "--hidden" in message
    assert "--output-gate" in message
    assert "--window" in message


@pytest.mark.parametrize(
    "hints",
    [
        ImportHints(hidden_size=(4,), window=(2,)),
        ImportHints(output_gate=True, window=(2,)),
        ImportHints(output_gate=True, hidden_size=(4,), window=(2,)),
    ],
)
def test_flags_settle_a_lone_weight(hints):
    """Either of hidden size and output gate, with the window, leaves one reading."""
    assert settle(shapes_of((12, 8)), hints) == (LayerSizes(4, 4, 2, True),)


def test_neighbours_settle_all_but_the_first_input_and_the_last_gate():
    """In a stack, only the first window and the last output gate need be said."""
    shapes = shapes_of((24, 12), (24, 8), (24, 16))

    with pytest.raises(AmbiguousCheckpointError) as caught:
        settle(shapes, ImportHints(window=(2,)))
    settled = settle(shapes, ImportHints(window=(2,), output_gate=False))

    assert "layers.1" not in str(caught.value)
    assert settled == (
        LayerSizes(6, 8, 2, True),
        LayerSizes(8, 8, 1, True),
        LayerSizes(8, 12, 2, False),
    )


def test_odd_numbers_settle_themselves():
    """Rows that 2 does not divide are gated, columns that 2 does not divide have window 1."""
    assert settle(shapes_of((15, 7)), ImportHints()) == (LayerSizes(7, 5, 1, True),)


def test_two_directions_joined_after_each_layer():
    """A layer that reads two directions has twice the width below it."""
    hints = ImportHints(window=(1,), output_gate=True)

    settled = settle(shapes_of((24, 5), (24, 16), directions=2), hints)

    assert [s.input_size for s in settled] == [5, 16]


def test_wider_windows_count_when_they_are_named():
    """Windows above 2 are read only when the caller says them."""
    shapes = shapes_of((15, 21), (9, 15))
    hints = ImportHints(window=(3, 3))

    assert settle(shapes, hints) == (LayerSizes(7, 5, 3, True), LayerSizes(5, 3, 3, True))
    with pytest.raises(CheckpointError, match=r"do not form a stack.*give --window"):
        settle(shapes, ImportHints())


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        (ImportHints(hidden_size=(5,)), r"--hidden 5 contradicts .* layer 0: \[4, 6\]"),
        (ImportHints(window=(1, 1)), r"--window: expected one value, or one for each of 1 layers"),
    ],
)
def test_flags_that_do_not_fit_are_refused(hints, message):
    """A hint that no reading has, or a list of another length, is an error that says so."""
    with pytest.raises((CheckpointError, ConfigError), match=message):
        settle(shapes_of((12, 8)), hints)


def test_a_flag_cannot_overrule_the_file():
    """Where the file settles a size, another value is an error, not ignored."""
    with pytest.raises(CheckpointError, match="--hidden 6 contradicts the file"):
        settle(shapes_of((15, 7)), ImportHints(hidden_size=(6,)))


layer = st.tuples(st.integers(1, 40), st.sampled_from([1, 2]), st.booleans())


@given(st.integers(1, 40), st.lists(layer, min_size=1, max_size=5))
def test_full_hints_always_give_the_stack_back(input_size, layers):
    """For any stack, saying everything settles it; without hints it is among the readings."""
    sizes, width = [], input_size
    for hidden, window, gate in layers:
        sizes.append(LayerSizes(width, hidden, window, gate))
        width = hidden
    weights = [
        ((3 if s.output_gate else 2) * s.hidden_size, s.window * s.input_size) for s in sizes
    ]
    hints = ImportHints(
        hidden_size=tuple(s.hidden_size for s in sizes), window=tuple(s.window for s in sizes)
    )

    assert settle(shapes_of(*weights), hints) == tuple(sizes)


@given(st.integers(1, 40), st.lists(layer, min_size=2, max_size=5))
def test_inner_layers_never_need_a_flag(input_size, layers):
    """Whatever is open, it is the first layer's input or the last layer's gate."""
    weights, width = [], input_size
    for hidden, window, gate in layers:
        weights.append(((3 if gate else 2) * hidden, window * width))
        width = hidden

    try:
        settle(shapes_of(*weights), ImportHints())
    except AmbiguousCheckpointError as error:
        message = str(error)
        assert all(f"layers.{n}.linear" not in message for n in range(1, len(layers) - 1))
