"""The caller's rows against the model's schema, before anything is sent.

A row that cannot fit becomes a RowError and the others go on. Only shape and type are judged here;
the server judges the numbers.

Conversions: other floats become the model's float type (float64 to float32 rounds), and a number
that is too large for it is an error of its row; integers become floats only when that is exact; ids
keep int32 or int64, other integers become int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from qrnn_client._cast import (
    UnfitError,
    as_array,
    cast_values,
    describe,
    narrow_floats,
    overflowed,
    unfit_empty,
)
from qrnn_client._dtypes import INT32, INT64, DType, dtype_of_name, is_float
from qrnn_client._errors import InputError
from qrnn_client._models import ModelInfo
from qrnn_client._prediction import RowError
from qrnn_client._rows import (
    Array,
    Indices,
    ListValues,
    PackedRows,
    PackedValues,
    RowSet,
    Values,
    starts_of,
)

Rows = Sequence[npt.ArrayLike] | npt.NDArray[Any] | PackedRows

GatheredRows = list[Any] | Array | PackedRows

INVALID_ARGUMENT = "INVALID_ARGUMENT"


def gather_rows(rows: object) -> GatheredRows:
    """Return `rows` in a form that can be checked more than once.

    Raises:
        InputError: It is no collection of rows.
    """
    if isinstance(rows, (PackedRows, np.ndarray)):
        return cast("Array | PackedRows", rows)
    is_text_or_mapping = isinstance(rows, (str, bytes)) or hasattr(rows, "keys")
    if is_text_or_mapping or not isinstance(rows, Iterable):
        raise InputError(f"rows: expected a list of arrays, got {type(rows).__name__}")
    return list(cast("Iterable[Any]", rows))


def check_rows(rows: GatheredRows, info: ModelInfo) -> RowSet:
    """Return the rows that fit `info`, with an error for each that does not.

    Args:
        rows: What `gather_rows` gives: arrays [T, I] or ids [T] of any lengths; or one array
            [B, T, I] or ids [B, T]; or packed rows.
        info: The model that they are for.

    Raises:
        InputError: `rows` is wrong as a whole.
    """
    if isinstance(rows, PackedRows):
        return _check_packed(rows, info)
    if isinstance(rows, np.ndarray):
        return _check_block(rows, info)
    return _check_list(rows, info)


def row_error(row: int, error: UnfitError, field: str = "values") -> RowError:
    """Return `error` as the error of one row."""
    return RowError(
        row=row,
        code=INVALID_ARGUMENT,
        message=f"{field}: {error}",
        field=field,
        expected=error.expected,
        got=error.got,
        timestep=error.timestep,
    )


def _check_block(rows: Array, info: ModelInfo) -> RowSet:
    """Check one array that holds every row."""
    rank = 2 + len(info.timestep_shape)
    if rows.ndim < rank and rows.dtype != object and rows.size:
        raise InputError(
            f"rows: expected a list of arrays or one array of rank {rank}, got {describe(rows)}; "
            "for a single row pass [array]"
        )
    if rows.ndim != rank or 0 in rows.shape:
        return _check_list(list(rows), info)
    batch, timesteps = rows.shape[:2]
    lengths = np.full(batch, timesteps, np.int64)
    values = rows.reshape(batch * timesteps, *rows.shape[2:])
    return check_laid_out(values, starts_of(lengths), lengths, info)


def _check_packed(rows: PackedRows, info: ModelInfo) -> RowSet:
    values, lengths = np.asarray(rows.values), np.asarray(rows.lengths)
    if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and len(lengths)):
        raise InputError(f"lengths: expected integers [B], got {describe(lengths)}")
    lengths = lengths.astype(np.int64)
    if len(lengths) and int(lengths.min()) < 0:
        raise InputError(f"lengths: expected at least 0 each, got {int(lengths.min())}")
    timesteps = int(lengths.sum())
    if values.shape != (timesteps, *info.timestep_shape):
        raise InputError(
            f"values: expected {info.expects} with T = {timesteps}, the sum of lengths; "
            f"got {describe(values)}"
        )
    return check_laid_out(values, starts_of(lengths), lengths, info)


def check_laid_out(values: Array, starts: Indices, lengths: Indices, info: ModelInfo) -> RowSet:
    """Return the rows that fit `info`, of rows that lie in `values` one behind the other.

    Args:
        values: [N, I] features or ids, or [N] ids; between rows there may be timesteps of no row.
        starts: [B] first timestep of each row, ascending.
        lengths: [B] timesteps of each row.
        info: The model that they are for.
    """
    if not len(values):
        return _check_list([values] * len(lengths), info)
    try:
        sent = cast_values(as_array(values), info, _wire_dtype(info, [values]))
    except UnfitError:
        # Perhaps only some rows are at fault, so each is judged on its own.
        ends = (starts + lengths).tolist()
        return _check_list([values[a:b] for a, b in zip(starts.tolist(), ends, strict=True)], info)
    sent = np.ascontiguousarray(sent)
    index = np.flatnonzero(lengths)
    packed = PackedValues(sent, starts[index], lengths[index])
    errors = [row_error(int(row), unfit_empty(info)) for row in np.flatnonzero(lengths == 0)]
    return RowSet(
        total=len(lengths),
        index=index,
        lengths=packed.lengths,
        values=packed,
        dtype=sent.dtype,
        width=info.input_size,
        states=None,
        errors=tuple(errors),
    )


def _check_list(rows: list[Any], info: ModelInfo) -> RowSet:
    dtype = _wire_dtype(info, rows)
    if (lengths := _uniform_lengths(rows, info)) is not None:
        values = _uniform_values(rows, lengths, dtype)
        if values is not None:
            return _all_fit(values, lengths, dtype, info)
    arrays: list[Array] = []
    index: list[int] = []
    errors: list[RowError] = []
    for number, row in enumerate(rows):
        try:
            arrays.append(np.ascontiguousarray(cast_values(as_array(row), info, dtype)))
            index.append(number)
        except UnfitError as error:
            errors.append(row_error(number, error))
    return RowSet(
        total=len(rows),
        index=np.array(index, np.int64),
        lengths=np.fromiter(map(len, arrays), np.int64, len(arrays)),
        values=ListValues(arrays),
        dtype=dtype,
        width=info.input_size,
        states=None,
        errors=tuple(errors),
    )


def _all_fit(values: Values, lengths: Indices, dtype: DType, info: ModelInfo) -> RowSet:
    return RowSet(
        total=len(lengths),
        index=np.arange(len(lengths)),
        lengths=lengths,
        values=values,
        dtype=dtype,
        width=info.input_size,
        states=None,
        errors=(),
    )


def _uniform_lengths(rows: list[Any], info: ModelInfo) -> Indices | None:
    """Return the lengths of rows that are all plain arrays of one type and of the right shape.

    None when any row needs a look of its own. Touches each row only in C loops.
    """
    if set(map(type, rows)) != {np.ndarray} or len({row.dtype for row in rows}) > 1:
        return None
    if {row.shape[1:] for row in rows} != {info.timestep_shape} or not all(
        row.ndim for row in rows
    ):
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return lengths if lengths.all() else None


def _uniform_values(rows: list[Array], lengths: Indices, dtype: DType) -> Values | None:
    if rows[0].dtype == dtype:
        contiguous = all(row.flags.c_contiguous for row in rows)
        return ListValues(rows if contiguous else [np.ascontiguousarray(row) for row in rows])
    if not (is_float(rows[0].dtype) and is_float(dtype)):
        return None
    values = np.concatenate(rows)
    narrowed = narrow_floats(values, dtype)
    if overflowed(values, narrowed):
        return None
    return PackedValues(narrowed, starts_of(lengths), lengths)


def _wire_dtype(info: ModelInfo, rows: list[Any]) -> DType:
    if not info.takes_ids:
        return dtype_of_name(info.wire_dtype)
    narrow = bool(rows) and all(getattr(row, "dtype", None) == INT32 for row in rows)
    return INT32 if narrow else INT64
