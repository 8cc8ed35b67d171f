"""Turns the weights of a QRNN stack, what its layout fixes and what the caller says into ours."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from qrnn_export.layouts.base import Tensors
from qrnn_export.layouts.sizes import LayerSizes, StackShapes, possible_readings, what_is_open
from qrnn_export.layouts.stack_weights import StackWeights, sort_weights
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError
from qrnn_serve.model.config import Bidirectional, LayerConfig, QRNNConfig, ZoneoutRule


@dataclass(frozen=True, kw_only=True, slots=True)
class StackFacts:
    """What a layout fixes of a stack beyond its tensors; what the caller says goes before it.

    None is "not fixed": the file or the caller must say it.

    Attributes:
        input_size: Width that the first layer reads, an embedding's.
        output_size: Width that is read from the last layer, a decoder's.
        window: Window of the layers whose shapes leave it open, or one for each layer.
        output_gate: Whether layers whose shapes leave it open have an output gate.
        zoneout: Share p that the program's models are trained with.
        zoneout_rule: What zoneout does when evaluating.
        bidirectional: How two directions are joined.
    """

    input_size: int | None = None
    output_size: int | None = None
    window: tuple[int, ...] = ()
    output_gate: bool | None = None
    zoneout: float | None = None
    zoneout_rule: ZoneoutRule = "salesforce"
    bidirectional: Literal["per_layer", "stacks"] | None = None


@dataclass(frozen=True, slots=True)
class ImportedStack:
    """A stack in our terms: its configuration, its tensors as SequenceModel names them, notes."""

    config: QRNNConfig
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


def read_stack(
    tensors: Tensors, pattern: re.Pattern[str], facts: StackFacts, hints: ImportHints
) -> ImportedStack:
    """Read the tensors whose names fit `pattern`, as `sort_weights` explains.

    Raises:
        AmbiguousCheckpointError: Facts are missing; the message names them all and their flags.
        CheckpointError: The tensors do not fit.
    """
    weights = sort_weights(tensors, pattern)
    said = replace(
        hints,
        window=hints.window or facts.window,
        output_gate=facts.output_gate if hints.output_gate is None else hints.output_gate,
        zoneout=facts.zoneout if hints.zoneout is None else hints.zoneout,
        zoneout_rule=hints.zoneout_rule or facts.zoneout_rule,
        bidirectional=hints.bidirectional or (facts.bidirectional if weights.backward else None),
    )
    problems: list[str] = []
    bidirectional = _bidirectional(weights, said, problems)
    sizes = _sizes(weights, bidirectional, facts, said, problems)
    # By the fastai rule zoneout does nothing when evaluating, so it need not be known.
    if said.zoneout is None and said.zoneout_rule != "fastai":
        problems.append(
            "the file never says the zoneout, which changes scores when evaluating\n  give "
            "--zoneout (0 if the model was trained without)"
        )
    if problems:
        raise AmbiguousCheckpointError("\n".join(problems))
    config = _config(sizes, bidirectional, said, has_bias="bias" in weights.forward[0])
    notes = (*weights.notes, *_notes(config, hints, facts))
    return ImportedStack(config, _our_names(weights), notes)


def _bidirectional(weights: StackWeights, hints: ImportHints, problems: list[str]) -> Bidirectional:
    if weights.backward is None:
        if hints.bidirectional:
            raise CheckpointError(
                f"--bidirectional {hints.bidirectional}: the file holds one direction only"
            )
        return "no"
    if hints.bidirectional is None and len(weights.forward) > 1:
        problems.append(
            "the file holds two directions, but not how they are joined\n  give --bidirectional "
            "stacks (fastai: joined after the last layer) or per_layer (as nn.LSTM)"
        )
    # With one layer both rules are the same.
    return hints.bidirectional or "per_layer"


def _sizes(
    weights: StackWeights,
    bidirectional: Bidirectional,
    facts: StackFacts,
    hints: ImportHints,
    problems: list[str],
) -> tuple[LayerSizes, ...]:
    """The sizes of each layer; what is open, unless the rule of joining must be known first."""
    if problems:
        return ()
    layers = [layer["weight"] for layer in weights.forward]
    output_size = facts.output_size
    if output_size is not None and bidirectional != "no":
        if output_size % 2:
            raise CheckpointError(
                f"two directions cannot be joined to the odd width {output_size} that follows them"
            )
        output_size //= 2
    shapes = StackShapes(
        weights=tuple((weight.shape[0], weight.shape[1]) for weight in layers),
        names=tuple(weight.name for weight in layers),
        directions=2 if bidirectional == "per_layer" else 1,
        input_size=facts.input_size,
        last_hidden_size=output_size,
    )
    readings = possible_readings(shapes, hints)
    problems += what_is_open(shapes, readings)
    return readings[0]


def _config(
    sizes: tuple[LayerSizes, ...], bidirectional: Bidirectional, hints: ImportHints, has_bias: bool
) -> QRNNConfig:
    layers = tuple(
        LayerConfig(
            hidden_size=s.hidden_size,
            window=s.window,
            output_gate=s.output_gate,
            zoneout=hints.zoneout or 0.0,
        )
        for s in sizes
    )
    return QRNNConfig(
        input_size=sizes[0].input_size,
        layers=layers,
        bidirectional=bidirectional,
        zoneout_rule=hints.zoneout_rule or "salesforce",
        bias=has_bias,
    )


def _notes(config: QRNNConfig, hints: ImportHints, facts: StackFacts) -> list[str]:
    notes = [
        f"layer {number}: hidden size {layer.hidden_size}, window {layer.window}, "
        f"{'with' if layer.output_gate else 'without'} output gate, "
        f"on an input of width {config.layer_input_size(number)}"
        for number, layer in enumerate(config.layers)
    ]
    if config.bidirectional != "no":
        joined = {"per_layer": "each layer", "stacks": "the last layer"}[config.bidirectional]
        notes.append(f"two directions, joined after {joined}")
    if facts.zoneout is not None and hints.zoneout is None:
        notes.append(f"zoneout {facts.zoneout:g}, by the layout")
    if config.zoneout_rule == "fastai":
        notes.append("zoneout does nothing when evaluating")
    given = {
        "--hidden": ",".join(map(str, hints.hidden_size)),
        "--window": ",".join(map(str, hints.window)),
        "--output-gate": "" if hints.output_gate is None else str(hints.output_gate).lower(),
        "--bidirectional": hints.bidirectional or "",
        "--zoneout": "" if hints.zoneout is None else str(hints.zoneout),
        "--zoneout-rule": hints.zoneout_rule or "",
    }
    flags = ", ".join(f"{flag} {value}" for flag, value in given.items() if value)
    said = f"said by flags or by the module: {flags}; all other" if flags else "all"
    return [*notes, f"{said} sizes are from the shapes of the tensors"]


def _our_names(weights: StackWeights) -> dict[str, Tensor]:
    stacks = {"layers": weights.forward, "layers_bwd": weights.backward or []}
    return {
        f"qrnn.{stack}.{number}.linear.{part}": found.tensor
        for stack, layers in stacks.items()
        for number, layer in enumerate(layers)
        for part, found in layer.items()
    }
