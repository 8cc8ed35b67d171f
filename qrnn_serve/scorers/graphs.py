"""CUDA graphs for small batches, whose launches would take longer than their kernels.

A graph is a recording of all launches of the model at one size, replayed by one call. Sizes are
rounded up to a bucket: the numbers of timesteps and of rows are powers of two. The timesteps that
are missing make one more row, which is computed and dropped; rows beyond it are empty. A row does
not see its neighbours, so its numbers do not change by that.

A bucket is captured when its first batch has run, on the buffers that all graphs read from.

Letters: B rows, N timesteps of all rows together, I input width, S state width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qrnn_serve.engine.types import ModelSchema, PackedRows

PackedForward = Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""values [N, I] or [N], offsets [B + 1] int64, state [B, S] or None, timesteps of the longest row
-> output, state [B, S]."""

_FEWEST_TIMESTEPS = 16
_MOST_TIMESTEPS = 8192
# About 0.2 ms of an H200. Above, kernels take longer than their launches, and padding is felt.
_MOST_MULTIPLICATIONS = 1 << 32

logger = logging.getLogger(__name__)


class Bucket(NamedTuple):
    """Sizes of one graph: N and B, with padding."""

    timesteps: int
    rows: int

    @staticmethod
    def holding(timesteps: int, rows: int) -> Bucket:
        """The smallest one that a batch of these sizes fits in, with a row for what is padded."""
        rounded = max(_rounded_up(timesteps), _FEWEST_TIMESTEPS)
        return Bucket(rounded, _rounded_up(rows + (timesteps < rounded)))


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Tensor
    state: Tensor


class BatchGraphs:
    """The graphs of one scorer. Made and used on its stream, by one thread.

    Attributes:
        captured: How many there are.
        replayed: How many batches were replays.
    """

    def __init__(
        self,
        forward: PackedForward,
        schema: ModelSchema,
        device: torch.device,
        *,
        multiplications: int,
        max_bytes: int,
    ) -> None:
        """Take the memory of the inputs.

        Args:
            forward: The model.
            schema: What it takes and gives.
            device: A GPU.
            multiplications: In the matrix products of one timestep.
            max_bytes: Device memory that the graphs may take; 0 for no graphs.
        """
        self.captured = self.replayed = 0
        self._forward = forward
        self._per_timestep = schema.output_per_timestep
        self._device = device
        self._graphs: dict[Bucket, _Graph] = {}
        self._max_bytes = max_bytes
        most = min(_MOST_MULTIPLICATIONS // max(multiplications, 1), _MOST_TIMESTEPS)
        # The largest bucket that is no larger.
        self._most_timesteps = 1 << max(most.bit_length() - 1, 0)
        dtype = torch.from_numpy(np.empty(0, schema.dtype)).dtype
        values_shape = (self._most_timesteps, *schema.timestep_shape)
        values_dtype = torch.int64 if schema.takes_ids else dtype
        state_shape = (self._most_timesteps, schema.state_size)
        self._bytes = 0
        if self._most_timesteps >= _FEWEST_TIMESTEPS and max_bytes > 0:
            self._values = torch.zeros(values_shape, dtype=values_dtype, device=device)
            self._offsets = torch.zeros(self._most_timesteps + 1, dtype=torch.int64, device=device)
            self._state = torch.zeros(state_shape, dtype=dtype, device=device)
            self._host_offsets = torch.zeros(
                self._most_timesteps + 1, dtype=torch.int64, pin_memory=True
            )
            self._pool = torch.cuda.graph_pool_handle()
            self._bytes = sum(t.nbytes for t in (self._values, self._offsets, self._state))
        self._on = 0 < self._bytes <= max_bytes
        self._full = False

    def bucket_of(self, rows: PackedRows) -> Bucket | None:
        """The bucket that a batch belongs to; None for one that runs without a graph."""
        if not self._on or rows.timesteps > self._most_timesteps:
            return None
        bucket = Bucket.holding(rows.timesteps, rows.rows)
        if bucket.rows > self._most_timesteps or (self._full and bucket not in self._graphs):
            return None
        return bucket

    def put(self, rows: PackedRows, bucket: Bucket) -> None:
        """Bring a batch, best from pinned memory, to the buffers of its bucket.

        What is padded keeps what an earlier batch left there.
        """
        offsets = self._host_offsets[: bucket.rows + 1]
        host = offsets.numpy()
        np.cumsum(rows.lengths, out=host[1 : rows.rows + 1])
        host[rows.rows + 1 :] = bucket.timesteps
        self._offsets[: bucket.rows + 1].copy_(offsets, non_blocking=True)
        values = torch.from_numpy(rows.values)
        self._values[: rows.timesteps].copy_(values, non_blocking=True)
        if rows.state is None:
            self._state[: bucket.rows].zero_()
        else:
            state = torch.from_numpy(rows.state)
            self._state[: rows.rows].copy_(state, non_blocking=True)

    def run(self, rows: PackedRows, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Score the batch that was put.

        Returns:
            Output and state of its rows, which the next call may change.
        """
        graph = self._graphs.get(bucket)
        if graph is None:
            output, state = self._eager(bucket)
            self._capture(bucket)
        else:
            graph.graph.replay()
            output, state = graph.output, graph.state
            self.replayed += 1
        return output[: rows.timesteps if self._per_timestep else rows.rows], state[: rows.rows]

    def close(self) -> None:
        """Give all graphs and their memory back."""
        self._on = False
        self._graphs.clear()

    def _eager(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        return self._forward(
            self._values[: bucket.timesteps],
            self._offsets[: bucket.rows + 1],
            self._state[: bucket.rows],
            # A bound, as the padded row may be that long. Layers choose between their kernels by
            # it only in sizes that are too large for a graph.
            bucket.timesteps,
        )

    def _capture(self, bucket: Bucket) -> None:
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output, state = self._eager(bucket)
            finally:
                graph.capture_end()
        except Exception:  # whatever cannot be captured runs without
            self.close()
            logger.warning("no CUDA graphs: the capture of %s failed", bucket, exc_info=True)
            return
        self._bytes += torch.cuda.memory_reserved(self._device) - before
        if self._bytes > self._max_bytes:
            self._full = True
            logger.info(
                "no more CUDA graphs: %d take their %d bytes; --graph-memory-mb gives more",
                self.captured,
                self._max_bytes,
            )
            return
        self._graphs[bucket] = _Graph(graph, output, state)
        self.captured += 1


def _rounded_up(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(count - 1, 0).bit_length()
