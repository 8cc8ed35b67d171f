"""The window of a QRNN layer as ONNX nodes: each timestep beside the ones that ran before it.

Letters: B rows, T timesteps (padded), I input width, W window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qrnn_export.onnx_graph import Batch, GraphBuilder


@dataclass(frozen=True, slots=True)
class WindowBuilder:
    """Adds the window of one layer and direction: each timestep beside the W - 1 that ran before.

    Before the first timestep in running order stand the inputs carried over from the previous call,
    or zeros, never padding.

    Attributes:
        graph: Graph to add to.
        batch: Names of the batch's tensors.
        prefix: Start of the names of the nodes.
        width: I.
        window: W, at least 2.
    """

    graph: GraphBuilder
    batch: Batch
    prefix: str
    width: int
    window: int

    @property
    def _extended(self) -> str:
        """Name of the axis T + W - 1: runtimes take axes of one name to have one size."""
        return f"time_plus_{self.window - 1}"

    def add_forward(self, x: str, previous: str) -> tuple[str, str]:
        """Window for the forward direction.

        Args:
            x: [B, T, I].
            previous: [B, (W-1)*I], oldest first.

        Returns:
            Names of [B, T, W*I] (current input, 1 back, 2 back, ...) and of the new `previous`.
        """
        before = self.window - 1
        carried = self._as_timesteps(previous)
        extended = self._extend([carried, x])
        taps = [x, *(self._tap(extended, before - k, k) for k in range(1, self.window))]
        # The inputs to carry on are the last W-1 that are real, so they start at the row's length.
        steps = self.graph.integers(*range(before))
        column = self._column(self.batch.lengths, "lengths_column")
        positions = self.graph.node(
            "Add", [column, steps], f"{self.prefix}.carry_positions", ("batch", before), np.int64
        )
        kept = self._gather(extended, positions, "carry", before)
        return self._join(taps), self._as_columns(kept)

    def add_backward(self, x: str, previous: str) -> tuple[str, str]:
        """Window for the backward direction, where "back" is later in time; as `add_forward`."""
        before = self.window - 1
        mirrored = self._mirror(self._as_timesteps(previous), "carried_mirrored")
        padded = self._extend([x, mirrored], "padded")
        # Each row's carried inputs must follow its own last real timestep, not the padding.
        extended = self._gather(padded, self._rows_without_padding(), "extended", self._extended)
        taps = [x, *(self._tap(extended, k, k) for k in range(1, self.window))]
        first = self.graph.node(
            "Slice",
            [
                extended,
                self.graph.integers(0),
                self.graph.integers(before),
                self.graph.integers(1),
            ],
            f"{self.prefix}.first_inputs",
            ("batch", before, self.width),
        )
        return self._join(taps), self._as_columns(self._mirror(first, "carry"))

    def _rows_without_padding(self) -> str:
        """Positions [B, T+W-1] in [timesteps, carried]: real ones, then carried, then repeats."""
        graph, prefix = self.graph, self.prefix
        total = graph.node(
            "Add",
            [self.batch.timesteps, graph.integers(self.window - 1)],
            f"{prefix}.extended_timesteps",
            (1,),
            np.int64,
        )
        stop = graph.node("Squeeze", [total, graph.integers(0)], f"{prefix}.stop", (), np.int64)
        positions = graph.node(
            "Range",
            [graph.integer(0), stop, graph.integer(1)],
            f"{prefix}.positions",
            (self._extended,),
            np.int64,
        )
        column = self._column(self.batch.lengths, "lengths_column")
        grid = ("batch", self._extended)
        past = graph.node("Sub", [positions, column], f"{prefix}.past_end", grid, np.int64)
        capped = graph.node(
            "Min", [past, graph.integer(self.window - 2)], f"{prefix}.capped", grid, np.int64
        )
        carried = graph.node(
            "Add", [capped, self.batch.timesteps], f"{prefix}.carried_positions", grid, np.int64
        )
        inside = graph.node("Less", [positions, column], f"{prefix}.inside", grid, np.bool_)
        return graph.node(
            "Where", [inside, positions, carried], f"{prefix}.sources", grid, np.int64
        )

    def _column(self, vector: str, name: str) -> str:
        return self.graph.node(
            "Unsqueeze",
            [vector, self.graph.integers(1)],
            f"{self.prefix}.{name}",
            ("batch", 1),
            np.int64,
        )

    def _as_timesteps(self, previous: str) -> str:
        shape = ("batch", self.window - 1, self.width)
        sizes = self.graph.integers(0, self.window - 1, self.width)
        return self.graph.node("Reshape", [previous, sizes], f"{self.prefix}.carried", shape)

    def _as_columns(self, kept: str) -> str:
        columns = (self.window - 1) * self.width
        sizes = self.graph.integers(0, columns)
        return self.graph.node(
            "Reshape", [kept, sizes], f"{self.prefix}.inputs_out", ("batch", columns)
        )

    def _extend(self, parts: list[str], name: str = "extended") -> str:
        shape = ("batch", self._extended, self.width)
        return self.graph.node("Concat", parts, f"{self.prefix}.{name}", shape, axis=1)

    def _tap(self, extended: str, start: int, back: int) -> str:
        """The T timesteps of `extended` from `start` on."""
        name = f"{self.prefix}.back{back}"
        stop = self.graph.node(
            "Add",
            [self.batch.timesteps, self.graph.integers(start)],
            f"{name}_stop",
            (1,),
            np.int64,
        )
        inputs = [extended, self.graph.integers(start), stop, self.graph.integers(1)]
        return self.graph.node("Slice", inputs, name, ("batch", "time", self.width))

    def _mirror(self, kept: str, name: str) -> str:
        backwards = self.graph.integers(*reversed(range(self.window - 1)))
        shape = ("batch", self.window - 1, self.width)
        return self.graph.node("Gather", [kept, backwards], f"{self.prefix}.{name}", shape, axis=1)

    def _gather(self, source: str, positions: str, name: str, count: int | str) -> str:
        indices = self.graph.node(
            "Unsqueeze",
            [positions, self.graph.integers(2)],
            f"{self.prefix}.{name}_indices",
            ("batch", count, 1),
            np.int64,
        )
        shape = ("batch", count, self.width)
        return self.graph.node(
            "GatherND", [source, indices], f"{self.prefix}.{name}", shape, batch_dims=1
        )

    def _join(self, taps: list[str]) -> str:
        shape = ("batch", "time", self.window * self.width)
        return self.graph.node("Concat", taps, f"{self.prefix}.seen", shape, axis=2)
