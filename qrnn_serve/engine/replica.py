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
from dataclasses import dataclass, replace
from typing import Protocol

from qrnn_serve.core.errors import DeadlineExceededError, QRNNError
from qrnn_serve.engine.batch import Batch, BatchLimits, Puller
from qrnn_serve.engine.cost_model import CostModel, CostTerms
from qrnn_serve.engine.metrics import EngineMetrics
from qrnn_serve.engine.queue import RequestQueue
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCost:
    """What a replica's cost model says now.

    Attributes:
        device: Where the replica runs.
        terms: Of the predicted seconds of a batch.
        budget_s: Seconds that a batch should take.
        budget_timesteps: Timesteps of such a batch, of rows of 64 timesteps.
    """

    device: str
    terms: CostTerms
    budget_s: float
    budget_timesteps: int


class Replica:
    """A scorer at work. Its thread begins with `start` and ends with the queue or the scorer."""

    def __init__(
        self,
        scorer: Scorer,
        queue: RequestQueue,
        limits: BatchLimits,
        *,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scorer = scorer
        self.alive = True
        self._queue = queue
        most = min(limits.max_timesteps, scorer.max_timesteps)
        self._limits = replace(limits, max_timesteps=most)
        self._puller: Puller | None = None
        self._metrics = metrics
        self._clock = clock
        self._ready: Future[None] = Future()
        self._thread: threading.Thread | None = None

    @property
    def cost(self) -> ReplicaCost | None:
        """What its cost model says now; None before it is warm."""
        puller = self._puller
        if puller is None:
            return None
        return ReplicaCost(
            device=puller.device,
            terms=puller.cost.terms,
            budget_s=puller.budget_s,
            budget_timesteps=puller.budget_timesteps,
        )

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
        puller = self._warm_up()
        if puller is None:
            return
        probe = example_rows(self.scorer.schema, [1], with_state=False)
        runner = BatchRunner(self.scorer, probe)
        while (batch := self._queue.take(puller)) is not None:
            if batch.expired:
                owner.answered([_expired_answer(request) for request in batch.expired])
            if not batch.parts:
                continue
            try:
                self._score(batch, runner, puller, owner)
            except Exception:  # the last guard of the thread: nothing may leave callers waiting
                logger.exception("replica ends device=%s", self.scorer.device)
                self.alive = False
                self._queue.remove_puller(puller)
                owner.died(self, batch.parts)
                break
        self.scorer.close()

    def _warm_up(self) -> Puller | None:
        """Warm the scorer, fit its cost model and join the queue; None when it cannot serve."""
        limits = self._limits
        try:
            report = warm_up(self.scorer, limits)
        except Exception as error:  # whatever a model raises is told to whoever started the replica
            self.alive = False
            self._ready.set_exception(error)
            return None
        if report.out_of_memory:
            limits = self._lowered(limits, report.timesteps)
        puller = Puller(
            device=self.scorer.device,
            limits=limits,
            cost=CostModel.fit(report.launches),
            cuts_in_time=self.scorer.schema.cuts_in_time,
        )
        logger.info(
            "warm device=%s batch_timesteps=%d batch_s=%.3g cost_s='%s'",
            puller.device,
            puller.budget_timesteps,
            puller.budget_s,
            puller.cost.terms,
        )
        self._puller = puller
        self._queue.add_puller(puller)
        self._ready.set_result(None)
        return puller

    def _score(
        self, batch: Batch, runner: BatchRunner, puller: Puller, owner: ReplicaOwner
    ) -> None:
        started_s = self._clock()
        outcomes = runner.run(batch.parts)
        facts = BatchFacts(
            started_s=started_s,
            compute_s=self._clock() - started_s,
            predicted_s=batch.launch.seconds,
            rows=batch.launch.rows,
            timesteps=batch.launch.timesteps,
            padded_timesteps=runner.padded_timesteps,
            device=self.scorer.device,
            engine=self.scorer.engine,
        )
        self._metrics.batch_scored(facts)
        answers = _answers(outcomes, facts)
        # Only now: the last piece of a row, on another replica, may complete the request.
        for outcome in outcomes:
            if not outcome.part.ends_row:
                self._queue.resume(outcome)
        owner.answered(answers)
        if not runner.failed:
            puller.cost.record(replace(batch.launch, seconds=facts.compute_s))
        if runner.out_of_memory:
            # Half of the size that did not fit.
            most = min(facts.timesteps, puller.limits.max_timesteps) // 2
            puller.limits = self._lowered(puller.limits, max(most, 1))

    def _lowered(self, limits: BatchLimits, most: int) -> BatchLimits:
        logger.warning("batch limit lowered device=%s max_timesteps=%d", self.scorer.device, most)
        return replace(limits, max_timesteps=most)


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
    return request, DeadlineExceededError(
        "the deadline passed while the request was in the queue, or would have before its scores"
    )
