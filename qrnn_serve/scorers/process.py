"""A scorer in a process of its own: a fault there, such as a broken CUDA context, ends there.

Rows are copied into shared memory once and answers out of it once (batch_memory.py); what the two
processes say to each other is in packets.py. Neither side polls.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.types import (
    ModelSchema,
    PackedRows,
    ScoredRows,
    ScorerDeadError,
    StageFacts,
    StageTimes,
)
from qrnn_serve.scorers.batch_memory import BatchLayout, BatchMemory
from qrnn_serve.scorers.loader import ScorerSpec
from qrnn_serve.scorers.packets import Channel, Kind, Packet, error_of

START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0


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
        schema, device, engine, max_timesteps, stages: As in Scorer, told by the process.
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
        self.stages = tuple(from_mapping(StageFacts, stage) for stage in facts["stages"])

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
        layout = BatchLayout(
            self.schema, rows.rows, rows.timesteps, with_state=rows.state is not None
        )
        started_s = time.monotonic()
        memory = self._memory.make_room(layout.nbytes)
        layout.put_rows(rows, memory)
        put_s = time.monotonic() - started_s
        self._batch += 1
        answer = self._ask(layout.packet(self._batch, self._memory.size))
        if answer.kind is Kind.FAILED:
            raise error_of(answer)
        if self.stages:
            self.stages = tuple(
                replace(stage, busy_s=busy_s)
                for stage, busy_s in zip(self.stages, json.loads(answer.text), strict=True)
            )
        answered_s = time.monotonic()
        scored = layout.scores_in(memory, answer)
        # The way of the packets counts as neither.
        copies = StageTimes(upload_s=put_s, download_s=time.monotonic() - answered_s)
        return replace(scored, times=scored.times + copies)

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

    def _ask(self, question: Packet) -> Packet:
        try:
            self._channel.send(question)
            answer = self._channel.receive()
        except ConnectionError:
            answer = None
        if answer is None:
            raise ScorerDeadError(f"the process of {self.device} ended: {self._wait_for_end()}")
        if answer.batch != question.batch:
            # Scores of another batch must reach nobody.
            raise ScorerDeadError(f"expected the answer to {question}, got {answer}")
        return answer

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
