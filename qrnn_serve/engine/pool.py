"""The engine as the server sees it: submit rows, await scores.

One queue, and the replicas that pull from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qrnn_serve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    OverloadedError,
    QRNNError,
    UnavailableError,
)
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.metrics import Counters, EngineCounts
from qrnn_serve.engine.queue import QueueConfig, QueueDepth, RequestQueue
from qrnn_serve.engine.replica import Answer, Replica, ReplicaCost
from qrnn_serve.engine.request import Part, Request, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, PackedRows, Scorer

_NO_REPLICA = "no replica is left to score; the server is about to end"
_STOPPED = "the server is shutting down"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How much may wait, and how much one batch may hold."""

    queue: QueueConfig = field(default_factory=QueueConfig)
    batch: BatchLimits = field(default_factory=BatchLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """The pool at one moment, for metrics.

    Attributes:
        depth: What waits.
        counts: Sums since the start.
        replicas_alive: Replicas that can score.
        costs: What the cost model of each replica that has been warm says.
    """

    depth: QueueDepth
    counts: EngineCounts
    replicas_alive: int
    costs: tuple[ReplicaCost, ...]


class ReplicaPool:
    """Replicas of one model. Its methods are called in one event loop, the one of `start`."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        config: PoolConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not scorers:
            raise ConfigError("a pool needs at least one scorer, got none")
        self._clock = clock
        self._counters = Counters()
        self._max_request_timesteps = config.queue.max_timesteps
        self._queue = RequestQueue(config.queue, clock=clock)
        self._replicas = [
            Replica(
                scorer,
                self._queue,
                config.batch,
                metrics=self._counters,
                clock=clock,
            )
            for scorer in scorers
        ]
        self._unanswered: set[Request] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = asyncio.Event()
        """Set when the last replica has died; the pool never recovers."""

    @property
    def schema(self) -> ModelSchema:
        """What the model takes and gives."""
        return self._replicas[0].scorer.schema

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the replicas run."""
        return tuple(replica.scorer.device for replica in self._replicas)

    @property
    def engine(self) -> str:
        """How they run the model."""
        return self._replicas[0].scorer.engine

    @property
    def max_row_timesteps(self) -> int:
        """The longest row that can be scored: what memory holds, unless rows are cut in time."""
        if self.schema.cuts_in_time:
            return self._max_request_timesteps
        return min(replica.scorer.max_timesteps for replica in self._replicas)

    @property
    def clock(self) -> Callable[[], float]:
        """The clock that deadlines are told on."""
        return self._clock

    async def start(self) -> None:
        """Start the replicas and wait until all are warm.

        Raises:
            Exception: What the first replica that cannot serve raised in its warm-up.
        """
        self._loop = asyncio.get_running_loop()
        ready = [asyncio.wrap_future(replica.start(self)) for replica in self._replicas]
        try:
            await asyncio.gather(*ready)
        except BaseException:
            self._queue.close(_STOPPED, drop=True)
            raise

    async def submit(self, rows: PackedRows, *, deadline_s: float | None = None) -> ScoredRequest:
        """Score rows that were validated against `schema`.

        Args:
            rows: At least one row. Not changed, and not read after the answer.
            deadline_s: When the answer is worthless, on `clock`; None for never.

        Raises:
            OverloadedError: The queue is full or too long for the deadline, or the request is
                larger than the queue.
            DeadlineExceededError: The deadline passed, or would have, before it was scored.
            UnavailableError: The pool is shutting down or its last replica died.
        """
        now_s = self._clock()
        if deadline_s is not None and deadline_s <= now_s:
            self._counters.request_ended("expired", 0.0)
            raise DeadlineExceededError("the deadline had passed when the request came")
        future: asyncio.Future[ScoredRequest] = asyncio.get_running_loop().create_future()
        request = Request(rows, future, submitted_s=now_s, deadline_s=deadline_s)
        try:
            self._queue.put(request)
        except OverloadedError:
            self._counters.request_ended("refused", 0.0)
            raise
        self._unanswered.add(request)
        self._idle.clear()
        try:
            return await future
        except asyncio.CancelledError:
            self._queue.discard(request)
            self._counters.request_ended("cancelled", 0.0)
            raise
        finally:
            self._unanswered.discard(request)
            if not self._unanswered:
                self._idle.set()

    async def drain(self) -> None:
        """Wait until every submitted request is answered."""
        await self._idle.wait()

    async def stop(self, timeout_s: float = 1.0) -> bool:
        """Refuse new requests, fail those that are unanswered, end the replicas.

        Returns:
            Whether every replica's thread ended; one may still be inside its scorer.
        """
        self._queue.close(_STOPPED, drop=True)
        self._resolve([(request, UnavailableError(_STOPPED)) for request in self._unanswered])
        ended = await asyncio.gather(
            *(asyncio.to_thread(replica.join, timeout_s) for replica in self._replicas)
        )
        return all(ended)

    def snapshot(self) -> PoolSnapshot:
        """Queue depth, sums and replicas alive; any thread may ask."""
        return PoolSnapshot(
            depth=self._queue.depth(),
            counts=self._counters.counts(),
            replicas_alive=sum(replica.alive for replica in self._replicas),
            costs=tuple(r.cost for r in self._replicas if r.cost is not None),
        )

    def answered(self, answers: list[Answer]) -> None:
        """A replica finished these requests (called in its thread)."""
        if answers:
            self._call_in_loop(self._resolve, answers)

    def died(self, replica: Replica, parts: Sequence[Part]) -> None:
        """A replica ended with these parts unanswered (called in its thread).

        They go to another replica, once: rows that kill two replicas would kill them all.
        """
        survivors = any(other.alive for other in self._replicas)
        logger.error("replica lost device=%s survivors=%s", replica.scorer.device, survivors)
        lost = {part.request for part in parts if part.request.moved}
        moved = [part for part in parts if not part.request.moved]
        for part in moved:
            part.request.moved = True
        if not survivors:
            lost.update(self._queue.close(_NO_REPLICA, drop=True))
            self._call_in_loop(self.failed.set)
        if not self._queue.put_back(moved):
            lost.update(part.request for part in moved)
        for request in lost:
            self._queue.discard(request)
        self.answered([(request, UnavailableError(_NO_REPLICA)) for request in lost])

    def _resolve(self, answers: list[Answer]) -> None:
        for request, answer in answers:
            if request.future.done():
                continue
            if isinstance(answer, QRNNError):
                late = isinstance(answer, DeadlineExceededError)
                self._counters.request_ended("expired" if late else "failed", 0.0)
                request.future.set_exception(answer)
            else:
                self._counters.request_ended("scored", answer.timing.queue_s)
                request.future.set_result(answer)

    def _call_in_loop(self, function: Callable[..., None], *args: object) -> None:
        # The loop is closed when the process ends with a scorer still at work: nobody waits then.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
