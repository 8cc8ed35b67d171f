"""The QRNN layers of a model as ONNX nodes, batch-major.

Letters: B rows, T timesteps (padded), I input width, H channels, G gates, W window.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from qrnn_export.onnx_graph import Batch, GraphBuilder
from qrnn_export.onnx_pool import DOMAIN, POOL_OP
from qrnn_export.onnx_window import WindowBuilder
from qrnn_serve.core.manifest import StateSlice
from qrnn_serve.model.config import LayerConfig, QRNNConfig

Weights = Mapping[str, npt.NDArray[np.generic]]

_MODULES = {"forward": "layers", "backward": "layers_bwd"}


def weight_name(name: str) -> str:
    """The name in the graph of a tensor in the SequenceModel's state dict.

    "qrnn.layers.0.linear.weight" is "layer0.forward.weight"; what is outside the stack keeps its
    name. Weights of matrix products stand transposed there.
    """
    parts = name.split(".")
    if parts[0] != "qrnn":
        return name
    _, module, layer, _, kind = parts
    direction = next(d for d, m in _MODULES.items() if m == module)
    return f"layer{layer}.{direction}.{kind}"


class StackBuilder:
    """Adds the layers of one stack to a graph.

    Args:
        graph: Graph to add to.
        config: The stack.
        weights: Tensors by name below the stack, for example "layers.0.linear.weight" [G*H, W*I].
        batch: Names of the batch's tensors.
    """

    def __init__(
        self, graph: GraphBuilder, config: QRNNConfig, weights: Weights, batch: Batch
    ) -> None:
        self._graph = graph
        self._config = config
        self._weights = weights
        self._batch = batch
        self._state_in: dict[tuple[int, str, str], str] = {}
        self._state_out: dict[tuple[int, str, str], str] = {}

    def add(self, x: str, state: str, layout: tuple[StateSlice, ...]) -> dict[str, str]:
        """Add all layers.

        Args:
            x: [B, T, I].
            state: [B, S].
            layout: Columns of the state.

        Returns:
            The names of each direction's output [B, T, H] under "forward" (and "backward"), and of
            the new state [B, S] under "state_out".
        """
        self._split_state(state, layout)
        directions = ["forward", "backward"][: self._config.num_directions]
        current = dict.fromkeys(directions, x)
        for layer, layer_config in enumerate(self._config.layers):
            outputs = {d: self._add_layer(layer, d, current[d], layer_config) for d in directions}
            is_last = layer == len(self._config.layers) - 1
            if self._config.bidirectional == "per_layer" and not is_last:
                width = 2 * layer_config.hidden_size
                joined = self._graph.node(
                    "Concat",
                    [outputs["forward"], outputs["backward"]],
                    f"layer{layer}.joined",
                    ("batch", "time", width),
                    axis=2,
                )
                current = dict.fromkeys(directions, joined)
            else:
                current = outputs
        parts = [self._state_out[s.layer, s.direction, s.kind] for s in layout]
        shape = ("batch", layout[-1].stop)
        state_out = self._graph.node("Concat", parts, "state_out", shape, axis=1)
        return {**current, "state_out": state_out}

    def _split_state(self, state: str, layout: tuple[StateSlice, ...]) -> None:
        widths = [s.stop - s.start for s in layout]
        names = [f"layer{s.layer}.{s.direction}.{s.kind}_in" for s in layout]
        self._graph.node_of_many(
            "Split",
            [state, self._graph.integers(*widths)],
            {name: ("batch", width) for name, width in zip(names, widths, strict=True)},
            name="split_state",
            axis=1,
        )
        keys = [(s.layer, s.direction, s.kind) for s in layout]
        self._state_in = dict(zip(keys, names, strict=True))

    def _add_layer(self, layer: int, direction: str, x: str, config: LayerConfig) -> str:
        prefix = f"layer{layer}.{direction}"
        width = self._config.layer_input_size(layer)
        if config.window > 1:
            previous = self._state_in[layer, direction, "inputs"]
            seen = WindowBuilder(self._graph, self._batch, prefix, width, config.window)
            x, self._state_out[layer, direction, "inputs"] = (
                seen.add_forward(x, previous)
                if direction == "forward"
                else seen.add_backward(x, previous)
            )
        gates = self._add_linear(layer, direction, x, config.gates * config.hidden_size)
        zoneout = config.zoneout if self._config.zoneout_rule == "salesforce" else 0.0
        hidden, cell = self._graph.node_of_many(
            POOL_OP,
            [gates, self._batch.lengths, self._state_in[layer, direction, "cell"]],
            {
                f"{prefix}.hidden": ("batch", "time", config.hidden_size),
                f"{prefix}.cell_out": ("batch", config.hidden_size),
            },
            name=f"{prefix}.pool",
            domain=DOMAIN,
            output_gate=int(config.output_gate),
            reverse=int(direction == "backward"),
            zoneout=float(zoneout),
        )
        self._state_out[layer, direction, "cell"] = cell
        return hidden

    def _add_linear(self, layer: int, direction: str, x: str, width: int) -> str:
        prefix = f"layer{layer}.{direction}"
        key = f"{_MODULES[direction]}.{layer}.linear."
        shape = ("batch", "time", width)
        matrix = self._graph.matrix(prefix, self._weights, key)
        if not self._config.bias:
            return self._graph.node("MatMul", [x, matrix], f"{prefix}.gates", shape)
        product = self._graph.node("MatMul", [x, matrix], f"{prefix}.product", shape)
        bias = self._graph.weight(f"{prefix}.bias", self._weights[key + "bias"])
        return self._graph.node("Add", [product, bias], f"{prefix}.gates", shape)
