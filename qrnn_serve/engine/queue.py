"""The one queue between the callers and the replicas: bounded, in order of arrival, pulled from.

It is counted in timesteps and bytes, because a row may hold one timestep or a million. Callers are
refused at once when it is full. A replica that is free pulls a batch; nothing polls, and nothing
waits for a timer. The queue owns the order and the counts, under one lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qrnn_serve.core.errors import ConfigError, OverloadedError, UnavailableError
from qrnn_serve.engine.drain import DrainRate
from qrnn_serve.engine.request import Part, Request


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The most that one batch may hold. A single row longer than that is a batch of its own.

    Attributes:
        max_timesteps: Timesteps of all rows together.
        max_rows: Rows.
    """

    max_timesteps: int = 8192
    max_rows: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_timesteps", "max_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"batch {name}: expected at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a replica pulled: parts to score, and requests whose deadline passed in the queue."""

    parts: tuple[Part, ...]
    expired: tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """What waits now.

    Attributes:
        requests: Requests with rows that no replica has taken.
        timesteps: Their timesteps.
        nbytes: Their bytes.
        oldest_s: Age of the oldest, 0 when nothing waits.
    """

    requests: int
    timesteps: int
    nbytes: int
    oldest_s: float


class RequestQueue:
    """Requests waiting for a replica. Any thread may call any method."""

    def __init__(
        self,
        config: QueueConfig,
        *,
        drain_rate: DrainRate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._drain_rate = drain_rate or DrainRate(clock=clock)
        self._clock = clock
        self._changed = threading.Condition()
        self._parts: OrderedDict[Part, None] = OrderedDict()
        self._parts_of: dict[Request, list[Part]] = {}
        self._timesteps = 0
        self._nbytes = 0
        self._closed_because: str | None = None

    def put(self, request: Request) -> None:
        """Add a request behind all others.

        Raises:
            OverloadedError: The queue has no room now; or, with an infinite time to wait, the
                request is larger than the queue and never will fit.
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
            excess = max(
                self._timesteps + part.timesteps - config.max_timesteps,
                # In timesteps of this request, so that the time to drain them can be told.
                (self._nbytes + part.nbytes - config.max_bytes) * part.timesteps // part.nbytes,
            )
            if excess > 0:
                raise OverloadedError(
                    f"{self._timesteps} timesteps ({self._nbytes} bytes) are waiting, of at most "
                    f"{config.max_timesteps} ({config.max_bytes} bytes); try again later",
                    retry_after_s=self._drain_rate.seconds_for(excess),
                )
            self._append(part)
            self._changed.notify()

    def put_back(self, parts: Sequence[Part]) -> bool:
        """Give parts taken by a replica that died to the next one, before all others.

        They count again, even past the limits: they were admitted once.

        Returns:
            False when the queue is closed and they were not taken.
        """
        with self._changed:
            if self._closed_because is not None:
                return False
            for part in reversed(parts):
                self._prepend(part)
            self._changed.notify_all()
            return True

    def take(
        self, limits: BatchLimits, may_take: Callable[[], bool] = lambda: True
    ) -> Batch | None:
        """Wait for work and return the next batch.

        Returns:
            None once the queue is closed and empty, or when `may_take` says no; it is asked before
            each batch and after each `wake`.
        """
        with self._changed:
            while may_take():
                if self._parts:
                    return self._form_batch(limits)
                if self._closed_because is not None:
                    return None
                self._changed.wait()
            # The wake-up for what was put last may have come to this replica.
            self._changed.notify()
            return None

    def wake(self) -> None:
        """Have the replicas that wait ask again whether they may take a batch."""
        with self._changed:
            self._changed.notify_all()

    def discard(self, request: Request) -> None:
        """Forget the rows of a request that nobody waits for any more."""
        with self._changed:
            for part in self._parts_of.pop(request, ()):
                self._remove(part)

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
            dropped = tuple(self._parts_of) if drop else ()
            for request in dropped:
                for part in self._parts_of.pop(request):
                    self._remove(part)
            self._changed.notify_all()
            return dropped

    def depth(self) -> QueueDepth:
        """What waits now."""
        with self._changed:
            oldest_s = 0.0
            if self._parts:
                submitted_s = next(iter(self._parts)).request.submitted_s
                oldest_s = self._clock() - submitted_s
            return QueueDepth(
                requests=len(self._parts_of),
                timesteps=self._timesteps,
                nbytes=self._nbytes,
                oldest_s=oldest_s,
            )

    def _form_batch(self, limits: BatchLimits) -> Batch:
        parts: list[Part] = []
        expired: list[Request] = []
        rows = timesteps = 0
        now_s = self._clock()
        while self._parts:
            part = next(iter(self._parts))
            request = part.request
            if request.deadline_s is not None and request.deadline_s <= now_s:
                for late in self._parts_of.pop(request):
                    self._remove(late)
                expired.append(request)
                continue
            fits = (
                timesteps + part.timesteps <= limits.max_timesteps
                and rows + part.rows <= limits.max_rows
            )
            if not fits and parts:
                break
            self._pop_head(part)
            if not fits:
                part = self._cut_to_fit(part, limits)
            parts.append(part)
            rows += part.rows
            timesteps += part.timesteps
        if self._parts:
            # What is left may be the rest of one request, whose arrival woke only this replica.
            self._changed.notify()
        return Batch(parts=tuple(parts), expired=tuple(expired))

    def _cut_to_fit(self, part: Part, limits: BatchLimits) -> Part:
        """The rows of `part` that fill one batch, at least one; the rest stays first in line."""
        offsets = part.request.offsets
        end = int(offsets[part.first]) + limits.max_timesteps
        last = int(np.searchsorted(offsets, end, side="right")) - 1
        last = min(max(last, part.first + 1), part.first + limits.max_rows, part.last)
        if last == part.last:
            return part
        taken, rest = part.cut(last)
        self._prepend(rest)
        return taken

    def _append(self, part: Part) -> None:
        self._parts[part] = None
        self._parts_of.setdefault(part.request, []).append(part)
        self._timesteps += part.timesteps
        self._nbytes += part.nbytes

    def _prepend(self, part: Part) -> None:
        self._append(part)
        self._parts.move_to_end(part, last=False)

    def _pop_head(self, part: Part) -> None:
        self._remove(part)
        others = self._parts_of[part.request]
        others.remove(part)
        if not others:
            del self._parts_of[part.request]

    def _remove(self, part: Part) -> None:
        del self._parts[part]
        self._timesteps -= part.timesteps
        self._nbytes -= part.nbytes
