"""Finds the sizes of QRNN layers from the shapes of their weights, as far as these settle them.

A weight is [G*H, W*I]: G is 3 with an output gate and 2 without, and neither H, G, W nor I is
stored. But the I of a layer is the H of the layer below, and that settles nearly everything: with
windows of 1 or 2, only the last layer's H and G and the first layer's W and I can stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError, ConfigError

USUAL_WINDOWS = (1, 2)
"""The windows of the original libraries; wider ones count only when the caller names them."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One reading of a weight's shape."""

    input_size: int
    hidden_size: int
    window: int
    output_gate: bool

    def __str__(self) -> str:
        gate = "with" if self.output_gate else "without"
        return (
            f"hidden size {self.hidden_size} {gate} output gate, window {self.window} "
            f"on an input of width {self.input_size}"
        )


@dataclass(frozen=True, slots=True)
class StackShapes:
    """What a file shows of a stack.

    Attributes:
        weights: (rows, columns) of each layer's weight, from the input up.
        names: Name of each weight in the file, for messages.
        directions: How many directions' outputs each layer above the first reads.
        input_size: Width that the first layer must read (an embedding's), or None.
        last_hidden_size: Hidden size that the last layer must have (a decoder reads it), or None.
    """

    weights: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    directions: int = 1
    input_size: int | None = None
    last_hidden_size: int | None = None


Reading = tuple[LayerSizes, ...]


def possible_readings(shapes: StackShapes, hints: ImportHints) -> list[Reading]:
    """Every reading of the stack that fits its shapes and the hints.

    Raises:
        ConfigError: A hint has another number of values than there are layers.
        CheckpointError: The shapes fit no QRNN, or contradict a hint.
    """
    windows = sorted({*USUAL_WINDOWS, *hints.window})
    readings = list(_chains(shapes, windows, ()))
    if not readings:
        listed = ", ".join(
            f"{n} {list(w)}" for n, w in zip(shapes.names, shapes.weights, strict=True)
        )
        raise CheckpointError(
            f"the weights do not form a stack of QRNN layers with windows {windows}: {listed}. "
            "Rows must be 3 or 2 times the hidden size, and columns the window times the width of "
            "the layer below; give --window if it is wider"
        )
    gate = () if hints.output_gate is None else (hints.output_gate,)
    readings = _apply("--hidden", hints.hidden_size, readings, lambda s: s.hidden_size)
    readings = _apply("--window", hints.window, readings, lambda s: s.window)
    return _apply("--output-gate/--no-output-gate", gate, readings, lambda s: s.output_gate)


def what_is_open(shapes: StackShapes, readings: Sequence[Reading]) -> list[str]:
    """One message for each layer that more than one reading fits; none when all is settled."""
    problems = []
    for layer, (name, weight) in enumerate(zip(shapes.names, shapes.weights, strict=True)):
        options = list(dict.fromkeys(reading[layer] for reading in readings))
        if len(options) > 1:
            listed = "".join(f"\n    {option}" for option in options)
            flags = _flags_that_settle(options)
            problems.append(f"{name} is {list(weight)}, which can be{listed}\n  give {flags}")
    return problems


def settle(shapes: StackShapes, hints: ImportHints) -> Reading:
    """The one reading that fits.

    Raises:
        AmbiguousCheckpointError: Several fit; the message lists them and names the flags.
        CheckpointError: None fits.
        ConfigError: A hint has another number of values than there are layers.
    """
    readings = possible_readings(shapes, hints)
    if problems := what_is_open(shapes, readings):
        raise AmbiguousCheckpointError("\n".join(problems))
    return readings[0]


def _chains(shapes: StackShapes, windows: list[int], below: Reading) -> Iterator[Reading]:
    if len(below) == len(shapes.weights):
        if shapes.last_hidden_size in (None, below[-1].hidden_size):
            yield below
        return
    required = below[-1].hidden_size * shapes.directions if below else shapes.input_size
    for sizes in _readings_of_one(shapes.weights[len(below)], windows):
        if required is None or sizes.input_size == required:
            yield from _chains(shapes, windows, (*below, sizes))


def _readings_of_one(weight: tuple[int, int], windows: list[int]) -> Iterator[LayerSizes]:
    rows, columns = weight
    for gates in (3, 2):
        for window in windows:
            if rows and columns and rows % gates == 0 and columns % window == 0:
                yield LayerSizes(columns // window, rows // gates, window, gates == 3)


def _apply(
    flag: str,
    values: Sequence[Any],
    readings: list[Reading],
    attribute: Callable[[LayerSizes], Any],
) -> list[Reading]:
    """Keep the readings that a hint allows; one value speaks for the layers that are open."""
    if not values:
        return readings
    layers = len(readings[0])
    if len(values) not in (1, layers):
        raise ConfigError(
            f"{flag}: expected one value, or one for each of {layers} layers, got {list(values)}"
        )
    seen = [list(dict.fromkeys(attribute(r[layer]) for r in readings)) for layer in range(layers)]
    if len(values) == layers:
        bound = dict(enumerate(values))
    else:
        bound = {layer: values[0] for layer in range(layers) if len(seen[layer]) > 1}
        if not bound and all(values[0] not in options for options in seen):
            bound = {0: values[0]}
    kept = [r for r in readings if all(attribute(r[layer]) == v for layer, v in bound.items())]
    if not kept:
        shown = "; ".join(f"layer {layer}: {options}" for layer, options in enumerate(seen))
        raise CheckpointError(
            f"{flag} {', '.join(str(v) for v in values)} contradicts the file, "
            f"whose shapes allow {shown}"
        )
    return kept


def _flags_that_settle(options: Sequence[LayerSizes]) -> str:
    flags = []
    if len({o.hidden_size for o in options}) > 1:
        flags.append("--hidden (or --output-gate / --no-output-gate)")
    if len({o.window for o in options}) > 1:
        flags.append("--window")
    return " and ".join(flags)
