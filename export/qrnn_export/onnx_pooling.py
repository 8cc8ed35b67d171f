"""Pooling over time as ONNX nodes: one vector a row from one vector a timestep.

A row's result depends on its own timesteps only, and a row of length 0 gives zeros.
Letters: B rows, T timesteps (padded), H channels of one direction.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from qrnn_export.onnx_graph import Batch, GraphBuilder, Shape
from qrnn_serve.model.config import SequenceModelConfig


class PoolingBuilder:
    """Adds pooling over the real timesteps of each row."""

    def __init__(self, graph: GraphBuilder, batch: Batch, config: SequenceModelConfig) -> None:
        self._graph = graph
        self._batch = batch
        self._kind = config.pooling
        self._width = config.qrnn.output_size
        self._direction_width = config.qrnn.layers[-1].hidden_size

    def add(self, hidden: list[str]) -> str:
        """Pool the outputs [B, T, H] of the last layer, one for each direction."""
        joined = self._concat(hidden, "hidden", ("batch", "time", self._width), axis=2)
        if self._kind == "none":
            return joined
        kinds = ("last", "max", "mean") if self._kind == "last_max_mean" else (self._kind,)
        parts = {
            "last": lambda: self._add_last(hidden),
            "max": lambda: self._add_max(joined),
            "mean": lambda: self._add_mean(joined),
        }
        pooled = [parts[kind]() for kind in kinds]
        return self._concat(pooled, "pooled", ("batch", 3 * self._width), axis=1)

    def _add_last(self, hidden: list[str]) -> str:
        """The forward output at each row's last timestep, the backward one at its first."""
        graph = self._graph
        before = graph.node(
            "Sub", [self._batch.lengths, graph.integer(1)], "before_end", ("batch",), np.int64
        )
        position = graph.node("Max", [before, graph.integer(0)], "last", ("batch",), np.int64)
        first = graph.node("Mul", [position, graph.integer(0)], "first", ("batch",), np.int64)
        parts = [self._add_pick(h, p) for h, p in zip(hidden, (position, first), strict=False)]
        return self._concat(parts, "pooled_last", ("batch", self._width), axis=1)

    def _add_pick(self, hidden: str, position: str) -> str:
        graph, name = self._graph, f"{hidden}.{position}"
        column = graph.node(
            "Unsqueeze", [position, graph.integers(1)], f"{name}_index", ("batch", 1), np.int64
        )
        shape = ("batch", self._direction_width)
        return graph.node("GatherND", [hidden, column], name, shape, batch_dims=1)

    def _add_max(self, joined: str) -> str:
        graph = self._graph
        lowest = graph.number(-np.inf)
        shape = ("batch", "time", self._width)
        masked = graph.node("Where", [self._batch.real, joined, lowest], "hidden_or_lowest", shape)
        pooled: Shape = ("batch", self._width)
        highest = graph.node(
            "ReduceMax", [masked, graph.integers(1)], "highest", pooled, keepdims=0
        )
        column = self._lengths_column("max_lengths")
        empty = graph.node(
            "Equal", [column, graph.integer(0)], "row_is_empty", ("batch", 1), np.bool_
        )
        return graph.node("Where", [empty, graph.number(0), highest], "pooled_max", pooled)

    def _add_mean(self, joined: str) -> str:
        """Sum over the row, where padded timesteps are 0, divided by the row's own length.

        In float64: adding 10,000 equal float32 values one by one is off by 1e-4.
        """
        graph = self._graph
        steps: Shape = ("batch", "time", self._width)
        pooled: Shape = ("batch", self._width)
        double = int(TensorProto.DOUBLE)
        wide = graph.node("Cast", [joined], "hidden_wide", steps, np.float64, to=double)
        total = graph.node(
            "ReduceSum", [wide, graph.integers(1)], "hidden_sum", pooled, np.float64, keepdims=0
        )
        counts = graph.node(
            "Max",
            [self._lengths_column("mean_lengths"), graph.integer(1)],
            "mean_counts",
            ("batch", 1),
            np.int64,
        )
        divisors = graph.node(
            "Cast", [counts], "mean_divisors", ("batch", 1), np.float64, to=double
        )
        mean = graph.node("Div", [total, divisors], "mean_wide", pooled, np.float64)
        target = int(helper.np_dtype_to_tensor_dtype(graph.dtype))
        return graph.node("Cast", [mean], "pooled_mean", pooled, to=target)

    def _lengths_column(self, name: str) -> str:
        inputs = [self._batch.lengths, self._graph.integers(1)]
        return self._graph.node("Unsqueeze", inputs, name, ("batch", 1), np.int64)

    def _concat(self, parts: list[str], name: str, shape: Shape, axis: int) -> str:
        if len(parts) == 1:
            return parts[0]
        return self._graph.node("Concat", parts, name, shape, axis=axis)
