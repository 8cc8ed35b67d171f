"""What the engine counts: a small protocol, and the counters that are always kept."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from qrnn_serve.engine.request import BatchFacts

RequestEnd = Literal["scored", "refused", "expired", "cancelled", "failed"]

_OF_BATCHES = ("rows", "timesteps", "padded_timesteps", "graph_replays")
_SUMS = ("batches", *_OF_BATCHES, "restarts", "retried", *get_args(RequestEnd))


class EngineMetrics(Protocol):
    """Told what happens, by any thread. One call a batch and one a request: must be quick."""

    def batch_scored(self, facts: BatchFacts) -> None:
        """A batch ran on a replica."""
        ...

    def request_ended(self, end: RequestEnd, queue_s: float) -> None:
        """A request was answered, or nobody waits for it any more."""
        ...

    def replica_restarted(self) -> None:
        """A replica that had failed is being started again."""
        ...

    def requests_retried(self, count: int) -> None:
        """So many requests are tried again because a replica was lost while it scored them."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Sums since the start.

    Attributes:
        batches: Batches that ran.
        rows: Rows in them.
        timesteps: Timesteps of those rows.
        padded_timesteps: Timesteps of padding computed beside them.
        graph_replays: Launches that were replays of a CUDA graph.
        batch_s: Seconds that replicas spent on them.
        predicted_s: Seconds that the cost model expected of them.
        queue_s: Seconds that scored requests waited.
        scored: Requests answered with scores.
        refused: Requests refused because the queue was full.
        expired: Requests whose deadline passed in the queue.
        cancelled: Requests whose caller left.
        failed: Requests that ended in an error of the server.
        restarts: Starts of replicas that had failed.
        retried: Requests tried again because a replica was lost while it scored them.
    """

    batches: int = 0
    rows: int = 0
    timesteps: int = 0
    padded_timesteps: int = 0
    graph_replays: int = 0
    batch_s: float = 0.0
    predicted_s: float = 0.0
    queue_s: float = 0.0
    scored: int = 0
    refused: int = 0
    expired: int = 0
    cancelled: int = 0
    failed: int = 0
    restarts: int = 0
    retried: int = 0


class Counters:
    """EngineMetrics that only adds up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(_SUMS, 0)
        self._seconds = dict.fromkeys(("batch_s", "predicted_s", "queue_s"), 0.0)

    def batch_scored(self, facts: BatchFacts) -> None:
        """Add a batch."""
        with self._lock:
            self._sums["batches"] += 1
            for name in _OF_BATCHES:
                self._sums[name] += getattr(facts, name)
            self._seconds["batch_s"] += facts.seconds
            self._seconds["predicted_s"] += facts.predicted_s

    def request_ended(self, end: RequestEnd, queue_s: float) -> None:
        """Add a request."""
        with self._lock:
            self._sums[end] += 1
            self._seconds["queue_s"] += queue_s

    def replica_restarted(self) -> None:
        """Add a restart."""
        with self._lock:
            self._sums["restarts"] += 1

    def requests_retried(self, count: int) -> None:
        """Add so many that are tried again."""
        with self._lock:
            self._sums["retried"] += count

    def counts(self) -> EngineCounts:
        """The sums so far."""
        with self._lock:
            return EngineCounts(**self._sums, **self._seconds)
