"""How the stages of a placed model run on GPUs: one thread starts all, events order them.

Each stage has a stream. Between the host, the stages and the host again lie borders, each with
streams of its own for its copies, so that a copy holds up no stage. All work of a batch is started
piece by piece, the stages in turns; nothing waits on the host before the end.

Letters: B rows, N timesteps of a batch, C output width of a stage, S columns of its state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qrnn_serve.engine.types import PackedRows
from qrnn_serve.scorers.pieces import Piece
from qrnn_serve.scorers.stages import StageModel, StagesRun, state_of

DevicePair = tuple[torch.device, torch.device]
_HOST = torch.device("cpu")


class CudaStages:
    """Stages on GPUs.

    Args:
        stages: In their order.
        broken: Ordered pairs of devices between which a direct copy delivers other numbers; those
            copies go through the host's memory.
    """

    def __init__(self, stages: Sequence[StageModel], broken: Collection[DevicePair] = ()) -> None:
        self._stages = list(stages)
        devices = [stage.device for stage in stages]
        self._streams = [torch.cuda.Stream(device) for device in devices]
        places = [_HOST, *devices, _HOST]
        self._borders = [_Border(a, b, (a, b) in broken) for a, b in pairwise(places)]
        for device in set(devices):
            # The weights came on another stream, which these do not wait for.
            torch.cuda.synchronize(device)

    def run(self, rows: PackedRows, pieces: Sequence[Piece]) -> StagesRun:
        """Score a batch."""
        batch = _CudaBatch(self._stages, self._streams, self._borders, rows, pieces)
        try:
            batch.start()
        finally:
            # Also after an error: what was started still reads and writes the batch's memory.
            self._wait()
        return batch.result()

    def seconds_alone(self, rows: PackedRows, piece: Piece) -> list[float]:
        """Seconds that each stage takes for a batch of one piece, one after another."""
        return self.run(rows, [piece]).busy_s

    def launch_seconds(self, rows: PackedRows, piece: Piece) -> float:
        """Seconds in which a piece's work is started in all stages."""
        batch = _CudaBatch(self._stages, self._streams, self._borders, rows, [piece])
        started_s = time.perf_counter()
        batch.start()
        launch_s = time.perf_counter() - started_s
        self._wait()
        return launch_s

    def close(self) -> None:
        """Let go of the models."""
        self._stages.clear()

    def _wait(self) -> None:
        for border in self._borders:
            border.wait()
        for stream in self._streams:
            stream.synchronize()


