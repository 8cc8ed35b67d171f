"""One batch: what a replica can hold, and how much of each part fits beside what is in already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.cost_model import CostModel, Launch
from qrnn_serve.engine.request import Part, Request

# A batch is cut short for a near deadline down to this share of its seconds, and to this many times
# the cost of an empty launch: a queue of late requests must not turn into a queue of small batches.
_SHORTEST_SHARE = 0.25
_SHORTEST_LAUNCHES = 4.0
_TYPICAL_ROW_TIMESTEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The most that one batch may hold. A batch always has at least one row.

    A row longer than `max_timesteps` is cut into pieces of that length where the model allows it,
    else it is a batch of its own.

    Attributes:
        target_s: Seconds that a batch should take; larger batches keep others waiting longer.
        max_timesteps: Timesteps of all rows together.
        max_rows: Rows.
        max_bytes: Bytes of features, ids and states.
        wait_s: How long an idle replica waits for more rows to join the first.
    """

    target_s: float = 0.05
    max_timesteps: int = 8192
    max_rows: int = 4096
    max_bytes: int = 1 << 28
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_timesteps", "max_rows", "max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"batch {name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.target_s < math.inf:
            raise ConfigError(f"batch target_s: expected above 0, got {self.target_s}")
        if not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"batch wait_s: expected at least 0, got {self.wait_s}")


