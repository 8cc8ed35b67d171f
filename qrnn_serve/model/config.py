"""The shape of a model as data: what a checkpoint and an artefact's manifest store.

Nothing here is inferred or defaulted from a library's habits: every fact that changes a number
stands in these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qrnn_serve.core.errors import ConfigError

Bidirectional = Literal["no", "per_layer", "stacks"]
ZoneoutRule = Literal["salesforce", "fastai"]
Pooling = Literal["none", "last", "mean", "max", "last_max_mean"]
Activation = Literal["none", "relu", "hardtanh", "sigmoid"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One QRNN layer.

    Attributes:
        hidden_size: Width H of the cell state, per direction.
        window: Timesteps that the gates of one timestep see: 1 is the timestep alone.
        output_gate: True for fo-pooling (rows Z, F, O), False for f-pooling (rows Z, F).
        zoneout: Share p of forget gates dropped in training; 0 turns it off.
    """

    hidden_size: int
    window: int = 1
    output_gate: bool = True
    zoneout: float = 0.0

    def __post_init__(self) -> None:
        _check(self.hidden_size >= 1, "hidden_size", self.hidden_size, "at least 1")
        _check(self.window >= 1, "window", self.window, "at least 1")
        _check(0 <= self.zoneout <= 1, "zoneout", self.zoneout, "from 0 to 1")

    @property
    def gates(self) -> int:
        """Rows of the linear weight for one channel: Z, F and, when gated, O."""
        return 3 if self.output_gate else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class QRNNConfig:
    """A stack of QRNN layers.

    Attributes:
        input_size: Width I of one timestep of input.
        layers: From the input up; widths and windows may differ.
        bidirectional: "no"; "per_layer" joins both directions after each layer, as nn.LSTM does;
            "stacks" runs two independent stacks and joins them after the last, as fastai does.
        zoneout_rule: What zoneout does when evaluating. "salesforce" scales f by 1 - p; "fastai"
            does nothing, since it scales the kept gates by 1 / (1 - p) in training.
        dropout: Between layers, in training.
        weight_drop: Share of each layer's weight entries dropped in training.
        bias: Whether the gates have a bias.
    """

    input_size: int
    layers: tuple[LayerConfig, ...]
    bidirectional: Bidirectional = "no"
    zoneout_rule: ZoneoutRule = "salesforce"
    dropout: float = 0.0
    weight_drop: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        _check(self.input_size >= 1, "input_size", self.input_size, "at least 1")
        _check(len(self.layers) >= 1, "layers", len(self.layers), "at least one layer")
        _check(0 <= self.dropout <= 1, "dropout", self.dropout, "from 0 to 1")
        _check(0 <= self.weight_drop < 1, "weight_drop", self.weight_drop, "from 0 to below 1")
        rules = ("no", "per_layer", "stacks")
        _check(self.bidirectional in rules, "bidirectional", self.bidirectional, f"one of {rules}")
        zoneouts = ("salesforce", "fastai")
        _check(
            self.zoneout_rule in zoneouts, "zoneout_rule", self.zoneout_rule, f"one of {zoneouts}"
        )

    @property
    def num_directions(self) -> int:
        """2 when bidirectional, else 1."""
        return 1 if self.bidirectional == "no" else 2

    @property
    def output_size(self) -> int:
        """Width of one timestep of output, both directions joined."""
        return self.layers[-1].hidden_size * self.num_directions

    def layer_input_size(self, layer: int) -> int:
        """Width of what one direction of layer number `layer` reads."""
        if layer == 0:
            return self.input_size
        joined = self.num_directions if self.bidirectional == "per_layer" else 1
        return self.layers[layer - 1].hidden_size * joined


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceModelConfig:
    """Optional embedding, QRNN, pooling over time, optional head; activations between them.

    Attributes:
        qrnn: The stack.
        vocabulary_size: Rows of the embedding; None for a model of features.
        padding_id: Id whose embedding is not trained; None for none. Alone in a timestep it is an
            id like any other; among several it adds nothing.
        ids_per_timestep: Ids K of one timestep; the stack reads the sum of their embeddings.
        input_activation: Applied to the features, or embeddings, before the stack.
        pooling: How the timesteps of a row become one vector. "none" keeps one vector a timestep;
            "last" takes each direction's final timestep; "last_max_mean" joins all three in
            that order.
        pooled_activation: Applied after pooling, before the head.
        head_hidden_sizes: Widths of the head's hidden layers, each followed by ReLU.
        head_size: Outputs of the head's last linear layer; None for no head.
        head_bias: Whether the last linear layer has a bias; hidden ones have.
        output_activation: Applied last.
    """

    qrnn: QRNNConfig
    vocabulary_size: int | None = None
    padding_id: int | None = None
    ids_per_timestep: int = 1
    input_activation: Activation = "none"
    pooling: Pooling = "none"
    pooled_activation: Activation = "none"
    head_hidden_sizes: tuple[int, ...] = ()
    head_size: int | None = None
    head_bias: bool = True
    output_activation: Activation = "none"

    def __post_init__(self) -> None:
        if self.vocabulary_size is not None:
            _check(self.vocabulary_size >= 1, "vocabulary_size", self.vocabulary_size, "at least 1")
        if self.head_size is not None:
            _check(self.head_size >= 1, "head_size", self.head_size, "at least 1")
        if self.padding_id is not None:
            limit = self.vocabulary_size or 0
            _check(0 <= self.padding_id < limit, "padding_id", self.padding_id, f"0 to {limit - 1}")
        most, rule = (None, "at least 1") if self.takes_ids else (1, "1 for a model of features")
        ids = self.ids_per_timestep
        _check(ids >= 1 and most in (None, ids), "ids_per_timestep", ids, rule)
        poolings = ("none", "last", "mean", "max", "last_max_mean")
        _check(self.pooling in poolings, "pooling", self.pooling, f"one of {poolings}")
        for field in ("input_activation", "pooled_activation", "output_activation"):
            value = getattr(self, field)
            _check(value in ACTIVATIONS, field, value, f"one of {ACTIVATIONS}")
        hidden = self.head_hidden_sizes
        _check(min(hidden, default=1) >= 1, "head_hidden_sizes", hidden, "sizes of at least 1")
        headless = self.head_size is None and hidden
        _check(not headless, "head_hidden_sizes", hidden, "none without a head_size")

    @property
    def takes_ids(self) -> bool:
        """True when the input is token ids."""
        return self.vocabulary_size is not None

    @property
    def timestep_shape(self) -> tuple[int, ...]:
        """Shape of one timestep of input: () for one id, [K] for several, [I] for features."""
        if not self.takes_ids:
            return (self.qrnn.input_size,)
        return () if self.ids_per_timestep == 1 else (self.ids_per_timestep,)

    @property
    def pooled_size(self) -> int:
        """Width after pooling, before the head."""
        return self.qrnn.output_size * (3 if self.pooling == "last_max_mean" else 1)

    @property
    def output_size(self) -> int:
        """Width of one output vector."""
        return self.pooled_size if self.head_size is None else self.head_size

    @property
    def output_name(self) -> str:
        """Name of the main output: "logits" when a linear layer comes last, else "output"."""
        is_linear = self.head_size is not None and self.output_activation == "none"
        return "logits" if is_linear else "output"


def _check(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{field}: expected {rule}, got {value!r}")
