"""List columns to rows and back, against pyarrow's own view of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrnn_client._arrow import read_rows, score_column, score_type, unfit_reason
from qrnn_client._codec import Answer
from qrnn_protos.v1 import prediction_pb2 as pb
from support.client_wire import dtype_of, make_info

WIDTH = 2
FEATURES = make_info(input_size=WIDTH, output_size=2)
IDS = make_info(vocabulary_size=50)
WIDE_IDS = make_info(input_size=WIDTH, vocabulary_size=50)

number = st.one_of(st.none(), st.integers(-9, 9))
timestep = st.one_of(
    st.none(),
    st.lists(number, min_size=WIDTH, max_size=WIDTH),
    st.lists(number, max_size=4),
    st.lists(st.integers(-9, 9), min_size=WIDTH, max_size=WIDTH),
)
good_timestep = st.lists(st.integers(-9, 9), min_size=WIDTH, max_size=WIDTH)
row_of_lists = st.one_of(
    st.none(), st.lists(timestep, max_size=4), st.lists(good_timestep, max_size=5)
)
fixed_timestep = st.one_of(st.none(), st.lists(number, min_size=WIDTH, max_size=WIDTH))
row_of_fixed = st.one_of(
    st.none(), st.lists(fixed_timestep, max_size=4), st.lists(good_timestep, max_size=5)
)


def is_good(row):
    return bool(row) and all(
        step is not None and len(step) == WIDTH and None not in step for step in row
    )


def first_bad(row):
    return next(
        place
        for place, step in enumerate(row)
        if step is None or len(step) != WIDTH or None in step
    )


def numbers_of(rows):
    buffers = rows.values.buffers(0, len(rows.index))
    data = b"".join(np.ascontiguousarray(buffer).tobytes() for buffer in buffers)
    return np.frombuffer(data, rows.dtype)


def check_features(column, rows):
    """A column read as rows: every good row's numbers, every other row's error."""
    checked = read_rows(column, FEATURES)

    good = [place for place, row in enumerate(rows) if is_good(row)]
    assert checked.total == len(rows)
    assert checked.index.tolist() == good
    assert checked.lengths.tolist() == [len(rows[place]) for place in good]
    expected = [number for place in good for step in rows[place] for number in step]
    assert numbers_of(checked).tolist() == expected
    assert checked.dtype == np.float32
    errors = {error.row: error for error in checked.errors}
    assert sorted(errors) == [place for place in range(len(rows)) if place not in good]
    for place, error in errors.items():
        expected_timestep = first_bad(rows[place]) if rows[place] else None
        assert error.timestep == expected_timestep


@settings(deadline=None)
@given(
    rows=st.lists(row_of_lists, max_size=8),
    large=st.booleans(),
    number_type=st.sampled_from([pa.float32(), pa.float64(), pa.float16(), pa.int32()]),
    data=st.data(),
)
def test_read_lists_of_lists(rows, large, number_type, data):
    """Any nulls and widths, any slice, any number type: good rows exact, others named."""
    make = pa.large_list if large else pa.list_
    column = pa.array(rows, make(make(number_type)))
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))

    check_features(column.slice(start, stop - start), rows[start:stop])


@settings(deadline=None)
@given(rows=st.lists(row_of_fixed, max_size=8), data=st.data())
def test_read_lists_of_fixed_lists(rows, data):
    """The same for timesteps of a fixed size, the usual form."""
    column = pa.array(rows, pa.list_(pa.list_(pa.float32(), WIDTH)))
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))

    check_features(column.slice(start, stop - start), rows[start:stop])


def test_read_rows_of_one_length():
    """A column whose rows all have the same fixed length."""
    rows = [[[1, 2], [3, 4]], None, [[5, 6], [7, 8]]]
    column = pa.array(rows, pa.list_(pa.list_(pa.float32(), WIDTH), 2))

    check_features(column, rows)
    check_features(column.slice(1), rows[1:])


@settings(deadline=None)
@given(
    rows=st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 100)))), max_size=8
    ),
    id_type=st.sampled_from([pa.int32(), pa.int64(), pa.uint8(), pa.int16()]),
    start=st.integers(0, 3),
)
def test_read_lists_of_ids(rows, id_type, start):
    """Token ids: a null row or a null id is its row's error."""
    column = pa.array(rows, pa.list_(id_type)).slice(start)
    rows = rows[start:]

    checked = read_rows(column, IDS)

    good = [place for place, row in enumerate(rows) if row and None not in row]
    assert checked.index.tolist() == good
    assert numbers_of(checked).tolist() == [number for place in good for number in rows[place]]
    assert {error.row for error in checked.errors} == set(range(len(rows))) - set(good)