@dataclass(slots=True, kw_only=True, eq=False)
class Puller:
    """A replica as the queue sees it.

    Attributes:
        device: Where it runs; replicas of one device do not share work, they would share its time.
        limits: What a batch may hold there.
        cost: How long batches take there.
        cuts_in_time: Whether a long row may be scored in pieces.
        busy_until_s: When its batch is predicted to end; None while it waits for one.
    """

    device: str
    limits: BatchLimits
    cost: CostModel
    cuts_in_time: bool = False
    busy_until_s: float | None = None

    @property
    def budget_s(self) -> float:
        """Seconds of a batch: the target, but at least twice the cost of an empty launch."""
        return max(self.limits.target_s, 2 * self.cost.terms.fixed)

    @property
    def shortest_s(self) -> float:
        """Seconds down to which a batch is cut short for a deadline."""
        floor_s = max(self.budget_s * _SHORTEST_SHARE, self.cost.terms.fixed * _SHORTEST_LAUNCHES)
        return min(floor_s, self.budget_s)

    @property
    def budget_timesteps(self) -> int:
        """Timesteps of a batch of rows of 64 timesteps; for people."""
        terms, row = self.cost.terms, _TYPICAL_ROW_TIMESTEPS
        each = terms.per_timestep + terms.per_row / row
        room_s = max(self.budget_s - terms.fixed - terms.per_longest * row, 0.0)
        return (
            int(min(room_s / each, self.limits.max_timesteps))
            if each
            else (self.limits.max_timesteps)
        )

    def work_s(self, timesteps: float, rows: float, *, urgent: bool = False) -> float:
        """Seconds that it needs for that much of the queue; `urgent`: in the shortest batches."""
        batch_s = self.shortest_s if urgent else self.budget_s
        return self.cost.work_s(timesteps, rows, batch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a replica pulled: parts to score, and requests that are too late to score.

    Attributes:
        parts: Rows to score, in this order.
        expired: Requests whose deadline passed, or will have passed before they are done.
        launch: Its size, and the seconds that the cost model expects of it.
        taken_s: When it was taken.
    """

    parts: tuple[Part, ...]
    expired: tuple[Request, ...]
    launch: Launch
    taken_s: float


class BatchBuilder:
    """A batch while it is filled.

    Args:
        puller: Whose batch.
        share: Timesteps that make it one of several equal batches; infinite for as many as fit.
    """

    def __init__(self, puller: Puller, share: float = math.inf) -> None:
        self.parts: list[Part] = []
        self._puller = puller
        self._share = share
        self._limit_s = puller.budget_s
        self._timesteps = self._longest = self._rows = self._nbytes = 0

    @property
    def launch(self) -> Launch:
        """The batch as it is, with its predicted seconds."""
        return Launch(
            timesteps=self._timesteps,
            longest=self._longest,
            rows=self._rows,
            seconds=self._puller.cost.seconds(self._timesteps, self._longest, self._rows),
        )

    def fit(self, part: Part, left_s: float) -> Part | None:
        """As much of a part as fits: the whole, its first rows, a piece of its first, or None.

        Args:
            part: Rows that wait.
            left_s: Seconds to the deadline of its request.
        """
        limit_s = self._limit_for(left_s)
        if self._fits_whole(part, limit_s):
            return part
        rows = self._rows_that_fit(part, limit_s)
        if rows == 0 and self.parts:
            return None
        if rows == part.rows > 1:
            return part
        return self._first_row(part) if rows <= 1 else part.cut(part.first + rows)[0]

    def add(self, part: Part, left_s: float) -> None:
        """Take in what `fit` returned."""
        self.parts.append(part)
        self._limit_s = self._limit_for(left_s)
        self._timesteps += part.timesteps
        self._longest = max(self._longest, _longest_of(part))
        self._rows += part.rows
        self._nbytes += part.nbytes

    def _limit_for(self, left_s: float) -> float:
        return min(self._limit_s, max(left_s, self._puller.shortest_s))

    def _fits_whole(self, part: Part, limit_s: float) -> bool:
        limits, timesteps = self._puller.limits, self._timesteps + part.timesteps
        rows = self._rows + part.rows
        # The longest row of the whole request stands in for that of the part.
        longest = max(self._longest, part.request.longest)
        return (
            timesteps <= min(limits.max_timesteps, self._share)
            and rows <= limits.max_rows
            and self._nbytes + part.nbytes <= limits.max_bytes
            and self._puller.cost.seconds(timesteps, longest, rows) <= limit_s
        )

    def _rows_that_fit(self, part: Part, limit_s: float) -> int:
        limits, request = self._puller.limits, part.request
        most = min(part.rows, limits.max_rows - self._rows)
        if most <= 0:
            return 0
        ends = request.offsets[part.first + 1 : part.first + most + 1]
        if part.rows == 1:
            ends = np.array([part.stop])
        lengths = np.diff(ends, prepend=part.start)
        timesteps = self._timesteps + ends - part.start
        longest = np.maximum(np.maximum.accumulate(lengths), self._longest)
        rows = self._rows + np.arange(1, most + 1)
        nbytes = self._nbytes + (ends - part.start) * request.timestep_bytes
        nbytes += np.arange(1, most + 1) * request.row_bytes
        seconds = self._puller.cost.seconds(timesteps, longest, rows)
        too_much = (
            (timesteps > limits.max_timesteps) | (nbytes > limits.max_bytes) | (seconds > limit_s)
        )
        fitting = int(np.argmax(too_much)) if too_much.any() else most
        if timesteps[-1] <= self._share:
            return fitting
        # The end of a row that is nearest to the share, this side of it or the other.
        totals = np.concatenate(([self._timesteps], timesteps))
        return min(fitting, int(np.argmin(np.abs(totals - self._share))))

    def _first_row(self, part: Part) -> Part | None:
        """Its first row alone, or a piece of it that fills a batch."""
        row = part if part.rows == 1 else part.cut(part.first + 1)[0]
        most = self._puller.limits.max_timesteps
        if not self._puller.cuts_in_time or row.timesteps <= most:
            return row
        return None if self.parts else row.cut_in_time(most)[0]


def launches_of(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts to score together, in order.

    A request whose scorer died with it is scored alone: if it kills another, it takes none along.
    """
    alone: dict[Request, list[Part]] = {}
    together: list[Part] = []
    for part in parts:
        (alone.setdefault(part.request, []) if part.request.moved else together).append(part)
    return [*alone.values(), *([together] if together else [])]


def launch_of(parts: Sequence[Part], cost: CostModel) -> Launch:
    """The size of some parts scored together, with its predicted seconds."""
    timesteps = sum(part.timesteps for part in parts)
    longest = max(_longest_of(part) for part in parts)
    rows = sum(part.rows for part in parts)
    seconds = cost.seconds(timesteps, longest, rows)
    return Launch(timesteps=timesteps, longest=longest, rows=rows, seconds=seconds)


def _longest_of(part: Part) -> int:
    if part.rows == 1:
        return part.timesteps
    return int(part.request.rows.lengths[part.first : part.last].max())
