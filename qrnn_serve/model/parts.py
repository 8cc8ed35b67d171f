"""A model cut between its layers: each part is a model of its own.

A part takes what the one before gives for each timestep, and its own columns of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.precision import empty_model, precision_of
from qrnn_serve.model.sequence_model import SequenceModel


def part(model: SequenceModel, first: int, stop: int) -> SequenceModel:
    """Layers `first` to `stop` - 1 as a model that shares the weights.

    The first layer brings the embedding, the last one pooling and head.
    """
    made = empty_model(part_config(model.config, first, stop), precision_of(model))
    made.float32_edges = model.float32_edges
    whole = model.state_dict()
    made.load_state_dict(
        {k: whole[_name_in_whole(k, first)] for k in made.state_dict()}, assign=True
    )
    return made.requires_grad_(False)


def part_config(config: SequenceModelConfig, first: int, stop: int) -> SequenceModelConfig:
    """The configuration of that part."""
    layers = config.qrnn.layers
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
    return kept


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
        raise ArtefactError(f"they are not parts of one model: {error}") from error
    return whole.requires_grad_(False)


def can_be_cut(config: SequenceModelConfig) -> bool:
    """Whether every layer has one output: two independent stacks meet only after the last."""
    return config.qrnn.bidirectional != "stacks"


def weight_bytes(model: SequenceModel) -> int:
    """Size of the weights."""
    return sum(w.numel() * w.element_size() for w in model.state_dict().values())


def lightest_cut(weigh: Callable[[int, int, int], float], layers: int, count: int) -> list[int]:
    """Where to cut so that the heaviest part is as light as can be.

    Exact: the best cut of the first n layers in k parts is the best choice of the last part beside
    the best cut of what is before it in k - 1.

    Args:
        weigh: Weight of layers first to stop - 1 as part number k, from 0, given (first, stop, k);
            infinity where that cannot be.
        layers: Their number.
        count: Number of parts, each of at least one layer.

    Returns:
        The `count` + 1 edges, from 0 to `layers`. Where no cut is possible, its heaviest part
        weighs infinity.
    """
    # best[stop]: the weight of the heaviest part, and the edges.
    best = {stop: (weigh(0, stop, 0), [0, stop]) for stop in range(1, layers + 1)}
    for number in range(1, count):
        best = {
            stop: min(
                (max(best[first][0], weigh(first, stop, number)), [*best[first][1], stop])
                for first in range(number, stop)
            )
            for stop in range(number + 1, layers + 1)
        }
    return best[layers][1]


def _name_in_whole(name: str, first: int) -> str:
    if not name.startswith("qrnn."):
        return name
    stack, layers, number, rest = name.split(".", 3)
    return f"{stack}.{layers}.{int(number) + first}.{rest}"
