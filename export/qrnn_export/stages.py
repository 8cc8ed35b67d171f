"""Cuts a model into stages of whole layers, each a model of its own, to be run one after another.

A stage takes what the one before gives for each timestep, and its own columns of the state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from torch import Tensor

from qrnn_export.cases import Point, random_batch
from qrnn_export.chain_file import Chain, ChainedFile, ChainedStage
from qrnn_export.cost import weight_bytes
from qrnn_export.proof import answer
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.proof_file import file_sha256
from qrnn_serve.model.precision import empty_model, precision_of
from qrnn_serve.model.sequence_model import SequenceModel

_AUTO_BYTES = 1 << 30
_TIMED_POINT = Point(timesteps=32, rows=4, uneven=False, with_state=True)
_TIMED_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of layers.

    Attributes:
        first: Number of its first layer.
        stop: One past the number of its last.
        seconds: What its layers took, together, for 4 rows of 32 timesteps on the CPU.
        model: The layers, with the embedding before the first and all that follows the last.
    """

    first: int
    stop: int
    seconds: float
    model: SequenceModel


def cut(model: SequenceModel, count: int | Literal["auto"]) -> list[Stage]:
    """Cut a model where the slowest and largest stage is least slow and large.

    Args:
        model: In evaluation mode; the stages share its weights.
        count: Number of stages; "auto" is one for each GiB of weights, at least 2, at most one for
            each layer.

    Raises:
        ConfigError: It has fewer layers than that, or its directions meet only after the last.
    """
    config = model.config.qrnn
    layers = len(config.layers)
    if config.bidirectional == "stacks":
        raise ConfigError(
            "--stages: the two directions of this model run through all layers before they are "
            "joined, so no stage has one output; export it without --stages"
        )
    if count == "auto":
        count = min(layers, max(2, -(-weight_bytes(model) // _AUTO_BYTES)))
    if layers < max(count, 2):
        raise ConfigError(
            f"--stages: the model has {layers} {'layer' if layers == 1 else 'layers'}, which do "
            f"not make {max(count, 2)} stages; export it without --stages, or with fewer"
        )
    alone = [part(model, layer, layer + 1) for layer in range(layers)]
    seconds = [_seconds(one) for one in alone]
    sizes = [weight_bytes(one) for one in alone]
    edges = balanced(seconds, sizes, count)
    return [
        Stage(first=a, stop=b, seconds=sum(seconds[a:b]), model=part(model, a, b))
        for a, b in pairwise(edges)
    ]


def balanced(seconds: Sequence[float], sizes: Sequence[int], count: int) -> list[int]:
    """Where to cut: the `count` + 1 edges of the stages, from 0 to the number of layers.

    A stage weighs its share of the time or of the bytes, whichever is larger; the heaviest stage is
    as light as can be.
    """
    layers = len(seconds)
    shares = np.stack([np.array(seconds) / sum(seconds), np.array(sizes) / sum(sizes)])
    before = np.concatenate([np.zeros((2, 1)), np.cumsum(shares, axis=1)], axis=1)

    def weight(first: int, stop: int) -> float:
        return float(np.max(before[:, stop] - before[:, first]))

    # best[stop]: the heaviest stage of the best cut of the first `stop` layers, and its edges.
    best = {stop: (weight(0, stop), [0, stop]) for stop in range(1, layers + 1)}
    for stages in range(2, count + 1):
        best = {
            stop: min(
                (max(best[first][0], weight(first, stop)), [*best[first][1], stop])
                for first in range(stages - 1, stop)
            )
            for stop in range(stages, layers + 1)
        }
    return best[layers][1]


def part(model: SequenceModel, first: int, stop: int) -> SequenceModel:
    """Layers `first` to `stop` - 1 as a model; the first has the embedding, the last the head."""
    config, layers = model.config, model.config.qrnn.layers
    stack = replace(
        config.qrnn, input_size=config.qrnn.layer_input_size(first), layers=layers[first:stop]
    )
    kept = replace(config, qrnn=stack)
    if first > 0:
        kept = replace(
            kept,
            vocabulary_size=None,
            padding_id=None,
            ids_per_timestep=1,
            input_activation="none",
        )
    if stop < len(layers):
        kept = replace(
            kept,
            pooling="none",
            pooled_activation="none",
            head_hidden_sizes=(),
            head_size=None,
            head_bias=True,
            output_activation="none",
        )
    made = empty_model(kept, precision_of(model))
    made.float32_edges = model.float32_edges
    whole = model.state_dict()
    made.load_state_dict(
        {k: whole[_name_in_whole(k, first)] for k in made.state_dict()}, assign=True
    )
    return made.requires_grad_(False)


def joined(parts: Sequence[SequenceModel]) -> SequenceModel:
    """The model that `part` has cut into these, in their order; it shares their weights.

    Raises:
        ArtefactError: They do not fit together.
    """
    first, last = parts[0].config, parts[-1].config
    layers = tuple(layer for one in parts for layer in one.config.qrnn.layers)
    config = replace(
        last,
        qrnn=replace(first.qrnn, layers=layers),
        vocabulary_size=first.vocabulary_size,
        padding_id=first.padding_id,
        ids_per_timestep=first.ids_per_timestep,
        input_activation=first.input_activation,
    )
    whole = empty_model(config, precision_of(parts[0]))
    whole.float32_edges = parts[0].float32_edges
    start, weights = 0, dict[str, Tensor]()
    for one in parts:
        own = one.state_dict()
        weights.update({_name_in_whole(name, start): tensor for name, tensor in own.items()})
        start += len(one.config.qrnn.layers)
    try:
        whole.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ArtefactError(f"the stages are not parts of one model: {error}") from error
    return whole.requires_grad_(False)


def chain_of(stages: Sequence[Stage], files: dict[str, list[Path]]) -> Chain:
    """How the stages belong together.

    Args:
        stages: In their order.
        files: For each format the stages' artefacts, complete, in the same order.
    """
    columns = np.cumsum([0, *(stage.model.state_size for stage in stages)]).tolist()
    return Chain(
        stages=tuple(
            ChainedStage(
                layers=(stage.first, stage.stop),
                state=columns_of_one,
                weight_bytes=weight_bytes(stage.model),
                seconds=round(stage.seconds, 6),
            )
            for stage, columns_of_one in zip(stages, pairwise(columns), strict=True)
        ),
        artefacts={
            name: tuple(ChainedFile(file=p.name, sha256=file_sha256(p)) for p in paths)
            for name, paths in files.items()
        },
    )


def _seconds(model: SequenceModel) -> float:
    dtype = np.dtype(str(model.edge_dtype()).removeprefix("torch."))
    case = random_batch(model.config, model.state_size, _TIMED_POINT, dtype)
    taken: list[float] = []
    for _ in range(_TIMED_RUNS):
        start = time.perf_counter()
        answer(model, case)
        taken.append(time.perf_counter() - start)
    return median(taken)


def _name_in_whole(name: str, first: int) -> str:
    if not name.startswith("qrnn."):
        return name
    stack, layers, number, rest = name.split(".", 3)
    return f"{stack}.{layers}.{int(number) + first}.{rest}"