class _Border:
    """What a batch crosses between two places: a copy to memory of the second.

    Args:
        source: Where a piece comes from; the CPU is pinned memory.
        target: Where it goes.
        by_host: Whether it goes through the host's memory.
    """

    def __init__(self, source: torch.device, target: torch.device, by_host: bool) -> None:
        self._target, self._by_host = target, by_host
        self._same = _is_same(source, target)
        self._streams = [
            torch.cuda.Stream(device)
            for device in dict.fromkeys((source, target))
            if device != _HOST
        ]

    def make_room(self, timesteps: int, like: Tensor) -> Tensor | None:
        """Memory for all pieces, allocated on the current stream; None where nothing is copied."""
        if self._same:
            return None
        shape = (timesteps, *like.shape[1:])
        return _empty(shape, like.dtype, self._target)

    def start_after(self, event: torch.cuda.Event) -> None:
        """Copy nothing before that."""
        for stream in self._streams:
            stream.wait_event(event)

    def cross(
        self, values: Tensor, room: Tensor | None, ready: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start a copy of a piece.

        Args:
            values: It; kept by the caller until the batch is done.
            room: Its part of the memory.
            ready: When the values are there; None for now.

        Returns:
            The values on the other side, and when they are there.
        """
        if room is None:
            return values, ready
        if ready is not None:
            self.start_after(ready)
        with self._current():
            if self._by_host:
                between = _empty(values.shape, values.dtype, _HOST)
                between.copy_(values, non_blocking=True)
                left = _event(self._streams[0])
                self._streams[-1].wait_event(left)
                values = between
            room.copy_(values, non_blocking=True)
        return room, _event(self._streams[-1])

    def wait(self) -> None:
        """Wait for every copy."""
        for stream in self._streams:
            stream.synchronize()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        # torch orders a copy between devices after the current stream of both, and before what
        # comes on both: with streams of its own it holds up no stage.
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class _CudaBatch:
    """A batch on its way through the stages. Keeps every tensor until its streams are done."""

    def __init__(
        self,
        stages: Sequence[StageModel],
        streams: Sequence[torch.cuda.Stream],
        borders: Sequence[_Border],
        rows: PackedRows,
        pieces: Sequence[Piece],
    ) -> None:
        self._stages, self._streams, self._borders = stages, streams, borders
        self._pieces, self._rows = pieces, rows
        self._values = _pinned(rows.values)
        starts = np.cumsum([0, *(len(piece.offsets) for piece in pieces)])
        self._offset_places = [slice(a, b) for a, b in pairwise(starts.tolist())]
        offsets = _pinned(np.concatenate([piece.offsets for piece in pieces]))
        self._offsets: list[Tensor] = []
        self._states: list[Tensor] = []
        for stage, stream in zip(stages, streams, strict=True):
            with torch.cuda.stream(stream):
                self._offsets.append(offsets.to(stage.device, non_blocking=True))
                state = _pinned(state_of(stage, rows))
                self._states.append(state.to(stage.device, non_blocking=True))
        self._rooms: list[Tensor | None] = [None] * len(borders)
        self._has_room = [False] * len(borders)
        # Everything that a stream may still read.
        self._kept: list[Tensor] = [self._values, offsets]
        self._outputs: list[Tensor] = []
        self._host_states: list[Tensor] = []
        self._spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in stages]

    def start(self) -> None:
        """Start all work, each stage a piece behind the one before it."""
        count, stages = len(self._pieces), len(self._stages)
        on_the_way: list[list[tuple[Tensor, torch.cuda.Event | None]]] = [[] for _ in range(stages)]
        for turn in range(count + stages - 1):
            for number in range(max(0, turn - count + 1), min(stages, turn + 1)):
                piece = self._pieces[turn - number]
                if number == 0:
                    values = self._values[piece.start : piece.stop]
                    given = self._cross(0, piece, values, None)
                else:
                    given = on_the_way[number].pop(0)
                output, ready = self._run(number, turn - number, *given)
                crossed = self._cross(number + 1, piece, output, ready)
                if number + 1 < stages:
                    on_the_way[number + 1].append(crossed)
                else:
                    self._outputs.append(crossed[0])
        for state, stream in zip(self._states, self._streams, strict=True):
            with torch.cuda.stream(stream):
                host = _empty(state.shape, state.dtype, _HOST)
                self._host_states.append(host.copy_(state, non_blocking=True))

    def result(self) -> StagesRun:
        """What came of it, when the streams are done."""
        busy_ms = [sum(start.elapsed_time(end) for start, end in spans) for spans in self._spans]
        whole = self._rooms[-1]
        if whole is None:
            raise RuntimeError("the batch was not started. This is a bug.")
        return StagesRun(
            output=whole.numpy(),
            state=[state.numpy() for state in self._host_states],
            busy_s=[ms / 1000 for ms in busy_ms],
        )

    def _run(
        self, number: int, piece: int, values: Tensor, ready: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event]:
        stage, stream = self._stages[number], self._streams[number]
        if ready is not None:
            stream.wait_event(ready)
        offsets = self._offsets[number][self._offset_places[piece]]
        with torch.cuda.stream(stream):
            start = _event(stream, timed=True)
            output = stage.run(values, offsets, self._states[number], self._pieces[piece])
            if not self._per_timestep(number):
                # A row that goes on in the next piece has its output there.
                output = output[: self._pieces[piece].ended_rows]
            end = _event(stream, timed=True)
        self._spans[number].append((start, end))
        self._kept.append(output)
        return output, end

    def _cross(
        self, number: int, piece: Piece, values: Tensor, ready: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Cross a border, with memory for the whole batch that the first piece brings."""
        border = self._borders[number]
        per_timestep = number == 0 or self._per_timestep(number - 1)
        if not self._has_room[number]:
            stream = self._streams[min(number, len(self._streams) - 1)]
            total = self._rows.timesteps if per_timestep else self._rows.rows
            with torch.cuda.stream(stream):
                self._rooms[number] = border.make_room(total, values)
                # The memory may have been that of work before it on this stream.
                border.start_after(_event(stream))
            self._has_room[number] = True
        room = self._rooms[number]
        if room is not None and per_timestep:
            room = room[piece.start : piece.stop]
        elif room is not None:
            ended = piece.first_row + piece.ended_rows
            room = room[piece.first_row : ended]
        return border.cross(values, room, ready)

    def _per_timestep(self, number: int) -> bool:
        return self._stages[number].model.config.pooling == "none"


def _is_same(source: torch.device, target: torch.device) -> bool:
    return source == target


def _event(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """An event after what was started on the stream."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory on a GPU, or pinned on the host."""
    return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=device == _HOST)


def _pinned(array: npt.NDArray[np.generic]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    pinned = _empty(array.shape, dtype, _HOST)
    np.copyto(pinned.numpy(), array)
    return pinned
