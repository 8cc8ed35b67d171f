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
    ReplicaError,
    UnavailableError,
)
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.metrics import Counters, EngineCounts, QueueDepth
from qrnn_serve.engine.queue import QueueConfig, RequestQueue
from qrnn_serve.engine.replica import Replica
from qrnn_serve.engine.replica_status import ReplicaCost, ReplicaStatus
from qrnn_serve.engine.request import Answer, Part, Request, ScoredRequest
from qrnn_serve.engine.supervision import SupervisionConfig
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScorerLoader, StageFacts

_NO_REPLICA = "no replica is left to score; the server is about to end"
_STOPPED = "the server is shutting down"
_TWO_LOST = (
    "two replicas were lost while they scored this request, so it is not tried again; "
    "the server's log says why"
)
# How often the replicas are looked at, as a share of the time that one may hang.
_WATCHES_A_TIMEOUT = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How much may wait, how much one batch may hold, and what happens when a replica fails."""

    queue: QueueConfig = field(default_factory=QueueConfig)
    batch: BatchLimits = field(default_factory=BatchLimits)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """The pool at one moment, for metrics.

    Attributes:
        depth: What waits.
        counts: Sums since the start.
        replicas_alive: Replicas that can score.
        replicas: How each is.
        costs: What the cost model of each replica that has been warm says.
        stages: Those of each replica; empty for one on one device.
    """

    depth: QueueDepth
    counts: EngineCounts
    replicas_alive: int
    replicas: tuple[ReplicaStatus, ...]
    costs: tuple[ReplicaCost, ...]
    stages: tuple[tuple[StageFacts, ...], ...] = ()


class ReplicaPool:
    """Replicas of one model. Its methods are called in one event loop, the one of `start`."""

    def __init__(
        self,
        loaders: Sequence[ScorerLoader],
        config: PoolConfig,
        *,
        on_serving: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a pool; `start` loads the model.

        Args:
            loaders: One a replica.
            config: The settings.
            on_serving: Told, in the loop of `start`, when the first replica serves and when no
                replica does.
            clock: Seconds, for deadlines and time limits.
        """
        if not loaders:
            raise ConfigError("a pool needs at least one replica, got none")
        self._clock = clock
        self._counters = Counters()
        self._max_request_timesteps = config.queue.max_timesteps
        self._queue = RequestQueue(config.queue, clock=clock)
        self._hang_timeout_s = config.supervision.hang_timeout_s
        self._replicas = [
            Replica(
                load,
                self._queue,
                config.batch,
                supervision=config.supervision,
                metrics=self._counters,
                clock=clock,
            )
            for load in loaders
        ]
        self._on_serving = on_serving
        self._serving = False
        self._watch: asyncio.Task[None] | None = None
        self._unanswered: set[Request] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = asyncio.Event()
        """Set when the last replica was given up; the pool never recovers."""

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
            Exception: Why the first replica that cannot serve does not.
            ConfigError: The replicas have loaded different models.
        """
        self._loop = asyncio.get_running_loop()
        ready = [
            asyncio.wrap_future(replica.start(self, f"replica-{number}"))
            for number, replica in enumerate(self._replicas)
        ]
        self._watch = asyncio.create_task(self._watch_replicas())
        try:
            await asyncio.gather(*ready)
            if any(replica.scorer.schema != self.schema for replica in self._replicas):
                raise ConfigError("the replicas loaded different models: did the file change?")
        except BaseException:
            self._close(_STOPPED)
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
            Whether no replica was busy; a process that was is killed, a thread stays inside its
            scorer.
        """
        self._close(_STOPPED)
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
            replicas=tuple(replica.status for replica in self._replicas),
            costs=tuple(r.cost for r in self._replicas if r.cost is not None),
            stages=tuple(r.scorer.stages if r.cost is not None else () for r in self._replicas),
        )

    def answered(self, answers: list[Answer]) -> None:
        """A replica finished these requests (called in its thread)."""
        if answers:
            self._call_in_loop(self._resolve, answers)

    def died(self, tried: Sequence[Part], untried: Sequence[Part]) -> None:
        """A scorer died on the parts `tried`, before it came to `untried` (called in any thread).

        They go to the next replica, once: rows that kill two replicas would kill them all.
        """
        lost = {part.request for part in tried if part.request.moved}
        error: QRNNError = ReplicaError(_TWO_LOST)
        kept = [part for part in (*tried, *untried) if part.request not in lost]
        for part in tried:
            part.request.moved = True
        retried = {part.request for part in tried} - lost
        if self._queue.put_back(kept):
            self._counters.requests_retried(len(retried))
        else:
            error = UnavailableError(_STOPPED)
            lost.update(part.request for part in kept)
        for request in lost:
            self._queue.discard(request)
        self.answered([(request, error) for request in lost])

    def state_changed(self) -> None:
        """A replica began or ceased to serve, or was given up (called in any thread)."""
        self._call_in_loop(self._follow_replicas)

    def _follow_replicas(self) -> None:
        alive = sum(replica.alive for replica in self._replicas)
        if (alive > 0) != self._serving:
            self._serving = alive > 0
            self._on_serving(self._serving)
        if all(replica.ended for replica in self._replicas):
            lost = self._queue.close(_NO_REPLICA, drop=True)
            self._resolve([(request, UnavailableError(_NO_REPLICA)) for request in lost])
            self.failed.set()

    async def _watch_replicas(self) -> None:
        # No more than a second, so that batches with a long time limit do not wait for it.
        interval_s = min(self._hang_timeout_s / _WATCHES_A_TIMEOUT, 1.0)
        while True:
            await asyncio.sleep(interval_s)
            for replica in self._replicas:
                replica.watch(self)

    def _close(self, because: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for replica in self._replicas:
            replica.stop()
        self._queue.close(because, drop=True)

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
