"""A caller's rows on their way through the engine, and the answer they get.

A request stays whole in the queue; a replica takes a part of it, a run of neighbouring rows, when
the whole does not fit a batch. The parts may end in any order and on different replicas; the last
one joins them in the order of the rows. One row that is too long for a batch is scored in pieces,
one after the other.
"""

from __future__ import annotations

import threading
from asyncio import Future
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import DeadlineExceededError, QRNNError
from qrnn_serve.engine.types import PackedRows, ScoredRows, StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """A row that the scorer could not score.

    Attributes:
        row: Its index in the request's PackedRows.
        error: Why.
    """

    row: int
    error: QRNNError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTiming:
    """Where the time of a request went. A request scored in several batches has their sums.

    Attributes:
        queue_s: From submission to the start of its first batch.
        upload_s: Its batches: joining rows and bringing them to the device.
        compute_s: Its batches: running the model.
        download_s: Its batches: bringing the answers back.
        batch_rows: Rows of its batches, over all the requests in them.
        batch_timesteps: Timesteps of its batches.
    """

    queue_s: float
    upload_s: float
    compute_s: float
    download_s: float
    batch_rows: int
    batch_timesteps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRequest:
    """The answer to one request: every row is in `rows` or in `failures`, exactly once.

    Attributes:
        rows: Indices of the scored rows, ascending, [G] int64.
        scored: Their outputs and states in that order; None when no row was scored.
        failures: The other rows, ascending.
        timing: Where the time went.
        device: Where it ran; several, joined by commas, when its parts ran on different replicas.
        engine: "native", "torchscript" or "onnx".
    """

    rows: npt.NDArray[np.int64]
    scored: ScoredRows | None
    failures: tuple[RowFailure, ...]
    timing: BatchTiming
    device: str
    engine: str

    @property
    def nbytes(self) -> int:
        """Bytes of outputs and states."""
        return 0 if self.scored is None else self.scored.output.nbytes + self.scored.state.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part: scores or one error.

    A piece of a row before its last has outputs only when there is one a timestep.
    """

    part: Part
    result: ScoredRows | QRNNError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What every request of a batch is told about it."""

    started_s: float
    seconds: float
    times: StageTimes
    predicted_s: float
    rows: int
    timesteps: int
    padded_timesteps: int
    device: str
    engine: str
    graph_replays: int = 0


