"""Scores a table file into another: rows in their order, ids kept, errors by row.

The file is read, scored and written piece by piece; a piece is read when its calls can be sent.
"""

# pyarrow has no type stubs, so that the strict rules would flag every line.
# pyright: basic

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from qrnn_client._arrow import read_rows, score_column
from qrnn_client._batch import Batching, cut
from qrnn_client._codec import Answer, Call
from qrnn_client._columns import Wanted, choose_column, output_schema
from qrnn_client._errors import ProtocolError
from qrnn_client._models import Found, ModelInfo
from qrnn_client._plan import Options, Plan, Sent, plan_calls, row_sizes
from qrnn_client._prediction import RowError
from qrnn_client._rows import RowSet
from qrnn_client._tables import (
    PIECE_BYTES,
    OutputTable,
    TableReader,
    check_not_input,
    check_output,
    open_table,
)

_REPORTED_ERRORS = 5

_PIECE = Batching(max_bytes=PIECE_BYTES, max_rows=1 << 30)

RunCalls = Callable[[Iterable[Call]], Generator[Sent, None, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What to score and where to.

    Attributes:
        input_path: The table to read.
        output_path: The table to write.
        id_column: Column that is copied.
        input_column: List column with the sequences; None to find it.
        overwrite: Replace an output file that exists.
        batching: How rows are cut into calls.
    """

    input_path: Path
    output_path: Path
    id_column: str
    input_column: str | None
    overwrite: bool
    batching: Batching


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a file is.

    Attributes:
        rows: Rows that were scored or failed.
        total: Rows of the file, or None when only reading it all would tell.
        failed: Rows that failed.
    """

    rows: int
    total: int | None
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReport:
    """What became of a file.

    Attributes:
        rows: Rows of the output, as many as of the input.
        failed: How many of them have an error in place of a score.
        first_errors: The first few, by row of the file.
        model: The model that scored every row.
        elapsed_s: Time for the whole file.
        attempts: How often calls were sent, retries included.
        calls: Calls that the rows were cut into.
    """

    rows: int
    failed: int
    first_errors: tuple[RowError, ...]
    model: ModelInfo
    elapsed_s: float
    calls: int
    attempts: int


def score_file(
    options: ScoreOptions,
    found: Found,
    run_calls: RunCalls,
    progress: Callable[[Progress], None] | None = None,
) -> ScoreReport:
    """Score a file.

    Args:
        options: What to score and where to.
        found: The model, whose version is kept to for the whole file.
        run_calls: Sends calls and yields their answers in order.
        progress: Called after each written piece.

    Raises:
        FileError: A file cannot be read or written, or does not fit the model.
    """
    check_output(options.output_path, overwrite=options.overwrite)
    with open_table(options.input_path) as table:
        check_not_input(options.output_path, options.input_path)
        input_column = choose_column(
            table.schema,
            found.info,
            Wanted(options.input_path, options.id_column, options.input_column),
        )
        schema = output_schema(table.schema.field(options.id_column), found.info)
        with OutputTable(options.output_path, schema, overwrite=options.overwrite) as output:
            job = _Job(options, found, output, table.rows, progress)
            # Closed at once when a piece cannot be written, so that no call goes on.
            with contextlib.closing(run_calls(job.calls(table, input_column))) as answers:
                for sent in answers:
                    job.take(sent)
            report = job.finish()
            output.commit()
    return report


@dataclass(slots=True)
class _Piece:
    """Rows that are written together, and the answers that have come for them."""

    ids: pa.Array
    first_row: int
    plan: Plan
    answers: list[Answer] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.plan.calls)


class _Job:
    """The pieces under way, oldest first, and the counts of those that are written."""

    def __init__(
        self,
        options: ScoreOptions,
        found: Found,
        output: OutputTable,
        total: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._options = options
        self._found = found
        self._request = Options(version=found.info.version)
        self._output = output
        self._total = total
        self._progress = progress
        self._pieces: collections.deque[_Piece] = collections.deque()
        self._started_s = time.monotonic()
        self._rows = self._failed = self._calls = self._attempts = 0
        self._first_errors: list[RowError] = []

    def calls(self, table: TableReader, input_column: str) -> Iterator[Call]:
        """Read the table and yield the calls of each piece."""
        first_row = 0
        for batch in table.batches([self._options.id_column, input_column]):
            sequences, ids = batch.column(input_column), batch.column(self._options.id_column)
            for part, rows in self._parts(sequences):
                plan = plan_calls(rows, self._found, self._options.batching, self._request)
                self._pieces.append(_Piece(ids[part], first_row, plan))
                first_row += rows.total
                yield from plan.calls
                # A piece without a row that could be sent gets no answer that would write it.
                self._write_complete()

    def take(self, sent: Sent) -> None:
        """Give an answer to the piece that waits for it; answers come in the order of the calls."""
        piece = next(piece for piece in self._pieces if not piece.complete)
        piece.answers.append(sent.answer)
        self._calls += 1
        self._attempts += sent.attempts
        self._write_complete()

    def finish(self) -> ScoreReport:
        """Return what became of the rows, all of which are written."""
        self._write_complete()
        if self._pieces:
            raise ProtocolError("rows have no answer after the last call. This is a bug.")
        return ScoreReport(
            rows=self._rows,
            failed=self._failed,
            first_errors=tuple(self._first_errors),
            model=self._found.info,
            elapsed_s=time.monotonic() - self._started_s,
            calls=self._calls,
            attempts=self._attempts,
        )

    def _parts(self, sequences: pa.Array) -> Iterator[tuple[slice, RowSet]]:
        """Cut a batch so that neither its numbers nor its scores take much more than a piece."""
        rows = read_rows(sequences, self._found.info)
        sizes, timesteps = np.zeros(rows.total, np.int64), np.zeros(rows.total, np.int64)
        sizes[rows.index] = row_sizes(rows, self._found.info, self._request)
        parts = list(cut(sizes, timesteps, _PIECE))
        if len(parts) == 1:
            yield parts[0], rows
            return
        for part in parts:
            yield part, read_rows(sequences[part], self._found.info)

    def _write_complete(self) -> None:
        while self._pieces and self._pieces[0].complete:
            piece = self._pieces.popleft()
            errors = [*piece.plan.rows.errors]
            for answer in piece.answers:
                errors += answer.errors
            self._output.write(self._batch(piece, errors))
            self._count(piece, sorted(errors, key=lambda error: error.row))
            if self._progress:
                self._progress(Progress(rows=self._rows, total=self._total, failed=self._failed))

    def _batch(self, piece: _Piece, errors: Iterable[RowError]) -> pa.RecordBatch:
        info = self._found.info
        texts: list[str | None] = [None] * piece.plan.rows.total
        for error in errors:
            texts[error.row] = _error_text(error)
        scores = score_column(piece.plan.rows.total, piece.answers, info)
        columns = [_plain_ids(piece.ids), scores, pa.array(texts, pa.string())]
        return pa.RecordBatch.from_arrays(columns, schema=self._output.schema)

    def _count(self, piece: _Piece, errors: list[RowError]) -> None:
        for error in errors[: _REPORTED_ERRORS - len(self._first_errors)]:
            row = piece.first_row + error.row
            self._first_errors.append(dataclasses.replace(error, row=row))
        self._rows += piece.plan.rows.total
        self._failed += len(errors)


def _plain_ids(ids: pa.Array) -> pa.Array:
    # The pieces of a file may bring different dictionaries, which an Arrow file cannot hold.
    return ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids


def _error_text(error: RowError) -> str:
    where = "" if error.timestep is None else f"timestep {error.timestep}: "
    return f"{error.code}: {where}{error.message}"
