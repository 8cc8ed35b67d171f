"""The one queue between the callers and the replicas: bounded, pulled from, ordered by due time.

It is counted in timesteps and bytes, because a row may hold one timestep or a million. Callers are
refused at once when it is full. A replica that is free pulls a batch; nothing polls, and no timer
runs unless a short wait is asked for. The queue owns the order and the counts, under one lock.

The rule:

1. **Due time.** Each part of a request is due at its arrival plus 4 times the seconds of work that
   are predicted for the request up to and with that part, in steps of one batch; or, if that is
   earlier, when it must start to make the caller's deadline. What is due first goes first. So a
   short request passes a long one that came before it, a long one is worked off between others, at
   a quarter of a replica's time or more, and rows of one request keep their order.
2. **Ageing.** A due time never changes and is never before the arrival. So a part waits for nothing
   that came after its due time: at most for what the bounded queue held then.
3. **Late requests.** One that would be late even if it ran next, or whose deadline has passed, is
   dropped before it costs anything. One that cannot make its deadline behind what is due before it,
   in a batch that others fill, is refused when it comes, with the time after which it could: were
   the queue fuller, near deadlines would cut every batch short. Predictions only decide between
   requests: one that waits alone is scored, which also corrects a wrong prediction.
4. **Batches.** A replica takes parts in that order until the batch takes its target time or is
   full; the last request is cut by rows to fit. Idle replicas of other devices get an equal share
   of the timesteps, if the cost model says that this saves more than it costs.
5. **Long rows.** A row longer than a batch goes in pieces of the largest batch, if the model allows
   it. The next piece waits, counted but out of line, for the state that the one before leaves.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qrnn_serve.core.errors import ConfigError, OverloadedError, QRNNError, UnavailableError
from qrnn_serve.engine.batch import Batch, BatchBuilder, Puller
from qrnn_serve.engine.metrics import QueueDepth
from qrnn_serve.engine.request import Outcome, Part, Request

STRETCH = 4.0
"""Seconds after its arrival by which a second of a request's work is due."""

# Sharing a batch over one replica more must save at least this much of its time.
_LEAST_GAIN_S = 0.0005
_LEAST_GAIN = 0.1
_UNKNOWN_RETRY_S = 1.0
_MIN_RETRY_S = 0.01
_MAX_RETRY_S = 60.0

