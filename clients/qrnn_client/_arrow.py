"""Sequences in Arrow list columns to rows, and scores back to a list column. Knows no file."""

# pyarrow has no type stubs, so that the strict rules would flag every line.
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from qrnn_client._cast import UnfitError
from qrnn_client._checks import check_laid_out, row_error
from qrnn_client._codec import Answer
from qrnn_client._dtypes import FLOAT32, FLOAT64, dtype_of_name
from qrnn_client._models import ModelInfo
from qrnn_client._rows import Array, Indices, RowSet

_BITS = (8, 16, 32, 64)
# pyarrow has this table too, but some releases load pandas to give it out.
_NUMPY_OF_ARROW = {
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in _BITS},
    "halffloat": np.dtype(np.float16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class _Lists:
    """One level of lists: entry i is child[starts[i] : starts[i] + lengths[i]]."""

    starts: Indices
    lengths: Indices
    valid: Array  # [n] bool
    child: pa.Array


def unfit_reason(column_type: pa.DataType, info: ModelInfo) -> str | None:
    """Return why a column of this type cannot hold the model's rows, or None when it can."""
    if not _is_list(column_type):
        return f"it is {column_type}, not a list"
    item = column_type.value_type
    number, is_fit = ("int", pa.types.is_integer) if info.takes_ids else ("float", _is_number)
    if not info.timestep_shape:
        return None if is_fit(item) else f"it is {column_type}, not list<{number}>"
    if not _is_list(item) or not is_fit(item.value_type):
        return f"it is {column_type}, not list<list<{number}>>"
    if pa.types.is_fixed_size_list(item) and item.list_size != info.input_size:
        return f"it has {item.list_size} values a timestep"
    return None


def read_rows(column: pa.Array, info: ModelInfo) -> RowSet:
    """Return the rows of a column whose type fits; numbers are viewed in place where they can be.

    A null row, a row with a null inside, or with a timestep of the wrong width, has an error.
    """
    outer = _open_lists(column)
    used = outer.valid & (outer.lengths > 0)
    first, last = _span(outer.starts[used], outer.lengths[used])
    inner = None
    if not info.timestep_shape:
        bad, values = _null_mask(outer.child, first, last), _numbers(outer.child, first, last)
    else:
        inner = _open_lists(outer.child.slice(first, last - first))
        bad, values = _read_timesteps(inner, info.input_size)
    starts = outer.starts - first
    bad_before = np.concatenate([[0], np.cumsum(bad)])
    wrong = used.copy()
    wrong[used] = bad_before[(starts + outer.lengths)[used]] > bad_before[starts[used]]
    null = UnfitError(info.expects, "null")
    errors = [row_error(row, null) for row in np.flatnonzero(~outer.valid).tolist()]
    for row in np.flatnonzero(wrong).tolist():
        timestep = int(np.argmax(bad[starts[row] :]))
        got = _wrong_timestep(inner, int(starts[row]) + timestep, info.input_size)
        errors.append(row_error(row, UnfitError(info.expects, got, timestep=timestep)))
    places = np.flatnonzero(outer.valid & ~wrong)
    # Rows without timesteps may point anywhere; they are refused by their length.
    rows = check_laid_out(values, np.where(used, starts, 0)[places], outer.lengths[places], info)
    return rows.within(len(column), places, errors)


def score_column(total: int, answers: Sequence[Answer], info: ModelInfo) -> pa.Array:
    """Return scores of `total` rows: a list of C, or of C a timestep; null for rows without."""
    lengths = np.zeros(total, np.int64)
    missing = np.ones(total, dtype=bool)
    for answer in answers:
        lengths[answer.index] = answer.lengths if info.output_per_timestep else info.output_size
        missing[answer.index] = False
    outputs = [answer.output for answer in answers]
    flat = np.concatenate([*outputs, np.zeros((0, info.output_size), dtype_of_name(info.dtype))])
    values: pa.Array = pa.array(_file_floats(flat).reshape(-1))
    if info.output_per_timestep:
        width = np.full(len(flat), info.output_size, np.int64)
        values = pa.ListArray.from_arrays(_offsets(width), values)
    return pa.ListArray.from_arrays(_offsets(lengths), values, mask=pa.array(missing))


def score_type(info: ModelInfo) -> pa.DataType:
    """Return the type of `score_column`."""
    numbers = pa.list_(
        pa.from_numpy_dtype(_file_floats(np.zeros(0, dtype_of_name(info.dtype))).dtype)
    )
    return pa.list_(numbers) if info.output_per_timestep else numbers


def _is_list(column_type: pa.DataType) -> bool:
    return (
        pa.types.is_list(column_type)
        or pa.types.is_large_list(column_type)
        or pa.types.is_fixed_size_list(column_type)
    )


def _is_number(column_type: pa.DataType) -> bool:
    return pa.types.is_floating(column_type) or pa.types.is_integer(column_type)


def _open_lists(array: pa.Array) -> _Lists:
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * size
        lengths = np.full(len(array), size, np.int64)
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        starts, lengths = offsets[:-1], np.diff(offsets)
    valid = np.ones(len(array), dtype=bool)
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    return _Lists(starts, lengths, valid, array.values)


def _span(starts: Indices, lengths: Indices) -> tuple[int, int]:
    """Return the first and last place that rows cover."""
    return (int(starts[0]), int(starts[-1] + lengths[-1])) if len(starts) else (0, 0)


def _read_timesteps(inner: _Lists, width: int) -> tuple[Array, Array]:
    """Return which timesteps are bad, [N], and the numbers of all, [N, width]."""
    first, last = _span(inner.starts, inner.lengths)
    bad = ~inner.valid | (inner.lengths != width)
    null = _null_mask(inner.child, first, last)
    if null.any():
        null_before = np.concatenate([[0], np.cumsum(null)])
        starts = inner.starts - first
        bad |= null_before[starts + inner.lengths] > null_before[starts]
    numbers = _numbers(inner.child, first, last)
    if (inner.lengths == width).all():
        return bad, numbers.reshape(-1, width)
    # Timesteps of other widths shift those after them, so the good ones are gathered.
    values = np.zeros((len(inner.starts), width), numbers.dtype)
    good = np.flatnonzero(~bad)
    values[good] = numbers[(inner.starts[good] - first)[:, None] + np.arange(width)]
    return bad, values


def _wrong_timestep(inner: _Lists | None, timestep: int, width: int) -> str:
    if inner is None or not inner.valid[timestep]:
        return "a null timestep"
    if inner.lengths[timestep] != width:
        return f"a timestep of {inner.lengths[timestep]} values"
    return "a timestep with a null in it"


def _numbers(leaf: pa.Array, first: int, last: int) -> Array:
    """Return leaf[first:last] as a view that ignores nulls."""
    dtype = _NUMPY_OF_ARROW[str(leaf.type)]
    data = leaf.buffers()[1]
    if data is None or first == last:
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype)[leaf.offset + first : leaf.offset + last]


def _null_mask(array: pa.Array, first: int, last: int) -> Array:
    if not array.null_count:
        return np.zeros(last - first, dtype=bool)
    return array.slice(first, last - first).is_null().to_numpy(zero_copy_only=False)


def _offsets(lengths: Indices) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _file_floats(values: Array) -> Array:
    """Return half precision as float32, exactly: few readers know smaller floats."""
    return values if values.dtype in (FLOAT32, FLOAT64) else values.astype(FLOAT32)
