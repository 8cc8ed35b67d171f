"""Cuts a model into stages of whole layers, each a model of its own, to be run one after another.

A stage takes what the one before gives for each timestep, and its own columns of the state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from qrnn_export.cases import Point, random_batch
from qrnn_export.chain_file import Chain, ChainedFile, ChainedStage
from qrnn_export.proof import answer
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.proof_file import file_sha256
from qrnn_serve.model.parts import can_be_cut, lightest_cut, part, weight_bytes
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
    if not can_be_cut(model.config):
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
    shares = np.stack([np.array(seconds) / sum(seconds), np.array(sizes) / sum(sizes)])
    before = np.concatenate([np.zeros((2, 1)), np.cumsum(shares, axis=1)], axis=1)

    def weigh(first: int, stop: int, _: int) -> float:
        return float(np.max(before[:, stop] - before[:, first]))

    return lightest_cut(weigh, len(seconds), count)


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
