"""One scorer and the one thread that uses it: pull a batch, score it, answer, pull the next.

The thread sleeps in the queue while there is no work, so an idle replica starts a batch the moment
a request comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from qrnn_serve.core.errors import DeadlineExceededError, QRNNError
from qrnn_serve.engine.drain import DrainRate
from qrnn_serve.engine.metrics import EngineMetrics
from qrnn_serve.engine.queue import Batch, BatchLimits, RequestQueue
from qrnn_serve.engine.request import BatchFacts, Outcome, Part, Request, ScoredRequest
from qrnn_serve.engine.runner import BatchRunner
from qrnn_serve.engine.types import Scorer
from qrnn_serve.engine.warm_up import example_rows, warm_up

Answer = tuple[Request, ScoredRequest | QRNNError]

logger = logging.getLogger(__name__)


class ReplicaOwner(Protocol):
    """Who is told what a replica did. Called in the replica's thread."""

    def answered(self, answers: list[Answer]) -> None:
        """These requests are done. One call a batch."""
        ...

    def died(self, replica: Replica, parts: Sequence[Part]) -> None:
        """The replica ends; these parts were taken and not answered."""
        ...


class Replica:
    """A scorer at work. Its thread begins with `start` and ends with the queue or the scorer."""

    def __init__(
        self,
        scorer: Scorer,
        queue: RequestQueue,
        limits: BatchLimits,
        *,
        metrics: EngineMetrics,
        drain_rate: DrainRate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scorer = scorer
        self.alive = True
        self._queue = queue
        most = min(limits.max_timesteps, scorer.max_timesteps)
        self._limits = replace(limits, max_timesteps=most)
        self._metrics = metrics
        self._drain_rate = drain_rate
        self._clock = clock
        self._ready: Future[None] = Future()
        self._thread: threading.Thread | None = None

    def start(self, owner: ReplicaOwner) -> Future[None]:
        """Start the thread; the future resolves once the scorer is warm, or says why it is not."""
        name = f"replica-{self.scorer.device}"
        # Daemon: a scorer that hangs must not keep the process from exiting after its grace period.
        self._thread = threading.Thread(target=self._run, args=(owner,), name=name, daemon=True)
        self._thread.start()
        return self._ready

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; whether it did."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, owner: ReplicaOwner) -> None:
        if not self._warm_up():
            return
        probe = example_rows(self.scorer.schema, [1], with_state=False)
        runner = BatchRunner(self.scorer, probe)
        while (batch := self._queue.take(self._limits)) is not None:
            if batch.expired:
                owner.answered([_expired_answer(request) for request in batch.expired])
            if not batch.parts:
                continue
            try:
                owner.answered(self._score(batch, runner))
            except Exception:  # the last guard of the thread: nothing may leave callers waiting
                logger.exception("replica ends device=%s", self.scorer.device)
                self.alive = False
                owner.died(self, batch.parts)
                break
        self.scorer.close()

    def _warm_up(self) -> bool:
        try:
            report = warm_up(self.scorer, self._limits.max_timesteps)
        except Exception as error:  # whatever a model raises is told to whoever started the replica
            self.alive = False
            self._ready.set_exception(error)
            return False
        if report.out_of_memory:
            self._limit_batches(report.timesteps)
        self._drain_rate.record(report.timesteps, report.seconds)
        self._ready.set_result(None)
        return True

    def _score(self, batch: Batch, runner: BatchRunner) -> list[Answer]:
        started_s = self._clock()
        outcomes = runner.run(batch.parts)
        timesteps = sum(part.timesteps for part in batch.parts)
        facts = BatchFacts(
            started_s=started_s,
            compute_s=self._clock() - started_s,
            rows=sum(part.rows for part in batch.parts),
            timesteps=timesteps,
            padded_timesteps=runner.padded_timesteps,
            device=self.scorer.device,
            engine=self.scorer.engine,
        )
        self._metrics.batch_scored(facts)
        self._drain_rate.record(timesteps, facts.compute_s)
        if runner.out_of_memory:
            # Half of the size that did not fit.
            self._limit_batches(max(min(timesteps, self._limits.max_timesteps) // 2, 1))
        return _answers(outcomes, facts)

    def _limit_batches(self, most: int) -> None:
        self._limits = replace(self._limits, max_timesteps=most)
        logger.warning("batch limit lowered device=%s max_timesteps=%d", self.scorer.device, most)


def _answers(outcomes: list[Outcome], facts: BatchFacts) -> list[Answer]:
    """The requests that this batch completed, with their joined answers."""
    by_request: dict[Request, list[Outcome]] = {}
    for outcome in outcomes:
        by_request.setdefault(outcome.part.request, []).append(outcome)
    answers: list[Answer] = []
    for request, parts in by_request.items():
        answer = request.add(parts, facts)
        if answer is not None:
            answers.append((request, answer))
    return answers


def _expired_answer(request: Request) -> Answer:
    return request, DeadlineExceededError("the deadline passed while the request was in the queue")