Place = tuple[float, int, int, int, Part]
"""Due time, number of the request, first row, first timestep, part: sorts in the order of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How much may wait.

    Attributes:
        max_timesteps: Most timesteps in the queue, and so in one request.
        max_bytes: Most bytes of features, ids and states in the queue.
    """

    max_timesteps: int = 1 << 20
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("max_timesteps", "max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"queue {name}: expected at least 1, got {getattr(self, name)}")


class RequestQueue:
    """Requests waiting for a replica. Any thread may call any method."""

    def __init__(self, config: QueueConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._changed = threading.Condition()
        self._pullers: list[Puller] = []
        self._line: list[Place] = []
        # Every part that waits; None as its place while it waits for the piece before it.
        self._places: dict[Request, dict[Part, Place | None]] = {}
        self._timesteps = self._rows = self._nbytes = 0
        self._numbered = 0
        self._closed_because: str | None = None

    def add_puller(self, puller: Puller) -> None:
        """Count on a replica from now on."""
        with self._changed:
            self._pullers.append(puller)

    def remove_puller(self, puller: Puller) -> None:
        """Count no longer on a replica."""
        with self._changed:
            self._pullers.remove(puller)

    def put(self, request: Request) -> None:
        """Add a request.

        Raises:
            OverloadedError: The queue has no room now, or what waits would make the request late;
                or, with an infinite time to wait, it is larger than the queue and never will fit.
            UnavailableError: The queue is closed.
        """
        part, config = request.whole(), self._config
        if part.timesteps > config.max_timesteps or part.nbytes > config.max_bytes:
            raise OverloadedError(
                f"the request has {part.timesteps} timesteps in {part.nbytes} bytes; this server "
                f"takes at most {config.max_timesteps} timesteps and {config.max_bytes} bytes a "
                "request; send fewer rows a call",
                retry_after_s=math.inf,
            )
        with self._changed:
            if self._closed_because is not None:
                raise UnavailableError(self._closed_because)
            self._check_room(part)
            self._numbered += 1
            request.number = self._numbered
            request.work_s = self._drain_s(part.timesteps, part.rows) * len(self._pullers)
            request.slice_s = max((puller.budget_s for puller in self._pullers), default=0.0)
            self._check_wait(part)
            self._insert(part)
            self._changed.notify()

    def put_back(self, parts: Sequence[Part]) -> bool:
        """Give parts taken by a replica that died to the next one, at their old place.

        They count again, even past the limits: they were admitted once.

        Returns:
            False when the queue is closed and they were not taken.
        """
        with self._changed:
            if self._closed_because is not None:
                return False
            for part in parts:
                self._insert(part)
            self._changed.notify_all()
            return True

    def take(self, puller: Puller, may_take: Callable[[], bool] = lambda: True) -> Batch | None:
        """Wait for work and return the next batch.

        Returns:
            None once the queue is closed and empty, or when `may_take` says no; it is asked before
            each batch and after each `wake`.
        """
        with self._changed:
            puller.busy_until_s = None
            while may_take():
                wait_s = self._wait_for_more_s(puller)
                if self._line and wait_s <= 0:
                    return self._form_batch(puller)
                if not self._line and self._closed_because is not None:
                    return None
                self._changed.wait(wait_s if self._line else None)
            # The wake-up for what was put last may have come to this replica.
            self._changed.notify()
            return None

    def wake(self) -> None:
        """Have the replicas that wait ask again whether they may take a batch."""
        with self._changed:
            self._changed.notify_all()

    def resume(self, outcome: Outcome) -> None:
        """Go on with a row after a piece of it: score the next from its state, or drop the rest."""
        piece, result = outcome.part, outcome.result
        with self._changed:
            for part, place in list(self._places.get(piece.request, {}).items()):
                if place is not None or part.first != piece.first:
                    continue
                if isinstance(result, QRNNError):
                    self._remove(part)
                elif part.begin == piece.end:
                    self._remove(part)
                    self._insert(replace(part, state=result.state))
                    self._changed.notify()

    def discard(self, request: Request) -> None:
        """Forget the rows of a request that nobody waits for any more."""
        with self._changed:
            self._drop(request)

    def close(self, because: str, *, drop: bool) -> tuple[Request, ...]:
        """Refuse new requests; replicas get None when nothing is left.

        Args:
            because: What callers that come later are told.
            drop: Also forget what waits.

        Returns:
            The requests that were forgotten.
        """
        with self._changed:
            self._closed_because = because
            dropped = tuple(self._places) if drop else ()
            for request in dropped:
                self._drop(request)
            self._changed.notify_all()
            return dropped

    def depth(self) -> QueueDepth:
        """What waits now."""
        with self._changed:
            submitted = [request.submitted_s for request in self._places]
            return QueueDepth(
                requests=len(submitted),
                timesteps=self._timesteps,
                nbytes=self._nbytes,
                oldest_s=self._clock() - min(submitted) if submitted else 0.0,
            )

    def _check_room(self, part: Part) -> None:
        config = self._config
        excess = max(
            self._timesteps + part.timesteps - config.max_timesteps,
            # In timesteps of this request, so that the time to drain them can be told.
            (self._nbytes + part.nbytes - config.max_bytes) * part.timesteps // part.nbytes,
        )
        if excess > 0:
            rows = excess * self._rows / max(self._timesteps, 1)
            raise OverloadedError(
                f"{self._timesteps} timesteps ({self._nbytes} bytes) are waiting, of at most "
                f"{config.max_timesteps} ({config.max_bytes} bytes); try again later",
                retry_after_s=_retry_after_s(self._drain_s(excess, rows)),
            )

    def _check_wait(self, part: Part) -> None:
        """Refuse a request that cannot make its deadline behind what is due before it."""
        request, now_s = part.request, self._clock()
        if request.deadline_s is None or not self._line:
            return
        left_s = request.deadline_s - now_s
        # Its scores come with those of the batch that it joins, which others will fill.
        batch_s = max((puller.budget_s for puller in self._pullers), default=0.0)
        own_s = max(self._fastest_s(part), min(batch_s, left_s / 2)) + self._busy_s(now_s)
        if own_s + self._drain_s(self._timesteps, self._rows, urgent=True) <= left_s:
            return
        due_s = self._due_s(part)
        timesteps = rows = 0.0
        for place in self._line[: bisect.bisect_left(self._line, (due_s,))]:
            ahead = place[-1]
            share = _share_due_before(ahead, due_s)
            timesteps += share * (ahead.stop - ahead.start)
            rows += share * (ahead.last - ahead.first)
        needed_s = own_s + self._drain_s(timesteps, rows, urgent=True)
        if needed_s > left_s:
            raise OverloadedError(
                f"{timesteps:.0f} timesteps would be scored first: the request would be done in "
                f"about {needed_s:.3g} s, its deadline is in {left_s:.3g} s; try again later",
                retry_after_s=_retry_after_s(needed_s - left_s),
            )

    def _form_batch(self, puller: Puller) -> Batch:
        now_s = self._clock()
        idle = len({p.device for p in self._pullers if p.busy_until_s is None} | {puller.device})
        builder = BatchBuilder(puller, self._share(puller, idle))
        expired: list[Request] = []
        while self._line:
            part = self._line[0][-1]
            if self._is_late(part, now_s, alone=not builder.parts and len(self._places) == 1):
                self._drop(part.request)
                expired.append(part.request)
                continue
            deadline_s = part.request.deadline_s
            left_s = math.inf if deadline_s is None else deadline_s - now_s
            taken = builder.fit(part, left_s)
            if taken is None:
                break
            builder.add(taken, left_s)
            self._take_from(part, taken)
            if taken is not part:
                break
        launch = builder.launch
        if builder.parts:
            puller.busy_until_s = now_s + launch.seconds
        if self._line:
            # What is left may be the rest of one request, whose arrival woke only this replica.
            self._changed.notify(idle)
        return Batch(
            parts=tuple(builder.parts), expired=tuple(expired), launch=launch, taken_s=now_s
        )

    def _share(self, puller: Puller, idle: int) -> float:
        """Timesteps for each of the idle devices that it pays to use; infinite for one alone."""
        if idle == 1 or self._drain_s(self._timesteps, self._rows) >= puller.budget_s:
            return math.inf
        longest = self._line[0][-1].request.longest
        cost, used = puller.cost, 1
        seconds = cost.seconds(self._timesteps, longest, self._rows)
        while used < idle:
            more = used + 1
            shared = cost.seconds(self._timesteps / more, longest, self._rows / more)
            if seconds - shared < max(_LEAST_GAIN_S, _LEAST_GAIN * seconds):
                break
            used, seconds = more, shared
        return self._timesteps / used if used > 1 else math.inf

    def _is_late(self, part: Part, now_s: float, *, alone: bool) -> bool:
        deadline_s = part.request.deadline_s
        if deadline_s is None:
            return False
        return deadline_s <= now_s or (not alone and now_s + self._fastest_s(part) > deadline_s)

    def _wait_for_more_s(self, puller: Puller) -> float:
        """How much longer a replica should wait for rows to join those that wait."""
        wait_s = puller.limits.wait_s
        if wait_s == 0 or not self._line or self._closed_because is not None:
            return 0.0
        if self._drain_s(self._timesteps, self._rows) >= puller.budget_s:
            return 0.0
        return self._line[0][-1].request.submitted_s + wait_s - self._clock()

    def _due_s(self, part: Part) -> float:
        request = part.request
        total = int(request.offsets[-1])
        before_s = request.work_s * part.start / total
        due_s = request.submitted_s + STRETCH * min(request.work_s, before_s + request.slice_s)
        if request.deadline_s is None:
            return due_s
        start_s = request.deadline_s - (request.work_s - before_s)
        return max(min(due_s, start_s), request.submitted_s)

    def _drain_s(self, timesteps: float, rows: float, *, urgent: bool = False) -> float:
        """Seconds that all replicas together need for that much work."""
        if not self._pullers or timesteps == 0:
            return 0.0
        seconds = [puller.work_s(timesteps, rows, urgent=urgent) for puller in self._pullers]
        return 1 / sum(1 / max(each, 1e-9) for each in seconds)

    def _fastest_s(self, part: Part) -> float:
        """Seconds that a part takes if it runs next and every replica helps."""
        fixed_s = min((puller.cost.terms.fixed for puller in self._pullers), default=0.0)
        return fixed_s + self._drain_s(part.timesteps, part.rows)

    def _busy_s(self, now_s: float) -> float:
        """Seconds until the batches that run now are done, on average."""
        ends = [p.busy_until_s for p in self._pullers if p.busy_until_s is not None]
        return sum(max(end - now_s, 0.0) for end in ends) / max(len(self._pullers), 1)

    def _take_from(self, part: Part, taken: Part) -> None:
        """Remove what was taken of a part; what is left of it waits on."""
        self._remove(part)
        if taken.last < part.last:
            self._insert(replace(part, first=taken.last))
        if taken.end != part.end:
            self._insert(replace(part, last=taken.last, begin=taken.end or 0), held=True)

    def _insert(self, part: Part, *, held: bool = False) -> None:
        place = None
        if not held:
            place = (self._due_s(part), part.request.number, part.first, part.begin, part)
            bisect.insort(self._line, place)
        self._places.setdefault(part.request, {})[part] = place
        self._timesteps += part.timesteps
        self._rows += part.rows
        self._nbytes += part.nbytes

    def _remove(self, part: Part) -> None:
        parts = self._places[part.request]
        place = parts.pop(part)
        if not parts:
            del self._places[part.request]
        if place is not None:
            del self._line[bisect.bisect_left(self._line, place)]
        self._timesteps -= part.timesteps
        self._rows -= part.rows
        self._nbytes -= part.nbytes

    def _drop(self, request: Request) -> None:
        for part in tuple(self._places.get(request, ())):
            self._remove(part)


def _share_due_before(part: Part, due_s: float) -> float:
    """How much of a part, from 0 to 1, goes before something that is due then."""
    request = part.request
    if request.work_s <= request.slice_s:
        return 1.0
    total = int(request.offsets[-1])
    work_s = (due_s - request.submitted_s) / STRETCH
    return min(max((work_s / request.work_s * total - part.start) / part.timesteps, 0.0), 1.0)


def _retry_after_s(seconds: float) -> float:
    return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S) if seconds else _UNKNOWN_RETRY_S
