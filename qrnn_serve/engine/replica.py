"""One place where a model runs, and the one thread that uses it: pull a batch, score it, answer.

The thread sleeps in the queue while there is no work, so an idle replica starts a batch the moment
a request comes. When its scorer dies it loads another, after a wait that grows with each failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from qrnn_serve.core.errors import ArtefactError, ReplicaError
from qrnn_serve.engine.batch import Batch, BatchLimits, Puller, launch_of, launches_of
from qrnn_serve.engine.cost_model import CostModel, Launch
from qrnn_serve.engine.metrics import EngineMetrics
from qrnn_serve.engine.queue import RequestQueue
from qrnn_serve.engine.replica_status import ReplicaCost, ReplicaState, ReplicaStatus
from qrnn_serve.engine.request import Answer, BatchFacts, Part, answers_of, expired_answer
from qrnn_serve.engine.runner import BatchRunner
from qrnn_serve.engine.supervision import Restarts, SupervisionConfig
from qrnn_serve.engine.types import Scorer, ScorerDeadError, ScorerLoader
from qrnn_serve.engine.warm_up import example_rows, warm_up

logger = logging.getLogger(__name__)


class ReplicaOwner(Protocol):
    """Who is told what a replica did. Called in any thread."""

    def answered(self, answers: list[Answer]) -> None:
        """These requests are done. One call a batch."""
        ...

    def died(self, tried: Sequence[Part], untried: Sequence[Part]) -> None:
        """A scorer died on the parts `tried`; both they and `untried` are without an answer."""
        ...

    def state_changed(self) -> None:
        """A replica began or ceased to serve, or will never serve again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What the scorer is busy with, what comes after it, and when it counts as hung."""

    tried: Sequence[Part]
    untried: Sequence[Part]
    due_s: float


class _AbandonedError(Exception):
    """The batch took so long that another thread has answered for it."""


class Replica:
    """Its thread begins with `start` and ends with the queue, or when the replica is given up.

    Attributes:
        alive: Whether it serves now.
        ended: Whether it will never serve again.
    """

    def __init__(
        self,
        load: ScorerLoader,
        queue: RequestQueue,
        limits: BatchLimits,
        *,
        supervision: SupervisionConfig,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.alive = False
        self.ended = False
        self._restarted = 0
        self._last_error = ""
        self._load = load
        self._scorer: Scorer | None = None
        self._queue = queue
        self._limits = limits
        self._puller: Puller | None = None
        self._graphs = 0
        self._supervision = supervision
        self._restarts = Restarts(supervision, clock=clock)
        self._metrics = metrics
        self._clock = clock
        self._ready: Future[None] = Future()
        self._stopping = threading.Event()
        # Between this replica's thread and one that finds it hung: whoever takes the work away
        # answers for its parts.
        self._lock = threading.Lock()
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None

    @property
    def scorer(self) -> Scorer:
        """The scorer that serves, or served last."""
        if self._scorer is None:
            raise RuntimeError("the replica has not started. This is a bug.")
        return self._scorer

    @property
    def cost(self) -> ReplicaCost | None:
        """What its cost model says now, or said last; None before it was warm."""
        puller = self._puller
        if puller is None:
            return None
        return ReplicaCost(
            device=puller.device,
            terms=puller.cost.terms,
            budget_s=puller.budget_s,
            budget_timesteps=puller.budget_timesteps,
            graphs=self._graphs,
        )

    @property
    def status(self) -> ReplicaStatus:
        """How it is now; any thread may ask."""
        state = ReplicaState.SERVING if self.alive else ReplicaState.STARTING
        return ReplicaStatus(
            device="" if self._scorer is None else self._scorer.device,
            state=ReplicaState.GIVEN_UP if self.ended else state,
            restarts=self._restarted,
            last_error=self._last_error,
        )

    def start(self, owner: ReplicaOwner, name: str) -> Future[None]:
        """Start the thread; the future resolves once the scorer is warm, or says why it is not."""
        # Daemon: a scorer that hangs must not keep the process from exiting after its grace period.
        self._thread = threading.Thread(target=self._run, args=(owner,), name=name, daemon=True)
        self._thread.start()
        return self._ready

    def stop(self) -> None:
        """Start no scorer any more. The thread ends once the queue is closed and empty."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; a scorer that is still busy then is interrupted.

        Returns:
            Whether no scorer was busy.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        with self._lock:
            if self._work is None:
                return True
            self.scorer.interrupt()
            # At its warm-up it holds nobody's rows.
            return not self._work.tried

    def watch(self, owner: ReplicaOwner) -> None:
        """Find out whether the scorer hangs or died; called again and again by another thread.

        A scorer that is at its batch for too long is killed; where it is a thread, the replica is
        given up with its thread, and others go on with its rows.
        """
        work = self._take_hung_work()
        if work is not None:
            self._abandon(work, owner)
        elif self.alive and not self.scorer.alive:
            self._queue.wake()

    def _take_hung_work(self) -> _Work | None:
        """Kill a scorer that hangs; what it is busy with where it cannot be killed."""
        with self._lock:
            work = self._work
            if work is None or self._clock() < work.due_s:
                return None
            if self.scorer.interrupt():
                logger.error("replica hangs and was killed device=%s", self.scorer.device)
                # Its thread hears of it and keeps the work.
                self._work = replace(work, due_s=math.inf)
                return None
            self._work = None
            self.alive, self.ended = False, True
            return work

    def _abandon(self, work: _Work, owner: ReplicaOwner) -> None:
        message = f"the model on {self.scorer.device} hangs in a thread, which cannot be killed"
        self._last_error = message
        logger.error("replica abandoned: %s; --replica-processes always makes it one", message)
        if not self._ready.done():
            self._ready.set_exception(ReplicaError(message))
        owner.died(work.tried, work.untried)
        owner.state_changed()

    def _run(self, owner: ReplicaOwner) -> None:
        while True:
            try:
                self._load_and_serve(owner)
            except Exception as error:  # the last guard of the thread: a broken model is restarted
                if self.ended:
                    return
                self._last_error = f"{type(error).__name__}: {error}"
                if not self._ready.done():
                    self.ended = True
                    self._ready.set_exception(error)
                    return
                logger.exception("replica lost")
            else:
                return
            wait_s = self._restarts.wait_s()
            if wait_s is None:
                starts = self._supervision.max_failed_starts
                logger.error("replica given up failed_starts=%d", starts)
                self.ended = True
                owner.state_changed()
                return
            logger.info("replica starts again wait_s=%g", wait_s)
            if self._stopping.wait(wait_s):
                return
            self._restarted += 1
            self._metrics.replica_restarted()

    def _load_and_serve(self, owner: ReplicaOwner) -> None:
        """Load a scorer and score with it until the queue is closed.

        Raises:
            Exception: What it died of, or why it could not be loaded.
        """
        scorer = self._load()
        try:
            puller = self._warm_up(scorer)
            self._restarts.serving()
            with self._counted_on(puller, owner):
                if not self._ready.done():
                    self._ready.set_result(None)
                runner = BatchRunner(scorer, example_rows(scorer.schema, [1], with_state=False))
                while batch := self._queue.take(puller, lambda: scorer.alive):
                    self._score_batch(batch, runner, puller, owner)
            if not scorer.alive:
                raise ScorerDeadError(f"the scorer on {scorer.device} ended without a batch")
        finally:
            _close(scorer)

    @contextlib.contextmanager
    def _counted_on(self, puller: Puller, owner: ReplicaOwner) -> Generator[None, None, None]:
        """While it serves, the queue and the owner count on the replica."""
        self._queue.add_puller(puller)
        self.alive = True
        owner.state_changed()
        try:
            yield
        finally:
            self.alive = False
            self._queue.remove_puller(puller)
            owner.state_changed()

    def _warm_up(self, scorer: Scorer) -> Puller:
        """Warm a new scorer and fit its cost model."""
        if self._scorer is not None and scorer.schema != self._scorer.schema:
            raise ArtefactError(
                "the model's file was replaced by that of another model while it was served: "
                f"expected {self._scorer.schema}, got {scorer.schema}"
            )
        self._scorer = scorer
        most = min(self._limits.max_timesteps, scorer.max_timesteps)
        limits = replace(self._limits, max_timesteps=most)
        self._begin((), (), self._supervision.start_timeout_s)
        try:
            report = warm_up(scorer, limits)
        finally:
            self._finish()
        if report.out_of_memory:
            limits = self._lowered(limits, report.timesteps)
        self._puller = puller = Puller(
            device=scorer.device,
            limits=limits,
            cost=CostModel.fit(report.launches),
            cuts_in_time=scorer.schema.cuts_in_time,
        )
        logger.info(
            "warm device=%s batch_timesteps=%d batch_s=%.3g cost_s='%s'",
            puller.device,
            puller.budget_timesteps,
            puller.budget_s,
            puller.cost.terms,
        )
        return puller

    def _score_batch(
        self, batch: Batch, runner: BatchRunner, puller: Puller, owner: ReplicaOwner
    ) -> None:
        if batch.expired:
            owner.answered([expired_answer(request) for request in batch.expired])
        begun_s = batch.taken_s
        launches = launches_of(batch.parts)
        while launches:
            tried = launches.pop(0)
            untried = [part for launch in launches for part in launch]
            try:
                launch = self._score(tried, untried, runner, puller, owner)
            except _AbandonedError:
                raise
            except Exception:  # whatever it is, nothing may leave callers waiting
                owner.died(tried, untried)
                raise
            ended_s = self._clock()
            if not runner.failed:
                # With what the queue and the answers took: that too is time until the next batch.
                puller.cost.record(replace(launch, seconds=ended_s - begun_s))
            begun_s = ended_s

    def _score(
        self,
        parts: Sequence[Part],
        untried: Sequence[Part],
        runner: BatchRunner,
        puller: Puller,
        owner: ReplicaOwner,
    ) -> Launch:
        launch = launch_of(parts, puller.cost)
        self._begin(parts, untried, self._supervision.batch_timeout_s(launch.seconds))
        started_s = self._clock()
        try:
            outcomes = runner.run(parts)
        finally:
            self._finish()
        facts = BatchFacts(
            started_s=started_s,
            seconds=self._clock() - started_s,
            times=runner.times,
            predicted_s=launch.seconds,
            rows=launch.rows,
            timesteps=launch.timesteps,
            padded_timesteps=runner.padded_timesteps,
            graph_replays=runner.replayed,
            device=self.scorer.device,
            engine=self.scorer.engine,
        )
        self._graphs = runner.graphs
        self._metrics.batch_scored(facts)
        answers = answers_of(outcomes, facts)
        # Only now: the last piece of a row, on another replica, may complete the request.
        for outcome in outcomes:
            if not outcome.part.ends_row:
                self._queue.resume(outcome)
        owner.answered(answers)
        if runner.out_of_memory:
            # Half of the size that did not fit.
            most = min(facts.timesteps, puller.limits.max_timesteps) // 2
            puller.limits = self._lowered(puller.limits, max(most, 1))
        return launch

    def _begin(self, tried: Sequence[Part], untried: Sequence[Part], timeout_s: float) -> None:
        due_s = self._clock() + timeout_s
        with self._lock:
            self._work = _Work(tried=tried, untried=untried, due_s=due_s)

    def _finish(self) -> None:
        """The scorer is no longer busy.

        Raises:
            _AbandonedError: Another thread has answered for what it was busy with.
        """
        with self._lock:
            if self._work is None:
                raise _AbandonedError
            self._work = None

    def _lowered(self, limits: BatchLimits, most: int) -> BatchLimits:
        logger.warning("batch limit lowered device=%s max_timesteps=%d", self.scorer.device, most)
        return replace(limits, max_timesteps=most)


def _close(scorer: Scorer) -> None:
    try:
        scorer.close()
    except Exception:  # a device that has failed fails at this too, and is done with all the same
        logger.exception("closing failed device=%s", scorer.device)
