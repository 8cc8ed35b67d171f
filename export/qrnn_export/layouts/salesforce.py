"""Layout of bare state dicts of salesforce/pytorch-qrnn, and of fastai's QRNN class.

    layers.{l}.linear.weight       [G*H, W*I]   rows Z, F(, O); columns current input, then previous
    layers.{l}.linear.bias         [G*H]
    layers_bwd.{l}.linear.*        the backward direction (fastai only)
    linear.weight, linear.bias     a single QRNNLayer

f multiplies the new value, which is our orientation, so tensors are taken as they are. With weight
drop the true weight is `linear.weight_raw` or `linear.module.weight_raw`; a plain
`linear.module.weight` beside it is a randomly damaged copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors
from qrnn_export.layouts.sizes import (
    LayerSizes,
    StackShapes,
    possible_readings,
    what_is_open,
)
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError
from qrnn_serve.model.config import Bidirectional, LayerConfig, QRNNConfig, SequenceModelConfig

_KEY = re.compile(
    r"^(?:(?P<stack>layers|layers_bwd)\.(?P<layer>\d+)\.)?"
    r"linear\.(?P<wrapped>module\.)?(?P<part>weight_raw|weight|bias)$"
)
_SINGLE_LAYER = ("layers", 0)

LayerTensors = dict[str, Tensor]


def _matches(tensors: Tensors) -> bool:
    return bool(tensors) and all(_KEY.match(name) for name in tensors)


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    notes = ["f multiplies the new value (salesforce orientation), by the layout"]
    stacks = _by_stack(tensors, notes)
    forward = stacks["layers"]
    backward = stacks.get("layers_bwd")
    _check_shapes(forward, backward)
    problems: list[str] = []
    bidirectional = _bidirectional(forward, backward, hints, problems)
    sizes = _sizes(forward, bidirectional, hints, problems)
    # By the fastai rule zoneout does nothing when evaluating, so it need not be known.
    if hints.zoneout is None and hints.zoneout_rule != "fastai":
        problems.append(
            "the file never says the zoneout, which changes scores when evaluating\n  give "
            "--zoneout (0 if the model was trained without)"
        )
    if problems:
        raise AmbiguousCheckpointError("\n".join(problems))
    config = _config(sizes, bidirectional, hints, has_bias="bias" in forward[0])
    notes += _notes(config.qrnn, hints)
    return ImportedWeights(config, _our_names(stacks), tuple(notes))


def _by_stack(tensors: Tensors, notes: list[str]) -> dict[str, list[LayerTensors]]:
    """Sort the tensors by stack and layer, the true weight of each under "weight"."""
    found: dict[tuple[str, int], dict[str, tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _KEY.match(name)
        if match is None:
            raise CheckpointError(f"{name}: not a name of the salesforce layout")
        place = (match["stack"], int(match["layer"])) if match["stack"] else _SINGLE_LAYER
        parts = found.setdefault(place, {})
        part = match["part"]
        if part == "weight" and match["wrapped"]:
            part = "weight_copy"
        if part in parts:
            raise CheckpointError(f"{name} and {parts[part][0]} stand for the same tensor")
        parts[part] = (name, tensor)
    stacks: dict[str, list[LayerTensors]] = {}
    for stack in sorted({stack for stack, _ in found}):
        numbers = sorted(layer for name, layer in found if name == stack)
        if numbers != list(range(len(numbers))):
            raise CheckpointError(f"{stack}: expected layers 0, 1, 2, ..., found {numbers}")
        stacks[stack] = [_one_layer(stack, n, found[stack, n], notes) for n in numbers]
    if "layers" not in stacks:
        raise CheckpointError("the file holds a backward direction (layers_bwd) but no forward one")
    return stacks


def _one_layer(
    stack: str, layer: int, parts: Mapping[str, tuple[str, Tensor]], notes: list[str]
) -> LayerTensors:
    place = f"{stack}.{layer}"
    true = parts.get("weight_raw") or parts.get("weight")
    if true is None and "weight_copy" in parts:
        name = parts["weight_copy"][0]
        raise CheckpointError(
            f"{name}: the file holds only the copy of this weight that weight drop left (random "
            "entries set to 0, the others scaled), not the true weight_raw; save the state dict "
            "again from the model that was trained"
        )
    if true is None:
        raise CheckpointError(f"{place}: its linear.weight is missing")
    dropped = [
        parts[p][0] for p in ("weight", "weight_copy") if p in parts and parts[p][0] != true[0]
    ]
    if dropped:
        notes.append(f"{true[0]} is used; the copy damaged by weight drop, {dropped[0]}, is not")
    tensors = {"weight": true[1]}
    if "bias" in parts:
        tensors["bias"] = parts["bias"][1]
    return tensors


def _check_shapes(forward: list[LayerTensors], backward: list[LayerTensors] | None) -> None:
    for stack, layers in (("layers", forward), ("layers_bwd", backward or [])):
        for number, tensors in enumerate(layers):
            weight, bias = tensors["weight"], tensors.get("bias")
            place = f"{stack}.{number}.linear"
            if weight.dim() != 2:
                raise CheckpointError(
                    f"{place}.weight: expected 2 axes [G*H, W*I], got {list(weight.shape)}"
                )
            if bias is not None and bias.shape != weight.shape[:1]:
                raise CheckpointError(
                    f"{place}.bias: expected one for each of {weight.shape[0]} rows of the weight, "
                    f"got {list(bias.shape)}"
                )
            if (bias is None) != ("bias" not in forward[0]):
                raise CheckpointError(f"{place}: some layers have a bias and some have none")
    if backward is not None:
        shapes = [[list(t["weight"].shape) for t in layers] for layers in (forward, backward)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"the two directions have different weights: {shapes[0]} and {shapes[1]}"
            )


def _bidirectional(
    forward: list[LayerTensors],
    backward: list[LayerTensors] | None,
    hints: ImportHints,
    problems: list[str],
) -> Bidirectional:
    if backward is None:
        if hints.bidirectional:
            raise CheckpointError(
                f"--bidirectional {hints.bidirectional}: the file holds one direction only"
            )
        return "no"
    if hints.bidirectional is None and len(forward) > 1:
        problems.append(
            "the file holds two directions, but not how they are joined\n  give --bidirectional "
            "stacks (fastai: joined after the last layer) or per_layer (as nn.LSTM)"
        )
    # With one layer both rules are the same.
    return hints.bidirectional or "per_layer"


def _sizes(
    forward: list[LayerTensors],
    bidirectional: Bidirectional,
    hints: ImportHints,
    problems: list[str],
) -> tuple[LayerSizes, ...]:
    """The sizes of each layer; what is open, unless the rule of joining must be known first."""
    if problems:
        return ()
    weights = [(t["weight"].shape[0], t["weight"].shape[1]) for t in forward]
    shapes = StackShapes(
        weights=tuple(weights),
        names=tuple(f"layers.{n}.linear.weight" for n in range(len(forward))),
        directions=2 if bidirectional == "per_layer" else 1,
    )
    readings = possible_readings(shapes, hints)
    problems += what_is_open(shapes, readings)
    return readings[0]


def _config(
    sizes: tuple[LayerSizes, ...], bidirectional: Bidirectional, hints: ImportHints, has_bias: bool
) -> SequenceModelConfig:
    layers = tuple(
        LayerConfig(
            hidden_size=s.hidden_size,
            window=s.window,
            output_gate=s.output_gate,
            zoneout=hints.zoneout or 0.0,
        )
        for s in sizes
    )
    return SequenceModelConfig(
        qrnn=QRNNConfig(
            input_size=sizes[0].input_size,
            layers=layers,
            bidirectional=bidirectional,
            zoneout_rule=hints.zoneout_rule or "salesforce",
            bias=has_bias,
        )
    )


def _notes(config: QRNNConfig, hints: ImportHints) -> list[str]:
    notes = [
        f"layer {number}: hidden size {layer.hidden_size}, window {layer.window}, "
        f"{'with' if layer.output_gate else 'without'} output gate, "
        f"on an input of width {config.layer_input_size(number)}"
        for number, layer in enumerate(config.layers)
    ]
    given = {
        "--hidden": ",".join(map(str, hints.hidden_size)),
        "--window": ",".join(map(str, hints.window)),
        "--output-gate": "" if hints.output_gate is None else str(hints.output_gate).lower(),
        "--bidirectional": hints.bidirectional or "",
        "--zoneout": "" if hints.zoneout is None else str(hints.zoneout),
        "--zoneout-rule": hints.zoneout_rule or "",
    }
    flags = ", ".join(f"{flag} {value}" for flag, value in given.items() if value)
    return [*notes, f"taken from flags: {flags}; all other sizes from the shapes of the tensors"]


def _our_names(stacks: Mapping[str, list[LayerTensors]]) -> dict[str, Tensor]:
    return {
        f"qrnn.{stack}.{number}.linear.{part}": tensor
        for stack, layers in stacks.items()
        for number, tensors in enumerate(layers)
        for part, tensor in tensors.items()
    }


SALESFORCE = Layout(
    name="salesforce",
    describes="bare state dicts of salesforce/pytorch-qrnn (QRNN, QRNNLayer) and fastai's QRNN",
    matches=_matches,
    read=_read,
)
