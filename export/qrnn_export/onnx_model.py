"""A SequenceModel as an ONNX model, written node by node from its configuration and weights.

Nothing is traced: the graph depends on the configuration alone, its size does not depend on any
example, and every batch and time axis has a name.

Letters: B rows, T timesteps (padded), I input width, C output width, S state width.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import onnx
from onnx import helper

from qrnn_export.onnx_graph import Batch, GraphBuilder, Shape
from qrnn_export.onnx_layers import StackBuilder, Weights
from qrnn_export.onnx_pool import (
    DOMAIN,
    DOMAIN_VERSION,
    IR_VERSION,
    OPSET_VERSION,
    pool_function,
)
from qrnn_export.onnx_pooling import PoolingBuilder
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.manifest import StateSlice
from qrnn_serve.model.config import Activation, SequenceModelConfig

# ONNX has no assertion: a runtime that refuses an operation names the node, so these names are the
# error messages of the graph.
LENGTHS_CHECK = "lengths_must_lie_in_0_to_time"
STATE_CHECK = "state_must_have_one_row_or_one_for_each_sequence"
IDS_CHECK = "ids_must_lie_below_the_vocabulary_size"

_DTYPES = {np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)}
_OPERATORS = {"relu": "Relu", "hardtanh": "Clip", "sigmoid": "Sigmoid"}

# A lookup counts negative positions from the end, so they are sent here first, which it refuses.
_FAR_OUTSIDE = 2**62


def build_model(
    config: SequenceModelConfig,
    weights: Weights,
    layout: tuple[StateSlice, ...],
    beside: BinaryIO | None = None,
) -> onnx.ModelProto:
    """Build the model.

    Args:
        config: What the model computes.
        weights: Every tensor of the SequenceModel's state dict as numpy: of one float dtype, and
            int8 weights of matrix products beside their scales. A graph of float16 takes and gives
            float32.
        layout: Columns of the state.
        beside: Empty file in the model's folder, for large weights; None keeps them in the model.

    Returns:
        A model with inputs `input` [batch, time, I] or int64 ids, `lengths` int64 [batch]
        and `state` [state_batch, S], which may be left out (zeros) or have one row for all rows of
        the batch; outputs `logits` or `output` ([batch, C], or [batch, time, C], 0 at padded
        timesteps) and `state_out` [batch, S]. What stands at padded timesteps of the input changes
        nothing. A row of length 0 keeps its state and is pooled to zeros; a pooled model needs T of
        at least 1.

    Raises:
        ConfigError: The weights are of another dtype, or of several.
        OSError: `beside` cannot be written.
    """
    model = helper.make_model(
        onnx.GraphProto(name="sequence_model"),
        functions=[pool_function(half=any(w.dtype == np.float16 for w in weights.values()))],
        opset_imports=[
            helper.make_opsetid("", OPSET_VERSION),
            helper.make_opsetid(DOMAIN, DOMAIN_VERSION),
        ],
        ir_version=IR_VERSION,
        producer_name="qrnn-export",
    )
    _ModelBuilder(model.graph, config, weights, layout, beside).build()
    return model


class _ModelBuilder:
    def __init__(
        self,
        graph: onnx.GraphProto,
        config: SequenceModelConfig,
        weights: Weights,
        layout: tuple[StateSlice, ...],
        beside: BinaryIO | None,
    ) -> None:
        dtypes = {w.dtype for w in weights.values()} - {np.dtype(np.int8)}
        if len(dtypes) != 1 or not dtypes <= _DTYPES:
            names = sorted(str(d) for d in dtypes)
            raise ConfigError(
                "ONNX export: expected weights all float32, all float64 or all float16, and int8 "
                f"ones beside them; got {names}"
            )
        self._config = config
        self._weights = weights
        self._layout = layout
        dtype = dtypes.pop()
        self._graph = GraphBuilder(graph, dtype, beside)
        # Of features, state and outputs.
        self._edge = np.dtype(np.float32) if dtype == np.float16 else dtype
        self._state_size = layout[-1].stop

    def build(self) -> None:
        """Fill the graph."""
        graph, config = self._graph, self._config
        graph.input("input", self._input_shape(), np.int64 if config.takes_ids else self._edge)
        graph.input("lengths", ("batch",), np.int64)
        graph.input("state", ("state_batch", self._state_size), self._edge)
        graph.weight("state", np.zeros((1, self._state_size), self._edge))
        batch = self._add_batch()
        stack_weights = _below(self._weights, "qrnn.")
        stack = StackBuilder(graph, config.qrnn, stack_weights, batch)
        features = self._add_activation(
            self._add_features(batch),
            config.input_activation,
            ("batch", "time", config.qrnn.input_size),
        )
        layers = stack.add(features, self._add_state(batch), self._layout)
        hidden = [layers[d] for d in ("forward", "backward") if d in layers]
        output = self._add_output(hidden, batch)
        graph.output(output, self._edge)
        graph.output("state_out", self._edge)
        graph.finish()

    def _input_shape(self) -> Shape:
        return ("batch", "time", *self._config.timestep_shape)

    def _add_batch(self) -> Batch:
        graph = self._graph
        rows = graph.node("Shape", ["input"], "rows", (1,), np.int64, start=0, end=1)
        timesteps = graph.node("Shape", ["input"], "timesteps", (1,), np.int64, start=1, end=2)
        lengths = self._add_checked_lengths(timesteps)
        stop = graph.node("Squeeze", [timesteps, graph.integers(0)], "time_stop", (), np.int64)
        positions = graph.node(
            "Range",
            [graph.integer(0), stop, graph.integer(1)],
            "time_positions",
            ("time",),
            np.int64,
        )
        column = graph.node(
            "Unsqueeze", [lengths, graph.integers(1)], "lengths_column", ("batch", 1), np.int64
        )
        real = graph.node("Less", [positions, column], "real_2d", ("batch", "time"), np.bool_)
        real = graph.node(
            "Unsqueeze", [real, graph.integers(2)], "real", ("batch", "time", 1), np.bool_
        )
        return Batch(rows=rows, timesteps=timesteps, lengths=lengths, real=real)

    def _add_checked_lengths(self, timesteps: str) -> str:
        """Lengths looked up in the table 0..T, so that one outside it stops the run."""
        graph = self._graph
        count = graph.node("Add", [timesteps, graph.integers(1)], "allowed_count", (1,), np.int64)
        stop = graph.node("Squeeze", [count, graph.integers(0)], "allowed_stop", (), np.int64)
        allowed = graph.node(
            "Range",
            [graph.integer(0), stop, graph.integer(1)],
            "allowed_lengths",
            ("allowed_lengths",),
            np.int64,
        )
        negative = graph.node(
            "Less", ["lengths", graph.integer(0)], "lengths_negative", ("batch",), np.bool_
        )
        positions = graph.node(
            "Where",
            [negative, graph.integer(_FAR_OUTSIDE), "lengths"],
            "lengths_positions",
            ("batch",),
            np.int64,
        )
        return graph.node("Gather", [allowed, positions], LENGTHS_CHECK, ("batch",), np.int64)

    def _add_state(self, batch: Batch) -> str:
        """The state of every row; Reshape refuses what Expand broadcast to another row count."""
        graph = self._graph
        shape, given = ("batch", self._state_size), ("any_batch", self._state_size)
        sizes = graph.node(
            "Concat",
            [batch.rows, graph.integers(self._state_size)],
            "state_sizes",
            (2,),
            np.int64,
            axis=0,
        )
        name = f"{STATE_CHECK}.expanded"
        expanded = graph.node("Expand", ["state", sizes], name, given, self._edge)
        checked = graph.node("Reshape", [expanded, sizes], STATE_CHECK, shape, self._edge)
        return graph.own_dtype(checked, shape, self._edge)

    def _add_features(self, batch: Batch) -> str:
        if not self._config.takes_ids:
            return self._graph.own_dtype("input", self._input_shape(), self._edge)
        graph, config = self._graph, self._config
        shape, several = self._input_shape(), config.ids_per_timestep > 1
        real = batch.real
        if not several:
            real = graph.node("Squeeze", [real, graph.integers(2)], "real_ids", shape, np.bool_)
        ids = graph.node("Where", [real, "input", graph.integer(0)], "ids", shape, np.int64)
        negative = graph.node("Less", [ids, graph.integer(0)], "ids_negative", shape, np.bool_)
        checked = graph.node(
            "Where", [negative, graph.integer(_FAR_OUTSIDE), ids], "ids_positions", shape, np.int64
        )
        table = graph.weight("embedding.weight", self._weights["embedding.weight"])
        width = config.qrnn.input_size
        embedded = graph.node("Gather", [table, checked], IDS_CHECK, (*shape, width), axis=0)
        return self._add_sum_of_ids(ids, embedded) if several else embedded

    def _add_sum_of_ids(self, ids: str, embedded: str) -> str:
        """The sum over the ids of a timestep [B, T, K, I], to which the padding id adds nothing."""
        graph, config = self._graph, self._config
        shape, width = self._input_shape(), config.qrnn.input_size
        if config.padding_id is not None:
            pad = graph.node(
                "Equal", [ids, graph.integer(config.padding_id)], "is_padding", shape, np.bool_
            )
            pad = graph.node(
                "Unsqueeze", [pad, graph.integers(3)], "is_padding_id", (*shape, 1), np.bool_
            )
            terms = [pad, graph.number(0), embedded]
            embedded = graph.node("Where", terms, "embedded_ids", (*shape, width))
        axes = [embedded, graph.integers(2)]
        return graph.node("ReduceSum", axes, "sum_of_ids", ("batch", "time", width), keepdims=0)

    def _add_output(self, hidden: list[str], batch: Batch) -> str:
        graph, config = self._graph, self._config
        rows: Shape = ("batch", "time") if config.pooling == "none" else ("batch",)
        pooled = PoolingBuilder(graph, batch, config).add(hidden)
        output = self._add_activation(
            pooled, config.pooled_activation, (*rows, config.pooled_size), "pooled_"
        )
        for number, width in enumerate(config.head_hidden_sizes):
            output = self._add_linear(f"head_hidden.{number}", output, (*rows, width), bias=True)
            output = self._add_activation(output, "relu", (*rows, width), f"head_hidden.{number}.")
        shape = (*rows, config.output_size)
        if config.head_size is not None:
            output = self._add_linear("head", output, shape, bias=config.head_bias)
        output = self._add_activation(output, config.output_activation, shape, "output_")
        if config.pooling != "none" or output == pooled:
            return graph.node("Identity", [output], config.output_name, shape)
        # Padded timesteps are 0 in the hidden states, and not after a head.
        masked = [batch.real, output, graph.number(0)]
        return graph.node("Where", masked, config.output_name, shape)

    def _add_linear(self, name: str, x: str, shape: Shape, *, bias: bool) -> str:
        matrix = self._graph.matrix(name, self._weights, f"{name}.")
        product = self._graph.node("MatMul", [x, matrix], f"{name}.product", shape)
        if not bias:
            return product
        added = self._graph.weight(f"{name}.bias", self._weights[f"{name}.bias"])
        return self._graph.node("Add", [product, added], f"{name}.sum", shape)

    def _add_activation(self, x: str, name: Activation, shape: Shape, prefix: str = "") -> str:
        if name == "none":
            return x
        graph = self._graph
        bounds = [graph.number(-1), graph.number(1)] if name == "hardtanh" else []
        return graph.node(_OPERATORS[name], [x, *bounds], f"{prefix}{name}", shape)


def _below(weights: Weights, prefix: str) -> Weights:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
