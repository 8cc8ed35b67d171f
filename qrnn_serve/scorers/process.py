"""A scorer in a process of its own: a fault there, such as a broken CUDA context, ends there.

Rows are copied into shared memory once and answers out of it once (batch_memory.py); what the two
processes say to each other is in packets.py. Neither side polls. A large batch crosses in pieces,
so that copying one goes on while the process scores another.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, ScorerDeadError, StageTimes
from qrnn_serve.scorers.batch_memory import BatchLayout, BatchMemory
from qrnn_serve.scorers.loader import ScorerSpec
from qrnn_serve.scorers.packets import Channel, Kind, Packet, error_of

START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0
# Large enough that a GPU works on a piece for longer than it takes to launch it.
_PIECE_BYTES = 16 << 20
_PIECES_AHEAD = 1


def worker_command(spec: ScorerSpec) -> list[str]:
    """How to run a replica's process that loads `spec`."""
    level = logging.getLogger().getEffectiveLevel()
    module = ["-P", "-m", "qrnn_serve.scorers.worker"]
    return [sys.executable, *module, json.dumps(to_mapping(spec)), str(level)]


class ProcessScorer:
    """A Scorer whose model is in another process.

    That process lives no longer than the thread that made this object: the kernel ends it with the
    thread, however that ends.

    Attributes:
        pid: Of the process.
        schema, device, engine, max_timesteps: As in Scorer, told by the process.
    """

    def __init__(self, command: Sequence[str], *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process and wait until it has loaded its model.

        Args:
            command: Runs it; the descriptors of the socket and of the memory are appended.
            start_timeout_s: Seconds that it may take.

        Raises:
            ReplicaError: It ended, or took longer, or what it raised is no error of ours.
            Exception: What its loader raised, of the same class.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory_fd = os.memfd_create("qrnn-serve-batch")
        self._channel = Channel(ours)
        self._memory = BatchMemory(memory_fd)
        self._batch = 0
        self._closed = False
        with theirs:
            self._process = _spawn(command, theirs.fileno(), memory_fd)
        self.pid = self._process.pid
        try:
            facts = json.loads(self._wait_until_ready(start_timeout_s).text)
        except BaseException:
            self.interrupt()
            self.close()
            raise
        self.schema = from_mapping(ModelSchema, facts["schema"])
        self.device = str(facts["device"])
        self.engine = str(facts["engine"])
        self.max_timesteps = int(facts["max_timesteps"])

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def score(self, rows: PackedRows) -> ScoredRows:
        """Have the process score rows that were validated against the schema.

        Raises:
            MemoryError: The device, or the memory between the two, has no room for the batch.
            ScorerDeadError: The process ended.
            Exception: What its scorer raised, of the same class if it is one of ours.
        """
        pieces = _pieces(rows, self.schema)
        memory = self._memory.make_room(pieces[-1].layout.nbytes)
        scored = _empty_scores(rows, self.schema)
        waiting: deque[tuple[_Piece, Packet]] = deque()
        try:
            for piece in pieces:
                started_s = time.monotonic()
                piece.layout.put_rows(piece.of(rows), memory)
                put = StageTimes(upload_s=time.monotonic() - started_s)
                scored = replace(scored, times=scored.times + put)
                waiting.append((piece, self._ask(piece.layout)))
                # The process works on one piece while this thread copies the next or the last.
                if len(waiting) > _PIECES_AHEAD:
                    scored = self._take(*waiting.popleft(), memory, scored)
            while waiting:
                scored = self._take(*waiting.popleft(), memory, scored)
        except ScorerDeadError:
            raise
        except Exception:
            for _, question in waiting:
                self._answer_to(question)
            raise
        return scored

    def interrupt(self) -> bool:
        """Kill the process; a `score` that waits for it raises ScorerDeadError."""
        self._process.kill()
        return True

    def close(self) -> None:
        """End the process and wait for it. Its device's memory is free then."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        self._memory.close()
        self._wait_for_end()

    def _ask(self, layout: BatchLayout) -> Packet:
        self._batch += 1
        question = layout.packet(self._batch, self._memory.size)
        try:
            self._channel.send(question)
        except ConnectionError:
            raise self._ended() from None
        return question

    def _answer_to(self, question: Packet) -> Packet:
        answer = self._channel.receive()
        if answer is None:
            raise self._ended()
        if answer.batch != question.batch:
            # Scores of another batch must reach nobody.
            raise ScorerDeadError(f"expected the answer to {question}, got {answer}")
        return answer

    def _take(
        self, piece: _Piece, question: Packet, memory: mmap.mmap, scored: ScoredRows
    ) -> ScoredRows:
        """Wait for the answers of a piece and copy them to their places in `scored`."""
        answer = self._answer_to(question)
        if answer.kind is Kind.FAILED:
            raise error_of(answer)
        answered_s = time.monotonic()
        piece.layout.take_scores(memory, piece.place_in(scored))
        copying_s = time.monotonic() - answered_s
        # The way of the packets counts as no stage.
        times = StageTimes(
            upload_s=answer.upload_s,
            compute_s=answer.compute_s,
            download_s=answer.download_s + copying_s,
        )
        return replace(
            scored,
            padded_timesteps=scored.padded_timesteps + answer.padded_timesteps,
            times=scored.times + times,
            captured=scored.captured + answer.captured,
            replayed=scored.replayed + answer.replayed,
        )

    def _ended(self) -> ScorerDeadError:
        return ScorerDeadError(f"the process of {self.device} ended: {self._wait_for_end()}")

    def _wait_until_ready(self, timeout_s: float) -> Packet:
        try:
            packet = self._channel.receive(timeout_s)
        except TimeoutError:
            raise ReplicaError(
                f"the replica's process did not load its model within {timeout_s:g} s; "
                "--start-timeout-s gives it longer"
            ) from None
        if packet is None:
            raise ReplicaError(
                f"the replica's process ended before it had loaded its model: "
                f"{self._wait_for_end()}; the log has what it said"
            )
        if packet.kind is Kind.FAILED:
            raise error_of(packet)
        return packet

    def _wait_for_end(self) -> str:
        """Wait for the process, which was told to end or is about to; how it ended."""
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        return f"killed by {signal.Signals(-status).name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Neighbouring rows of a batch that cross together.

    Attributes:
        rows: Which rows.
        timesteps: Their timesteps.
        vectors: Their outputs.
        layout: Where they lie in the memory.
    """

    rows: slice
    timesteps: slice
    vectors: slice
    layout: BatchLayout

    def of(self, rows: PackedRows) -> PackedRows:
        """Its rows of a batch."""
        return PackedRows(
            values=rows.values[self.timesteps],
            lengths=rows.lengths[self.rows],
            state=None if rows.state is None else rows.state[self.rows],
        )

    def place_in(self, scored: ScoredRows) -> ScoredRows:
        """Its part of the answers."""
        return ScoredRows(output=scored.output[self.vectors], state=scored.state[self.rows])


def _pieces(rows: PackedRows, schema: ModelSchema) -> list[_Piece]:
    """One piece, or several of about _PIECE_BYTES where there is enough for them."""
    with_state = rows.state is not None
    layout = BatchLayout(schema, rows.rows, rows.timesteps, with_state=with_state)
    count = min(layout.nbytes // _PIECE_BYTES, rows.rows)
    if count < 2:
        whole = slice(None)
        return [_Piece(rows=whole, timesteps=whole, vectors=whole, layout=layout)]
    offsets = np.concatenate(([0], np.cumsum(rows.lengths)))
    # Rows that end nearest below equal shares of the timesteps.
    shares = rows.timesteps * np.arange(1, count) / count
    cuts = np.searchsorted(offsets, shares, side="right") - 1
    bounds = np.unique(np.concatenate(([0], cuts, [rows.rows]))).tolist()
    pieces: list[_Piece] = []
    start = 0
    for first, last in pairwise(bounds):
        begin, end = int(offsets[first]), int(offsets[last])
        layout = BatchLayout(schema, last - first, end - begin, with_state=with_state, start=start)
        start = layout.nbytes
        row_slice, timestep_slice = slice(first, last), slice(begin, end)
        vectors = timestep_slice if schema.output_per_timestep else row_slice
        pieces.append(
            _Piece(rows=row_slice, timesteps=timestep_slice, vectors=vectors, layout=layout)
        )
    return pieces


def _empty_scores(rows: PackedRows, schema: ModelSchema) -> ScoredRows:
    vectors = rows.timesteps if schema.output_per_timestep else rows.rows
    return ScoredRows(
        output=np.empty((vectors, schema.output_size), schema.dtype),
        state=np.empty((rows.rows, schema.state_size), schema.dtype),
    )


def _spawn(command: Sequence[str], socket_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [*command, str(socket_fd), str(memory_fd)],
        stdin=subprocess.DEVNULL,
        # The server's standard output has its ready line and nothing else.
        stdout=2,
        pass_fds=(socket_fd, memory_fd),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C goes to the process group of the terminal; the server alone decides on the end.
        process_group=0,
    )
