"""Describes a user's module around our QRNN as a SequenceModel, by trying until the numbers agree.

A module does not say what its `forward` does around its layers. So the few things that a
SequenceModel can do around them are tried, and one counts only if it alone gives the module's
answers on random input, at several sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qrnn_export.proof import tolerance_of
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.model.stack import QRNN

Build = Callable[[SequenceModelConfig, dict[str, Tensor]], SequenceModel]

_SIZES = ((3, 7), (1, 1), (2, 12))
"""(B, T) of the batches that are compared."""

_ADVICE = (
    "Describe the model as a qrnn_serve.SequenceModel and load its weights into that, or export "
    "its QRNN alone"
)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The layers of a module, by name.

    Attributes:
        qrnn: The stack.
        embedding: What it reads, or None for features.
        linear: The layers after it, as they are registered.
    """

    qrnn: tuple[str, QRNN]
    embedding: tuple[str, nn.Embedding] | None
    linear: list[tuple[str, nn.Linear]]


def holds_our_qrnn(module: nn.Module) -> bool:
    """Whether one of its layers is a qrnn_serve.QRNN or SequenceModel."""
    return any(isinstance(m, (QRNN, SequenceModel)) for m in module.modules())


def read_user_module(module: nn.Module, build: Build, notes: list[str]) -> SequenceModel:
    """The SequenceModel that gives the module's answers.

    Args:
        module: On the CPU, in evaluation mode; called as module(x), x batch-major or time-major.
        build: Makes a model of a configuration and weights.
        notes: What was found is added here.

    Raises:
        CheckpointError: The module has other layers, or no SequenceModel gives its answers.
        AmbiguousCheckpointError: Several do.
    """
    parts = _parts(module)
    weights = _weights(parts)
    found: list[SequenceModel] = []
    candidates = list(_candidates(parts))
    if not candidates:
        raise CheckpointError(
            f"{type(module).__name__}: {parts.linear[0][0]} reads {parts.linear[0][1].in_features} "
            f"values, and the QRNN gives {parts.qrnn[1].config.output_size}, or three times that "
            "when pooled. Linear layers before the QRNN have no place in a SequenceModel. "
            f"{_ADVICE}"
        )
    with torch.no_grad():
        answers = _answers(module, candidates[0])
        for config in candidates:
            model = build(config, weights).eval()
            if any(_agree(model, batches) for batches in answers):
                found.append(model)
    kind = type(module).__name__
    if not found:
        raise CheckpointError(
            f"{kind}: no SequenceModel with its layers gives its answers, in {len(candidates)} "
            f"ways that were tried. {_ADVICE}"
        )
    if len(found) > 1:
        listed = "".join(f"\n    {_said(model.config)}" for model in found)
        raise AmbiguousCheckpointError(
            f"{kind}: several SequenceModels give its answers (are weights zero?):{listed}\n  "
            f"{_ADVICE}"
        )
    names = [parts.qrnn, *([parts.embedding] if parts.embedding else []), *parts.linear]
    notes.append(f"{kind}: read from its layers {', '.join(name for name, _ in names)}")
    notes.append(
        f"found by comparing answers on random input: {_said(found[0].config)}; the only one of "
        f"{len(candidates)} ways that were tried to agree"
    )
    return found[0]


def _parts(module: nn.Module) -> _Parts:
    named = list(module.named_modules())
    if whole := [name for name, m in named if isinstance(m, SequenceModel)]:
        raise CheckpointError(
            f"{type(module).__name__} holds a SequenceModel and may do more around it: export "
            f"module.{whole[0]} instead"
        )
    stacks = [(name, m) for name, m in named if isinstance(m, QRNN)]
    if len(stacks) > 1:
        raise CheckpointError(
            f"{type(module).__name__} holds {len(stacks)} QRNNs "
            f"({', '.join(name for name, _ in stacks)}), a SequenceModel one. Export them one by "
            "one"
        )
    inside = stacks[0][0] + "."
    beside = [(name, m) for name, m in named if not f"{name}.".startswith(inside)]
    embeddings = [(name, m) for name, m in beside if isinstance(m, nn.Embedding)]
    linear = [(name, m) for name, m in beside if isinstance(m, nn.Linear)]
    known = [f"{name}." for name, _ in (*embeddings, *linear)] + [inside]
    others = [n for n in module.state_dict() if not n.startswith(tuple(known))]
    if others or len(embeddings) > 1:
        names = others[:4] or [name for name, _ in embeddings]
        raise CheckpointError(
            f"{type(module).__name__} has weights that a SequenceModel has no place for: "
            f"{', '.join(names)}. It has one embedding, one QRNN and linear layers. {_ADVICE}"
        )
    return _Parts(stacks[0], embeddings[0] if embeddings else None, linear)


