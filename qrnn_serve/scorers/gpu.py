"""Runs a torch model on one GPU: host arrays in, host arrays out.

All of a scorer's work is on its own stream: rows go up, the model runs, answers come down, and the
thread waits once. Small batches are replays of CUDA graphs (graphs.py).

A replica's process pins the memory that it shares with its server, so that the GPU reads the rows
and writes the answers there, and nothing is copied on the way. In a thread of the server rows lie
in messages, which are not pinned; they are copied into pinned memory first.

Letters: B rows, N timesteps of all rows together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageFacts, StageTimes
from qrnn_serve.kernels.cuda_compile import cupy_cuda
from qrnn_serve.scorers.graphs import BatchGraphs, Bucket, PackedForward
from qrnn_serve.scorers.out_of_memory import memory_errors

logger = logging.getLogger(__name__)


class GpuScorer:
    """A Scorer over a function on packed tensors that lie on one GPU.

    Args:
        forward: The function.
        schema: What it takes and gives.
        device: Where it runs.
        engine: Its name, for people.
        max_timesteps: Most timesteps of one batch.
        multiplications: In the matrix products of one timestep.
        graph_bytes: Device memory that CUDA graphs may take; 0 for none.
    """

    def __init__(
        self,
        forward: PackedForward,
        schema: ModelSchema,
        *,
        device: torch.device,
        engine: str,
        max_timesteps: int,
        multiplications: int,
        graph_bytes: int,
    ) -> None:
        self._forward: PackedForward | None = forward
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The weights came on another stream, which this one does not wait for.
        torch.cuda.synchronize(device)
        self.schema = schema
        self.device = str(device)
        self.engine = engine
        self.max_timesteps = max_timesteps
        self.alive = True
        self.stages: tuple[StageFacts, ...] = ()
        with self._on_stream():
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            self._graphs = BatchGraphs(
                forward, schema, device, multiplications=multiplications, max_bytes=graph_bytes
            )

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: The device has no room for the batch.
        """
        started_s = time.monotonic()
        schema, dtype = self.schema, np.dtype(self.schema.dtype)
        vectors = rows.timesteps if schema.output_per_timestep else rows.rows
        place = ScoredRows(
            output=_pinned((vectors, schema.output_size), dtype),
            state=_pinned((rows.rows, schema.state_size), dtype),
        )
        staged = PackedRows(
            values=_pinned_copy(rows.values),
            lengths=rows.lengths,
            state=None if rows.state is None else _pinned_copy(rows.state),
        )
        staging = StageTimes(upload_s=time.monotonic() - started_s)
        scored = self.score_into(staged, place)
        return replace(scored, times=scored.times + staging)

    def score_into(self, rows: PackedRows, place: ScoredRows) -> ScoredRows:
        """`score`, with the answers written where the caller wants them.

        Args:
            rows: As in `score`. Best in pinned memory: else each copy holds up the thread.
            place: Arrays of the answers' shapes and dtype, likewise.

        Returns:
            `place`, and what is to be told of the batch.

        Raises:
            MemoryError: The device has no room for the batch.
        """
        replayed = self._graphs.replayed
        bucket = self._graphs.bucket_of(rows)
        started, uploaded, computed, downloaded = self._events
        with torch.inference_mode(), self._on_stream(), memory_errors(self.device):
            try:
                started.record()
                run = self._upload(rows, bucket)
                uploaded.record()
                output, state = run()
                computed.record()
                torch.from_numpy(place.output).copy_(output, non_blocking=True)
                torch.from_numpy(place.state).copy_(state, non_blocking=True)
                downloaded.record()
            finally:
                # After an error too: the memory of the rows belongs to the caller again.
                self._stream.synchronize()
        times = StageTimes(
            upload_s=started.elapsed_time(uploaded) / 1e3,
            compute_s=uploaded.elapsed_time(computed) / 1e3,
            download_s=computed.elapsed_time(downloaded) / 1e3,
        )
        return replace(
            place,
            padded_timesteps=0 if bucket is None else bucket.timesteps - rows.timesteps,
            times=times,
            graphs=self._graphs.captured,
            replayed=self._graphs.replayed - replayed,
        )

    def pin(self, memory: mmap.mmap) -> Callable[[], None]:
        """Pin memory that rows are read from and answers written to.

        Returns:
            What ends that; to be called before the memory is unmapped.
        """
        runtime = cupy_cuda().runtime
        address = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            with torch.cuda.device(self._device):
                runtime.hostRegister(address, len(memory), 0)
        except runtime.CUDARuntimeError as error:
            logger.warning(
                "%s cannot read shared memory itself, so batches are copied once more: %s",
                self.device,
                error,
            )
            return lambda: None
        return functools.partial(runtime.hostUnregister, address)

    def interrupt(self) -> bool:
        """A thread in native code cannot be ended."""
        return False

    def close(self) -> None:
        """Let go of the model and give its device's memory back."""
        self._forward = None
        self._graphs.close()
        torch.cuda.empty_cache()

    def _upload(
        self, rows: PackedRows, bucket: Bucket | None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Bring the rows to the device; what then runs the model on them."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("a closed scorer was used. This is a bug.")
        if bucket is not None:
            self._graphs.put(rows, bucket)
            return lambda: self._graphs.run(rows, bucket)
        offsets = _pinned((rows.rows + 1,), np.dtype(np.int64))
        offsets[0] = 0
        np.cumsum(rows.lengths, out=offsets[1:])
        values, offsets_there = self._on_device(rows.values), self._on_device(offsets)
        state = None if rows.state is None else self._on_device(rows.state)
        longest = int(np.max(rows.lengths, initial=0))
        return lambda: forward(values, offsets_there, state, longest)

    def _on_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def _pinned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    # torch caches pinned memory and waits for the stream before it hands it out again.
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=kind, pin_memory=True).numpy()


def _pinned_copy(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    pinned = _pinned(array.shape, array.dtype)
    np.copyto(pinned, array)
    return pinned