def test_read_views_the_columns_memory():
    """Numbers that fit as they are are not copied."""
    column = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), WIDTH)))

    checked = read_rows(column, FEATURES)

    (buffer,) = checked.values.buffers(0, 2)
    address = column.values.values.buffers()[1].address
    assert buffer.__array_interface__["data"][0] == address


@pytest.mark.parametrize(
    ("column_type", "reason"),
    [
        (pa.float32(), "it is float, not a list"),
        (pa.string(), "it is string, not a list"),
        (pa.list_(pa.float32()), "not list<list<float>>"),
        (pa.list_(pa.int64()), "not list<list<float>>"),
        (pa.list_(pa.list_(pa.string())), "not list<list<float>>"),
        (pa.list_(pa.list_(pa.float32(), 3)), "3 values a timestep"),
        (pa.list_(pa.list_(pa.list_(pa.float32()))), "not list<list<float>>"),
    ],
)
def test_columns_that_hold_no_features(column_type, reason):
    """A column of another shape is refused with its type."""
    assert reason in unfit_reason(column_type, FEATURES)


@pytest.mark.parametrize(
    ("column_type", "fits"),
    [
        (pa.list_(pa.int64()), True),
        (pa.large_list(pa.uint16()), True),
        (pa.list_(pa.int32(), 5), True),
        (pa.list_(pa.float32()), False),
        (pa.list_(pa.bool_()), False),
        (pa.list_(pa.list_(pa.int64())), False),
        (pa.int64(), False),
    ],
)
def test_columns_of_ids(column_type, fits):
    """Lists of integers, and only they, hold token ids."""
    assert (unfit_reason(column_type, IDS) is None) == fits


@pytest.mark.parametrize(
    ("column_type", "reason"),
    [
        (pa.list_(pa.list_(pa.int32())), None),
        (pa.list_(pa.list_(pa.int64(), WIDTH)), None),
        (pa.list_(pa.list_(pa.int64(), 3)), "3 values a timestep"),
        (pa.list_(pa.int64()), "not list<list<int>>"),
        (pa.list_(pa.list_(pa.float32())), "not list<list<int>>"),
    ],
)
def test_columns_of_several_ids(column_type, reason):
    """Lists of lists of integers hold several ids a timestep; a wrong timestep is its row's."""
    found = unfit_reason(column_type, WIDE_IDS)

    assert found is None if reason is None else reason in found


def test_read_several_ids():
    """Ids of each timestep as they are; a timestep of another width is its row's error."""
    rows = [[[1, 2], [3, 4]], [[5, 6, 7]], [[8, 9]]]

    checked = read_rows(pa.array(rows), WIDE_IDS)

    assert numbers_of(checked).tolist() == [1, 2, 3, 4, 8, 9]
    assert [(error.row, error.got) for error in checked.errors] == [(1, "a timestep of 3 values")]


def answer(index, output, lengths):
    return Answer(
        index=np.array(index, np.int64),
        output=np.asarray(output),
        lengths=np.array(lengths, np.int64),
        state=None,
        errors=(),
        timing=pb.Timing(),
        device="cpu",
        engine="fake",
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_scores_of_rows(dtype):
    """One list a row, null where there is none, exact in a type that every reader knows."""
    info = make_info(input_size=1, output_size=2, dtype=dtype)
    first = np.array([[0.5, 1], [2, 3]]).astype(dtype_of(dtype))
    second = np.array([[4, 5]]).astype(dtype_of(dtype))

    column = score_column(5, [answer([0, 2], first, [9, 9]), answer([4], second, [9])], info)

    assert column.type == score_type(info)
    assert column.type.value_type == (pa.float64() if dtype == "float64" else pa.float32())
    assert column.to_pylist() == [[0.5, 1], None, [2, 3], None, [4, 5]]


def test_scores_of_timesteps():
    """One list a timestep, in one list a row."""
    info = make_info(input_size=1, output_size=2, output_per_timestep=True)
    output = np.arange(6, dtype=np.float32).reshape(3, 2)

    column = score_column(3, [answer([0, 2], output, [1, 2])], info)

    assert column.type == score_type(info)
    assert column.to_pylist() == [[[0, 1]], None, [[2, 3], [4, 5]]]


@pytest.mark.parametrize("per_timestep", [False, True])
@pytest.mark.parametrize("total", [0, 2])
def test_scores_of_no_rows(per_timestep, total):
    """Nothing scored: all null, and still of the right type."""
    info = make_info(input_size=1, output_per_timestep=per_timestep)

    column = score_column(total, [], info)

    assert column.type == score_type(info)
    assert column.to_pylist() == [None] * total
