"""Checks of a request's rows on the host, before anything reaches a device.

An id beyond the vocabulary reads past the embedding; on a GPU that ends the whole process. So every
length, id and number is looked at here, by whole-array operations; only wrong rows cost Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import InputError
from qrnn_serve.engine.types import ModelSchema, PackedRows

MAX_ROW_PROBLEMS = 10_000
"""With more wrong rows than that the request is refused as a whole: the reply must stay small."""

WHOLE_ROW = -1


class FieldError(InputError):
    """A field of a request is wrong, and with it the whole request.

    Attributes:
        field: Its name in the message.
        expected: What the model takes there.
        got: What came.
    """

    def __init__(self, field: str, *, expected: str, got: str) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """Why one row cannot be scored.

    Attributes:
        row: Its index in the request.
        field: The field that is wrong: "lengths", "values" or "state".
        expected: What the model takes there.
        got: What came.
        timestep: First wrong timestep of the row, or WHOLE_ROW.
        too_large: True when the row is valid but longer than the server takes.
    """

    row: int
    field: str
    expected: str
    got: str
    timestep: int = WHOLE_ROW
    too_large: bool = False

    @property
    def message(self) -> str:
        """For people."""
        place = f"row {self.row}"
        if self.timestep != WHOLE_ROW:
            place += f", timestep {self.timestep}"
        return f"{place}: {self.field}: expected {self.expected}, got {self.got}"


def find_row_problems(
    rows: PackedRows, schema: ModelSchema, max_row_timesteps: int
) -> list[RowProblem]:
    """The first problem of every wrong row, by row.

    Args:
        rows: Arrays of the right dtypes and widths; `lengths` may hold zeros and, for rows without
            timesteps, negative numbers.
        schema: What the model takes.
        max_row_timesteps: The longest row that the server takes.

    Raises:
        FieldError: More than MAX_ROW_PROBLEMS rows are wrong.
    """
    problems: dict[int, RowProblem] = {}
    for find in (
        _length_problems(rows.lengths, max_row_timesteps),
        _value_problems(rows, schema),
        _state_problems(rows),
    ):
        for problem in find:
            problems.setdefault(problem.row, problem)
    _check_count(len(problems), rows.rows)
    return sorted(problems.values(), key=lambda problem: problem.row)


def without_rows(
    rows: PackedRows, problems: list[RowProblem]
) -> tuple[PackedRows, npt.NDArray[np.int64]]:
    """The rows that have no problem, and their indices in the request, ascending."""
    indices = np.arange(rows.rows, dtype=np.int64)
    if not problems:
        return rows, indices
    good = np.ones(rows.rows, np.bool_)
    good[[problem.row for problem in problems]] = False
    timesteps = np.repeat(good, np.maximum(rows.lengths, 0))
    kept = PackedRows(
        values=rows.values[timesteps],
        lengths=rows.lengths[good],
        state=None if rows.state is None else rows.state[good],
    )
    return kept, indices[good]


def _length_problems(
    lengths: npt.NDArray[np.int64], max_row_timesteps: int
) -> Iterator[RowProblem]:
    if int(lengths.min()) >= 1 and int(lengths.max()) <= max_row_timesteps:
        return
    wrong = (lengths < 1) | (lengths > max_row_timesteps)
    wrong_rows = np.flatnonzero(wrong)
    _check_count(len(wrong_rows), len(lengths))
    most = f"at most {max_row_timesteps} timesteps, the longest that this server takes"
    for row, length in zip(wrong_rows.tolist(), lengths[wrong_rows].tolist(), strict=True):
        yield RowProblem(
            row=row,
            field="lengths",
            expected="at least 1 timestep" if length < 1 else most,
            got=str(length),
            too_large=length >= 1,
        )


def _value_problems(rows: PackedRows, schema: ModelSchema) -> Iterator[RowProblem]:
    values = rows.values
    if schema.takes_ids:
        ids = np.asarray(values, np.int64)
        # A negative number is a huge one without its sign.
        if int(ids.view(np.uint64).max(initial=0)) < schema.vocabulary_size:
            return
        bad = (ids < 0) | (ids >= schema.vocabulary_size)
        expected = f"an id from 0 to {schema.vocabulary_size - 1}"
    else:
        if _surely_finite(values):
            return
        bad = ~np.isfinite(values)
        expected = "finite numbers"
    wrong = bad if bad.ndim == 1 else bad.any(axis=1)
    if not wrong.any():
        return
    positions = np.flatnonzero(wrong)
    offsets = np.zeros(rows.rows + 1, np.int64)
    np.cumsum(np.maximum(rows.lengths, 0), out=offsets[1:])
    owners = np.searchsorted(offsets, positions, side="right") - 1
    wrong_rows, first = np.unique(owners, return_index=True)
    _check_count(len(wrong_rows), rows.rows)
    for row, position in zip(wrong_rows.tolist(), positions[first].tolist(), strict=True):
        yield RowProblem(
            row=row,
            field="values",
            expected=expected,
            got=_first_bad(values[position], bad[position]),
            timestep=position - int(offsets[row]),
        )


def _state_problems(rows: PackedRows) -> Iterator[RowProblem]:
    if rows.state is None:
        return
    if _surely_finite(rows.state):
        return
    wrong_rows = np.flatnonzero(~np.isfinite(rows.state).all(axis=1)).tolist()
    _check_count(len(wrong_rows), rows.rows)
    for row in wrong_rows:
        yield RowProblem(
            row=row,
            field="state",
            expected="finite numbers",
            got=_first_bad(rows.state[row], ~np.isfinite(rows.state[row])),
        )


def _surely_finite(array: npt.NDArray[np.generic]) -> bool:
    """Whether the sum is finite, so that each number is; it takes no memory, and half the time."""
    wide = np.float32 if array.dtype.itemsize < 4 else array.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(array, axis=None, dtype=wide)))


def _first_bad(value: Any, bad: Any) -> str:
    """The value, or of several the first bad one and its place."""
    if not np.ndim(value):
        return str(value)
    column = int(np.argmax(bad))
    return f"{value[column]} in column {column}"


def _check_count(wrong_rows: int, rows: int) -> None:
    if wrong_rows > MAX_ROW_PROBLEMS:
        raise FieldError(
            "values",
            expected=f"at most {MAX_ROW_PROBLEMS} wrong rows in one request",
            got=f"{wrong_rows} wrong ones of {rows}",
        )