class Request:
    """One caller's rows, when they must be done, and the way back to the caller.

    Attributes:
        rows: What to score.
        future: Resolved with a ScoredRequest or an error, in its own event loop.
        submitted_s: When it came, on the engine's clock.
        deadline_s: When its caller stops waiting, on the same clock; None for never.
        offsets: First timestep of each row, and one past the last: [B + 1] int64.
        longest: Timesteps of its longest row.
        timestep_bytes: Bytes of the features or the id of a timestep.
        row_bytes: Bytes of the length and the state of a row.
        moved: True once its rows were put back from a replica that died.
        number: Its place in the order of arrival; the queue sets it, and what follows.
        work_s: Seconds that one replica is predicted to need for it.
        slice_s: Seconds of it that a replica takes at once.
    """

    __slots__ = (
        "_devices",
        "_facts",
        "_lock",
        "_outcomes",
        "_unfinished_rows",
        "deadline_s",
        "future",
        "longest",
        "moved",
        "number",
        "offsets",
        "row_bytes",
        "rows",
        "slice_s",
        "submitted_s",
        "timestep_bytes",
        "work_s",
    )

    def __init__(
        self,
        rows: PackedRows,
        future: Future[ScoredRequest],
        *,
        submitted_s: float,
        deadline_s: float | None = None,
    ) -> None:
        self.rows = rows
        self.future = future
        self.submitted_s = submitted_s
        self.deadline_s = deadline_s
        self.moved = False
        self.offsets: npt.NDArray[np.int64] = np.zeros(rows.rows + 1, np.int64)
        np.cumsum(rows.lengths, out=self.offsets[1:])
        self.longest = int(rows.lengths.max())
        self.timestep_bytes = rows.values.nbytes // rows.timesteps
        state_bytes = 0 if rows.state is None else rows.state.nbytes // rows.rows
        self.row_bytes = rows.lengths.itemsize + state_bytes
        self.number = 0
        self.work_s = self.slice_s = 0.0
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._facts: list[BatchFacts] = []
        self._unfinished_rows = rows.rows

    def whole(self) -> Part:
        """All its rows as one part."""
        return Part(request=self, first=0, last=self.rows.rows)

    def add(self, outcomes: list[Outcome], facts: BatchFacts) -> ScoredRequest | None:
        """Take what one batch made of some rows; return the joined answer once no row is missing.

        Called by the replicas' threads, each row once.
        """
        with self._lock:
            self._outcomes.extend(outcomes)
            self._facts.append(facts)
            self._unfinished_rows -= sum(_finished_rows(outcome) for outcome in outcomes)
            if self._unfinished_rows > 0:
                return None
        if self._unfinished_rows < 0:
            raise RuntimeError("a row was answered twice. This is a bug.")
        return self._join()

    def _join(self) -> ScoredRequest:
        if len(self._outcomes) > 1:
            self._outcomes.sort(key=lambda outcome: (outcome.part.first, outcome.part.begin))
        failures = [
            RowFailure(row=row, error=outcome.result)
            for outcome in self._outcomes
            if isinstance(outcome.result, QRNNError)
            for row in range(outcome.part.first, outcome.part.last)
        ]
        failed = {failure.row for failure in failures}
        scored: list[ScoredRows] = []
        indices: list[npt.NDArray[np.int64]] = []
        for outcome in self._outcomes:
            part, result = outcome.part, outcome.result
            if isinstance(result, QRNNError) or part.first in failed:
                continue
            if part.ends_row:
                indices.append(np.arange(part.first, part.last, dtype=np.int64))
            else:
                result = ScoredRows(output=result.output, state=result.state[:0])
            scored.append(result)
        return ScoredRequest(
            rows=_join_indices(indices),
            scored=_join_scored(scored),
            failures=tuple(failures),
            timing=_timing(self._facts, self.submitted_s),
            device=",".join(dict.fromkeys(facts.device for facts in self._facts)),
            engine=self._facts[0].engine,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The rows `first` to `last` (excluded) of a request, or a piece of one row.

    Attributes:
        request: Whose rows.
        first: Its first row.
        last: One past its last row.
        begin: First timestep of a piece within its row.
        end: One past its last timestep within its row; None for the row's end.
        state: [1, S], what the piece before it left; None for what the caller sent.
        start: Its first timestep within the request.
        stop: One past its last timestep within the request.
    """

    request: Request
    first: int
    last: int
    begin: int = 0
    end: int | None = None
    state: npt.NDArray[np.generic] | None = None
    start: int = field(init=False)
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        offsets = self.request.offsets
        first = int(offsets[self.first])
        stop = int(offsets[self.last]) if self.end is None else first + self.end
        # Looked up many times while it waits, and slow to read from an array.
        object.__setattr__(self, "start", first + self.begin)
        object.__setattr__(self, "stop", stop)

    @property
    def rows(self) -> int:
        """How many rows it has; a piece counts as one."""
        return self.last - self.first

    @property
    def timesteps(self) -> int:
        """Its timesteps together."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of its features or ids, lengths and states."""
        request = self.request
        return self.timesteps * request.timestep_bytes + self.rows * request.row_bytes

    @property
    def ends_row(self) -> bool:
        """False for a piece with more of its row to come."""
        return self.end is None

    def cut(self, row: int) -> tuple[Part, Part]:
        """The rows before `row`, an index in the request, and those from it on."""
        if not self.first < row < self.last:
            raise RuntimeError(
                f"cannot cut rows {self.first}..{self.last} at {row}. This is a bug."
            )
        return replace(self, last=row), replace(self, first=row)

    def cut_in_time(self, timesteps: int) -> tuple[Part, Part]:
        """The first `timesteps` of its one row, and the rest, which needs their state."""
        if self.rows != 1 or not 0 < timesteps < self.timesteps:
            raise RuntimeError(
                f"cannot cut {self.rows} rows of {self.timesteps} timesteps at {timesteps}. "
                "This is a bug."
            )
        at = self.begin + timesteps
        return replace(self, end=at), replace(self, begin=at, state=None)


Answer = tuple[Request, ScoredRequest | QRNNError]
"""A request that is done, and what came of it."""


def answers_of(outcomes: list[Outcome], facts: BatchFacts) -> list[Answer]:
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


def expired_answer(request: Request) -> Answer:
    """Of a request that is late."""
    return request, DeadlineExceededError(
        "the deadline passed while the request was in the queue, or would have before its scores"
    )


def _finished_rows(outcome: Outcome) -> int:
    """A row is done with its last piece, or with the first that fails."""
    failed = isinstance(outcome.result, QRNNError)
    return outcome.part.rows if failed or outcome.part.ends_row else 0


def _timing(batches: list[BatchFacts], submitted_s: float) -> BatchTiming:
    first, *more = batches
    times, started_s, rows, timesteps = first.times, first.started_s, first.rows, first.timesteps
    for facts in more:
        times += facts.times
        started_s = min(started_s, facts.started_s)
        rows += facts.rows
        timesteps += facts.timesteps
    return BatchTiming(
        queue_s=started_s - submitted_s,
        upload_s=times.upload_s,
        compute_s=times.compute_s,
        download_s=times.download_s,
        batch_rows=rows,
        batch_timesteps=timesteps,
    )


def _join_indices(indices: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    if len(indices) == 1:
        return indices[0]
    return np.concatenate(indices) if indices else np.zeros(0, np.int64)


def _join_scored(scored: list[ScoredRows]) -> ScoredRows | None:
    if len(scored) <= 1:
        return scored[0] if scored else None
    return ScoredRows(
        output=np.concatenate([piece.output for piece in scored]),
        state=np.concatenate([piece.state for piece in scored]),
    )
