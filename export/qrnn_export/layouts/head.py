"""Reads heads of several linear layers with ReLU between them, and folds batch norms into them.

When evaluating, a batch norm is y = scale * x + shift with scale = weight / sqrt(var + 1e-5) and
shift = bias - scale * mean, so the linear layer A y + b after it is (A scale) x + (A shift + b).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from qrnn_export.layouts.base import Tensors
from qrnn_serve.core.errors import CheckpointError

HEAD_PART = r"(?P<part>weight|bias|running_mean|running_var|num_batches_tracked)$"
"""How the names of a head's tensors end."""

_EPSILON = 1e-5
"""torch's for batch norms, which the known programs leave as it is."""


@dataclass(frozen=True, slots=True)
class ImportedHead:
    """A head in our terms.

    Attributes:
        input_size: Width that it reads.
        hidden_sizes: Widths of its hidden layers.
        size: Width of its output.
        has_bias: Whether its last layer has a bias.
        tensors: As SequenceModel names them.
        notes: What was folded.
    """

    input_size: int
    hidden_sizes: tuple[int, ...]
    size: int
    has_bias: bool
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Linear:
    name: str
    weight: Tensor
    bias: Tensor | None


def read_head(tensors: Tensors, pattern: re.Pattern[str]) -> ImportedHead:
    """Read the head whose tensors' names fit `pattern`.

    Args:
        tensors: A state dict; names that do not fit are passed over.
        pattern: The numbers in its group "place" are the part's position; ends with HEAD_PART.

    Raises:
        CheckpointError: The tensors are no such head, or do not fit together.
    """
    parts: dict[tuple[int, ...], dict[str, Tensor]] = {}
    names: dict[tuple[int, ...], str] = {}
    for name, tensor in tensors.items():
        if match := pattern.match(name):
            place = tuple(int(number) for number in re.findall(r"\d+", match["place"]))
            parts.setdefault(place, {})[match["part"]] = tensor
            names[place] = name.rpartition(".")[0]
    layers: list[_Linear] = []
    folded: list[str] = []
    norm: dict[str, Tensor] | None = None
    for place in sorted(parts):
        name, part = names[place], parts[place]
        if "running_mean" in part and norm is None:
            norm = _checked_norm(name, part)
            folded.append(name)
            continue
        layers.append(_checked_linear(name, part, norm))
        norm = None
    if not layers or norm is not None:
        raise CheckpointError(
            f"the head must end with a linear layer, found {', '.join(names[p] for p in names)}"
        )
    for below, above in pairwise(layers):
        if above.weight.shape[1] != below.weight.shape[0]:
            raise CheckpointError(
                f"{above.name}.weight: expected {below.weight.shape[0]} columns, the rows of "
                f"{below.name}.weight, got {list(above.weight.shape)}"
            )
    return _in_our_terms(layers, folded)


def _checked_norm(name: str, part: dict[str, Tensor]) -> dict[str, Tensor]:
    needed = ("weight", "bias", "running_mean", "running_var")
    shapes = {key: list(part[key].shape) if key in part else None for key in needed}
    if len({str(shape) for shape in shapes.values()}) != 1 or part["running_mean"].dim() != 1:
        raise CheckpointError(f"{name}: expected a batch norm with four vectors, got {shapes}")
    return part


def _checked_linear(name: str, part: dict[str, Tensor], norm: dict[str, Tensor] | None) -> _Linear:
    weight, bias = part.get("weight"), part.get("bias")
    if weight is None or weight.dim() != 2 or set(part) - {"weight", "bias"}:
        shapes = {key: list(tensor.shape) for key, tensor in part.items()}
        raise CheckpointError(f"{name}: expected a linear layer, weight [out, in], got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(
            f"{name}.bias: expected one for each of {weight.shape[0]} rows of the weight, got "
            f"{list(bias.shape)}"
        )
    if norm is None:
        return _Linear(name, weight, bias)
    if norm["weight"].shape != weight.shape[1:]:
        raise CheckpointError(
            f"{name}.weight: expected {len(norm['weight'])} columns, the width of the batch norm "
            f"before it, got {list(weight.shape)}"
        )
    wide = {key: tensor.double() for key, tensor in norm.items()}
    scale = wide["weight"] / torch.sqrt(wide["running_var"] + _EPSILON)
    shift = wide["bias"] - scale * wide["running_mean"]
    added = weight.double() @ shift + (0 if bias is None else bias.double())
    return _Linear(name, (weight.double() * scale).to(weight.dtype), added.to(weight.dtype))


def _in_our_terms(layers: list[_Linear], folded: list[str]) -> ImportedHead:
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        is_last = number == len(layers) - 1
        ours = "head" if is_last else f"head_hidden.{number}"
        tensors[f"{ours}.weight"] = layer.weight
        if layer.bias is not None or not is_last:
            zeros = layer.weight.new_zeros(layer.weight.shape[0])
            tensors[f"{ours}.bias"] = zeros if layer.bias is None else layer.bias
    shapes = ", ".join(f"{layer.name} {list(layer.weight.shape)}" for layer in layers)
    notes = [f"head: linear layers {shapes}, ReLU between them"]
    if folded:
        notes.append(
            f"batch norms {', '.join(folded)} are folded into the linear layers after them"
        )
    return ImportedHead(
        input_size=layers[0].weight.shape[1],
        hidden_sizes=tuple(layer.weight.shape[0] for layer in layers[:-1]),
        size=layers[-1].weight.shape[0],
        has_bias="head.bias" in tensors,
        tensors=tensors,
        notes=tuple(notes),
    )