def _weights(parts: _Parts) -> dict[str, Tensor]:
    weights = {f"qrnn.{name}": t for name, t in parts.qrnn[1].state_dict().items()}
    if parts.embedding is not None:
        weights["embedding.weight"] = parts.embedding[1].weight
    for number, (_, linear) in enumerate(parts.linear):
        last = number == len(parts.linear) - 1
        ours = "head" if last else f"head_hidden.{number}"
        weights[f"{ours}.weight"] = linear.weight
        if linear.bias is not None or not last:
            zeros = linear.weight.new_zeros(linear.out_features)
            weights[f"{ours}.bias"] = zeros if linear.bias is None else linear.bias
    return weights


def _candidates(parts: _Parts) -> Iterator[SequenceModelConfig]:
    embedding = parts.embedding[1] if parts.embedding is not None else None
    linear = [layer for _, layer in parts.linear]
    # Of ids only the embeddings in the table exist, so a Hardtanh may well change none of them.
    inputs = ("none",) if embedding is not None else ("none", "hardtanh")
    for pooling, before, pooled, after in itertools.product(
        ("none", "last", "mean", "max", "last_max_mean"),
        inputs,
        ("none", "relu"),
        ("none", "sigmoid"),
    ):
        config = SequenceModelConfig(
            qrnn=parts.qrnn[1].config,
            vocabulary_size=None if embedding is None else embedding.num_embeddings,
            padding_id=None if embedding is None else embedding.padding_idx,
            input_activation=before,
            pooling=pooling,
            pooled_activation=pooled,
            head_hidden_sizes=tuple(layer.out_features for layer in linear[:-1]),
            head_size=linear[-1].out_features if linear else None,
            head_bias=not linear or linear[-1].bias is not None,
            output_activation=after,
        )
        # Of widths that do not fit, such as of a head over joined pools, no model can be made.
        if not linear or linear[0].in_features == config.pooled_size:
            yield config


def _answers(module: nn.Module, config: SequenceModelConfig) -> list[list[tuple[Tensor, Tensor]]]:
    """(input, answer) at each size, batch-major, for each order of axes that the module takes."""
    answers: list[list[tuple[Tensor, Tensor]]] = []
    problem: Exception | None = None
    for swap in (False, True):
        try:
            answers.append([_one_answer(module, x, swap=swap) for x in _inputs(config, module)])
        except Exception as error:  # a forward of a stranger may raise anything
            problem = error
    if not answers:
        raise CheckpointError(
            f"{type(module).__name__}: forward(x) was called with x [batch, time, ...] and "
            f"[time, batch, ...], and failed with {type(problem).__name__}: {problem}. {_ADVICE}"
        ) from problem
    return answers


def _inputs(config: SequenceModelConfig, module: nn.Module) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1611)
    dtype = next(module.parameters()).dtype
    for rows, timesteps in _SIZES:
        shape = (rows, timesteps, *config.timestep_shape)
        if config.takes_ids:
            yield torch.randint(0, config.vocabulary_size or 1, shape, generator=generator)
        else:
            yield 2 * torch.randn(shape, generator=generator, dtype=dtype)


def _one_answer(module: nn.Module, x: Tensor, *, swap: bool) -> tuple[Tensor, Tensor]:
    answer: Any = module(x.transpose(0, 1) if swap else x)
    while isinstance(answer, (tuple, list)):
        answer = answer[0]
    has_time = swap and answer.shape[:2] == (x.shape[1], x.shape[0]) and answer.dim() == 3
    return x, answer.transpose(0, 1) if has_time else answer


def _agree(model: SequenceModel, batches: list[tuple[Tensor, Tensor]]) -> bool:
    for x, answer in batches:
        output, _ = model(x)
        # A last axis of one value is often squeezed away.
        if answer.dtype != output.dtype or _sizes(answer) != _sizes(output):
            return False
        scale = max(1.0, float(output.abs().max()))
        difference = (answer.reshape(output.shape) - output).abs().max()
        if not float(difference) <= tolerance_of(model) * scale:
            return False
    return True


def _sizes(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _said(config: SequenceModelConfig) -> str:
    around = {
        "input activation": config.input_activation,
        "pooling": config.pooling,
        "activation after it": config.pooled_activation,
        "output activation": config.output_activation,
    }
    return ", ".join(f"{what} {value}" for what, value in around.items())
