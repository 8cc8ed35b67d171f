"""The shared memory in which a batch goes to a replica's process and its answers come back.

It is an anonymous file (memfd) that both sides map. It has no name that others could open or that
could be left behind, and /dev/shm does not limit it; the kernel frees it when the last side ends,
however it ends. The server owns it: it sizes the file for each batch, answers included, and the
process maps it again when a packet tells another size.

The arrays of a batch lie in it in this order, each in C order from a multiple of 64 bytes:

    lengths    [B] int64
    values     [N, I] of the model's dtype, or int64 ids, [N] or [N, I]
    state      [B, S] of the model's dtype, if the packet says so
    output     [B, C] or [N, C] of the model's dtype, written by the process
    state_out  [B, S] of the model's dtype, written by the process

Letters: B rows, N timesteps of all rows together, I input width, C output width, S state width.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageTimes
from qrnn_serve.scorers.copying import copy_array, copy_of
from qrnn_serve.scorers.memory import free_host_bytes
from qrnn_serve.scorers.packets import Kind, Packet

_DTYPES = {"float16": 1, "float32": 2, "float64": 3}
_IDS, _STATE, _PER_TIMESTEP = 1, 2, 4
_ALIGNMENT = 64
_MAX_SHARE_OF_FREE_MEMORY = 0.5
# What is more than this is given back when a batch does not need it.
_KEPT_BYTES = 1 << 30

Array = npt.NDArray[np.generic]
Pin = Callable[[mmap.mmap], Callable[[], None]]
"""Pins mapped memory for a device; returns what unpins it."""


class BatchMemory:
    """The file and one side's view of it.

    Args:
        fd: The file.
        pin: Called with the memory each time that it is mapped.

    Attributes:
        size: Bytes mapped.
    """

    def __init__(self, fd: int, pin: Pin | None = None) -> None:
        self._fd = fd
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._map: mmap.mmap | None = None
        self.size = 0

    def make_room(self, nbytes: int) -> mmap.mmap:
        """The memory, grown if need be. For its owner, while no batch is in it.

        Raises:
            MemoryError: It would take more than half of what the machine has left.
        """
        kept = min(self.size, _KEPT_BYTES)
        if self._map is not None and nbytes <= self.size and not nbytes <= kept < self.size:
            return self._map
        # A quarter more, so that batches that grow do not each change the file.
        size = max(nbytes + nbytes // 4, kept, mmap.PAGESIZE)
        most = int(free_host_bytes() * _MAX_SHARE_OF_FREE_MEMORY) + self.size
        if size > most:
            raise MemoryError(f"the batch takes {size} bytes of shared memory, there are {most}")
        self._let_go()
        try:
            os.truncate(self._fd, size)
            # Takes the memory now: later, a write that finds none would end the process.
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise MemoryError(f"{size} bytes of shared memory: {error}") from error
        return self.map(size)

    def map(self, size: int) -> mmap.mmap:
        """The memory at the size that its owner gave it."""
        if self._map is None or size != self.size:
            self._let_go()
            self._map = mmap.mmap(self._fd, size)
            self.size = size
            if self._pin is not None:
                self._unpin = self._pin(self._map)
        return self._map

    def close(self) -> None:
        """Let go of it."""
        self._let_go()
        os.close(self._fd)

    def _let_go(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._map = None


class BatchLayout:
    """Where the arrays of one batch lie.

    Attributes:
        nbytes: From the first to the last.
    """

    def __init__(self, schema: ModelSchema, rows: int, timesteps: int, *, with_state: bool) -> None:
        self._schema, self._rows, self._timesteps = schema, rows, timesteps
        self._with_state = with_state
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self.nbytes = 0
        dtype, int64 = np.dtype(schema.dtype), np.dtype(np.int64)
        self._add("lengths", (rows,), int64)
        values_dtype = int64 if schema.takes_ids else dtype
        self._add("values", (timesteps, *schema.timestep_shape), values_dtype)
        if with_state:
            self._add("state", (rows, schema.state_size), dtype)
        vectors = timesteps if schema.output_per_timestep else rows
        self._add("output", (vectors, schema.output_size), dtype)
        self._add("state_out", (rows, schema.state_size), dtype)

    @staticmethod
    def of(packet: Packet, schema: ModelSchema) -> BatchLayout:
        """The layout that a packet tells.

        Raises:
            ReplicaError: It is that of another model, or larger than the memory.
        """
        with_state = bool(packet.flags & _STATE)
        layout = BatchLayout(schema, packet.rows, packet.timesteps, with_state=with_state)
        expected = layout.packet(packet.batch, packet.memory_bytes)
        if packet != expected or packet.memory_bytes < layout.nbytes:
            raise ReplicaError(f"expected {expected}, got {packet}. This is a bug.")
        return layout

    def packet(self, batch: int, memory_bytes: int) -> Packet:
        """The packet that asks for its scores."""
        schema = self._schema
        flags = _IDS * schema.takes_ids + _STATE * self._with_state
        return Packet(
            Kind.SCORE,
            dtype=_DTYPES[schema.dtype],
            flags=flags + _PER_TIMESTEP * schema.output_per_timestep,
            batch=batch,
            memory_bytes=memory_bytes,
            rows=self._rows,
            timesteps=self._timesteps,
            input_size=schema.input_size,
            output_size=schema.output_size,
            state_size=schema.state_size,
        )

    def put_rows(self, rows: PackedRows, memory: mmap.mmap) -> None:
        """Copy the rows in."""
        arrays: dict[str, Array] = {"lengths": rows.lengths, "values": rows.values}
        if rows.state is not None:
            arrays["state"] = rows.state
        self._put(arrays, memory)

    def rows_in(self, memory: mmap.mmap) -> PackedRows:
        """The rows, as views."""
        return PackedRows(
            values=self._view("values", memory),
            lengths=self._view("lengths", memory).view(np.int64),
            state=self._view("state", memory) if self._with_state else None,
        )

    def place_in(self, memory: mmap.mmap) -> ScoredRows:
        """Where the answers go, as views."""
        return ScoredRows(
            output=self._view("output", memory), state=self._view("state_out", memory)
        )

    def put_scores(self, scored: ScoredRows, memory: mmap.mmap) -> None:
        """Copy the answers in.

        Raises:
            ReplicaError: They are not of the shape and dtype that the schema promises.
        """
        self._put({"output": scored.output, "state_out": scored.state}, memory)

    def scores_in(self, memory: mmap.mmap, answer: Packet) -> ScoredRows:
        """The answers, as copies: the memory takes the next batch while callers read them.

        Args:
            memory: The memory.
            answer: The packet that says they are there.
        """
        return ScoredRows(
            output=copy_of(self._view("output", memory)),
            state=copy_of(self._view("state_out", memory)),
            padded_timesteps=answer.padded_timesteps,
            graphs=answer.graphs,
            replayed=answer.replayed,
            times=StageTimes(
                upload_s=answer.upload_s,
                compute_s=answer.compute_s,
                download_s=answer.download_s,
            ),
        )

    def _add(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        start = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._places[name] = start, shape, dtype
        self.nbytes = start + math.prod(shape) * dtype.itemsize

    def _view(self, name: str, memory: mmap.mmap) -> Array:
        start, shape, dtype = self._places[name]
        return np.ndarray(shape, dtype, memory, start)

    def _put(self, arrays: Mapping[str, Array], memory: mmap.mmap) -> None:
        for name, array in arrays.items():
            place = self._view(name, memory)
            if (array.shape, array.dtype) != (place.shape, place.dtype):
                raise ReplicaError(
                    f"{name}: expected shape {place.shape} and dtype {place.dtype}, got "
                    f"{array.shape} and {array.dtype}. This is a bug."
                )
            copy_array(place, array)
