"""Sorts the weights of a QRNN by direction and layer, whatever a program calls them.

With weight drop a file holds a weight twice: the true one, `weight_raw`, and a copy under the plain
name in which random entries are 0 and the others scaled. Only the true one is ever used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from qrnn_serve.core.errors import CheckpointError

LINEAR = r"linear\.(?P<wrapped>module\.)?(?P<part>weight_raw|weight|bias)$"
"""How every known program ends the names of a layer's tensors."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its name in the file, for messages."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> list[int]:
        """Sizes of the tensor's axes."""
        return list(self.tensor.shape)


LayerTensors = dict[str, NamedTensor]
"""The "weight" of a layer and, if it has one, its "bias"."""


@dataclass(frozen=True, slots=True)
class StackWeights:
    """The weights of one QRNN, from the input up.

    Attributes:
        forward: One entry a layer.
        backward: The same for the backward direction; None when there is none.
        notes: Which copies of weights were left out.
    """

    forward: list[LayerTensors]
    backward: list[LayerTensors] | None
    notes: tuple[str, ...]


def sort_weights(tensors: Mapping[str, Tensor], pattern: re.Pattern[str]) -> StackWeights:
    """The weights whose names fit `pattern`, sorted.

    Args:
        tensors: A state dict; names that do not fit are passed over.
        pattern: Ends with LINEAR; its group "layer" is the layer's number and its group "stack" the
            direction. A pattern or a name without them is of the only layer, or of the forward one.

    Raises:
        CheckpointError: A layer or a true weight is missing, or tensors do not fit together.
    """
    found: dict[tuple[str, int], LayerTensors] = {}
    for name, tensor in tensors.items():
        if (match := pattern.match(name)) is None:
            continue
        groups = match.groupdict()
        place = (groups.get("stack") or "layers", int(groups.get("layer") or 0))
        parts = found.setdefault(place, {})
        part = groups["part"]
        if part == "weight" and groups["wrapped"]:
            part = "weight_copy"
        if part in parts:
            raise CheckpointError(f"{name} and {parts[part].name} stand for the same tensor")
        parts[part] = NamedTensor(name, tensor)
    copies: list[str] = []
    stacks: dict[str, list[LayerTensors]] = {}
    for stack in sorted({stack for stack, _ in found}):
        numbers = sorted(layer for name, layer in found if name == stack)
        if numbers != list(range(len(numbers))):
            raise CheckpointError(f"{stack}: expected layers 0, 1, 2, ..., found {numbers}")
        stacks[stack] = [_one_layer(found[stack, n], copies) for n in numbers]
    if "layers" not in stacks:
        raise CheckpointError("the file holds a backward direction (layers_bwd) but no forward one")
    weights = StackWeights(stacks["layers"], stacks.get("layers_bwd"), _note(copies))
    _check_shapes(weights)
    return weights


def _one_layer(parts: LayerTensors, copies: list[str]) -> LayerTensors:
    true = parts.get("weight_raw") or parts.get("weight")
    if true is None and "weight_copy" in parts:
        raise CheckpointError(
            f"{parts['weight_copy'].name}: the file holds only the copy of this weight that weight "
            "drop left (random entries set to 0, the others scaled), not the true weight_raw; save "
            "the state dict again from the model that was trained"
        )
    if true is None:
        raise CheckpointError(f"{parts['bias'].name}: the weight beside it is missing")
    copies += [
        p.name for k in ("weight", "weight_copy") if (p := parts.get(k)) and p.name != true.name
    ]
    layer = {"weight": true}
    if "bias" in parts:
        layer["bias"] = parts["bias"]
    return layer


def _note(copies: Sequence[str]) -> tuple[str, ...]:
    if not copies:
        return ()
    return (
        "the true weights, weight_raw, are used; the copies beside them, which may be damaged by "
        f"weight drop, are not: {', '.join(copies)}",
    )


def _check_shapes(stacks: StackWeights) -> None:
    has_bias = "bias" in stacks.forward[0]
    for layer in (*stacks.forward, *(stacks.backward or ())):
        weight, bias = layer["weight"], layer.get("bias")
        if weight.tensor.dim() != 2:
            raise CheckpointError(f"{weight.name}: expected 2 axes [G*H, W*I], got {weight.shape}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise CheckpointError(
                f"{bias.name}: expected one for each of {weight.shape[0]} rows of the weight, got "
                f"{bias.shape}"
            )
        if (bias is not None) != has_bias:
            raise CheckpointError(f"{weight.name}: some layers have a bias and some have none")
    if stacks.backward is not None:
        shapes = [[t["weight"].shape for t in s] for s in (stacks.forward, stacks.backward)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"the two directions have different weights: {shapes[0]} and {shapes[1]}"
            )
