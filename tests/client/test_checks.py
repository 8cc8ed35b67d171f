"""Rows and states against the model's schema."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qrnn_client import InputError, PackedRows
from qrnn_client._checks import check_rows, gather_rows
from qrnn_client._states import attach_states
from support.client_wire import dtype_of, make_info

FEATURES = make_info(input_size=3, state_size=2)
IDS = make_info(vocabulary_size=50, state_size=2)
WIDE_IDS = make_info(input_size=3, vocabulary_size=50)


def numbers_of(rows):
    """The numbers that a row set sends, as one array [N, I] or [N]."""
    buffers = rows.values.buffers(0, len(rows.index))
    data = b"".join(np.ascontiguousarray(buffer).tobytes() for buffer in buffers)
    flat = np.frombuffer(data, rows.dtype)
    return flat.reshape(-1, rows.width) if rows.width else flat


def errors_of(rows):
    return {error.row: (error.expected, error.got) for error in rows.errors}


GOOD = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("row", "got"),
    [
        pytest.param(np.zeros((2, 4), np.float32), "float32 [2, 4]", id="width"),
        pytest.param(np.zeros(3, np.float32), "float32 [3]", id="rank-1"),
        pytest.param(np.zeros((1, 2, 3), np.float32), "float32 [1, 2, 3]", id="rank-3"),
        pytest.param(np.float32(1), "float32 []", id="rank-0"),
        pytest.param(np.zeros((0, 3), np.float32), "no timesteps", id="empty"),
        pytest.param([], "no timesteps", id="empty-list"),
        pytest.param(np.array([5, 7, 9]), "int64 [3]", id="ids"),
        pytest.param(np.full((1, 3), 2**24 + 1), "int64 [1, 3]", id="inexact-integers"),
        pytest.param(np.zeros((2, 3), bool), "bool [2, 3]", id="bool"),
        pytest.param(np.zeros((2, 3), complex), "complex128 [2, 3]", id="complex"),
        pytest.param(np.array([["a", "b", "c"]]), "<U1 [1, 3]", id="text"),
        pytest.param("abc", "<U3 []", id="string"),
        pytest.param(None, "None", id="none"),
        pytest.param({"a": 1}, "object []", id="dict"),
        pytest.param(np.ma.masked_equal(GOOD, 3), "a masked array", id="masked"),
        pytest.param([[1.0, 2.0, 3.0], [4.0]], "list", id="ragged"),
        pytest.param(np.full((2, 3), 1e300), "1e+300", id="overflow"),
        pytest.param(torch.zeros(2, 3, requires_grad=True), "Tensor", id="tensor-with-grad"),
    ],
)
def test_bad_row_of_features_gets_its_own_error(row, got):
    """A row of wrong shape or type names what was expected and what came; its neighbours stay."""
    rows = check_rows([GOOD, row, GOOD + 6], FEATURES)

    assert rows.index.tolist() == [0, 2]
    assert [error.row for error in rows.errors] == [1]
    error = rows.errors[0]
    assert (error.code, error.field) == ("INVALID_ARGUMENT", "values")
    assert got in error.got
    assert error.expected in error.message
    assert error.got in error.message
    np.testing.assert_array_equal(numbers_of(rows), np.concatenate([GOOD, GOOD + 6]))


@pytest.mark.parametrize(
    ("row", "got"),
    [
        pytest.param(np.zeros(3, np.float32), "float32 [3]", id="floats"),
        pytest.param(np.zeros((3, 1), np.int64), "int64 [3, 1]", id="rank"),
        pytest.param(np.zeros(0, np.int64), "no timesteps", id="empty"),
        pytest.param(np.array([2**63], np.uint64), str(2**63), id="overflow"),
        pytest.param([1, None], "object [2]", id="null"),
        pytest.param(np.zeros(3, bool), "bool [3]", id="bool"),
    ],
)
def test_bad_row_of_ids_gets_its_own_error(row, got):
    """The same for a model of token ids."""
    rows = check_rows([[1, 2], row, np.array([3], np.uint8)], IDS)

    assert rows.index.tolist() == [0, 2]
    assert got in rows.errors[0].got
    np.testing.assert_array_equal(numbers_of(rows), [1, 2, 3])
    assert rows.dtype == np.int64


@pytest.mark.parametrize(
    ("row", "got"),
    [
        pytest.param(np.zeros((2, 4), np.int64), "int64 [2, 4]", id="width"),
        pytest.param(np.zeros(3, np.int64), "int64 [3]", id="rank"),
        pytest.param(np.zeros((2, 3), np.float32), "float32 [2, 3]", id="floats"),
        pytest.param(np.zeros((0, 3), np.int64), "no timesteps", id="empty"),
    ],
)
def test_bad_row_of_several_ids_gets_its_own_error(row, got):
    """The same for a model that sums the embeddings of three ids a timestep."""
    good = np.arange(6).reshape(2, 3)

    rows = check_rows([good, row, good.astype(np.uint8)], WIDE_IDS)

    assert rows.index.tolist() == [0, 2]
    assert rows.errors[0].expected.startswith("token ids [T, 3] int64")
    assert got in rows.errors[0].got
    np.testing.assert_array_equal(numbers_of(rows), np.concatenate([good, good]))
    block = check_rows(np.stack([good, good]), WIDE_IDS)
    np.testing.assert_array_equal(numbers_of(block), np.concatenate([good, good]))


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", ">f4", "int8"])
def test_features_are_rounded_to_the_models_type(source, target, rng):
    """Any float, and small integers, arrive as the model's type, rounded to nearest."""
    dtype = np.dtype(source) if source in (">f4", "int8") else dtype_of(source)
    rows = [(rng.standard_normal((n, 3)) * 10).astype(dtype) for n in (2, 1, 5)]
    info = make_info(input_size=3, dtype=target)

    checked = check_rows(rows, info)

    assert checked.errors == ()
    expected = np.concatenate(rows).astype(dtype_of(target))
    assert numbers_of(checked).tobytes() == expected.tobytes()


def test_overflow_names_the_first_wrong_timestep():
    """A finite number that the model's type cannot hold is an error, not an infinity."""
    info = make_info(input_size=2, dtype="float16")
    row = np.ones((5, 2), np.float32)
    row[3, 1] = 70_000

    rows = check_rows([row, np.full((1, 2), np.inf, np.float32)], info)

    assert [(error.row, error.timestep, error.got) for error in rows.errors] == [(0, 3, "70000.0")]
    assert numbers_of(rows).tolist() == [[np.inf, np.inf]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_keep_their_type(dtype):
    """32-bit ids are sent as they are; mixed ones become 64-bit."""
    rows = check_rows([np.array([1, 2], dtype), np.array([3], dtype)], IDS)
    mixed = check_rows([np.array([1, 2], dtype), np.array([3], np.int16)], IDS)

    assert rows.dtype == dtype
    assert mixed.dtype == np.int64
    np.testing.assert_array_equal(numbers_of(rows), numbers_of(mixed))


def strided(array):
    """The same numbers behind strides of two."""
    wide = np.zeros((len(array), 2 * array.shape[1]), array.dtype)
    wide[:, ::2] = array
    return wide[:, ::2]


@pytest.mark.parametrize(
    "give",
    [
        pytest.param(lambda rows: rows, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(lambda rows: [strided(row) for row in rows], id="strided"),
        pytest.param(lambda rows: [np.asfortranarray(row) for row in rows], id="fortran"),
        pytest.param(lambda rows: [row.tolist() for row in rows], id="lists"),
        pytest.param(lambda rows: [torch.from_numpy(row) for row in rows], id="tensors"),
        pytest.param(iter, id="iterator"),
        pytest.param(lambda rows: [rows[0], rows[1].tolist(), *rows[2:]], id="mixed"),
        pytest.param(
            lambda rows: PackedRows(np.concatenate(rows), [len(r) for r in rows]), id="packed"
        ),
        pytest.param(
            lambda rows: PackedRows(
                np.concatenate(rows).astype(np.float64), np.array([len(r) for r in rows], np.uint8)
            ),
            id="packed-float64",
        ),
    ],
)
def test_every_form_of_rows_sends_the_same_numbers(give, make_rows):
    """Lists, strided arrays, tensors, packed rows: the same rows are sent."""
    rows = make_rows(1, 5, 2, 7)

    checked = check_rows(gather_rows(give(rows)), FEATURES)

    assert checked.errors == ()
    assert checked.index.tolist() == [0, 1, 2, 3]
    assert checked.lengths.tolist() == [1, 5, 2, 7]
    np.testing.assert_array_equal(numbers_of(checked), np.concatenate(rows))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_array_holds_every_row(dtype, rng):
    """An array [B, T, I] is B rows, whatever its strides."""
    block = rng.standard_normal((4, 6, 5)).astype(dtype)[:, ::2, 1:4]

    checked = check_rows(block, FEATURES)

    assert checked.lengths.tolist() == [3, 3, 3, 3]
    np.testing.assert_array_equal(numbers_of(checked), block.reshape(-1, 3).astype(np.float32))


def test_one_array_of_ids_holds_every_row():
    """An array [B, T] of ids is B rows."""
    block = np.arange(6).reshape(2, 3)

    checked = check_rows(block, IDS)

    np.testing.assert_array_equal(numbers_of(checked), np.arange(6))
    assert checked.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (0,), (2, 4, 1)])
def test_one_array_of_bad_rows(shape):
    """An array of empty or unfit rows has an error for each of its rows."""
    checked = check_rows(np.zeros(shape, np.float32), FEATURES)

    assert checked.total == shape[0]
    assert len(checked.errors) == shape[0]
    assert len(checked.index) == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(np.zeros((4, 3), np.float32), r"pass \[array\]", id="one-row"),
        pytest.param("text", "list of arrays, got str", id="text"),
        pytest.param({"a": GOOD}, "list of arrays, got dict", id="mapping"),
        pytest.param(7, "list of arrays, got int", id="number"),
        pytest.param(PackedRows(GOOD, [1, 2]), "T = 3", id="packed-sum"),
        pytest.param(PackedRows(GOOD, [3, -1]), "at least 0", id="packed-negative"),
        pytest.param(PackedRows(GOOD, [0.5, 1.5]), "integers", id="packed-floats"),
        pytest.param(PackedRows(GOOD, [[2]]), "integers", id="packed-rank"),
        pytest.param(PackedRows(GOOD[:, :2], [2]), "features", id="packed-width"),
    ],
)
def test_rows_that_are_wrong_as_a_whole(rows, message):
    """What is no set of rows at all is refused before anything is sent."""
    with pytest.raises(InputError, match=message):
        check_rows(gather_rows(rows), FEATURES)


def test_packed_rows_without_timesteps():
    """Packed rows of length 0 are errors; the others stay in their places."""
    checked = check_rows(PackedRows(GOOD, [0, 1, 0, 1, 0]), FEATURES)

    assert checked.index.tolist() == [1, 3]
    assert sorted(errors_of(checked)) == [0, 2, 4]
    np.testing.assert_array_equal(numbers_of(checked), GOOD)


def test_packed_rows_with_one_that_overflows():
    """One packed row that cannot be cast does not take the others with it."""
    values = np.array([[1.0], [1e39], [3.0]])
    info = make_info(input_size=1)

    checked = check_rows(PackedRows(values, [1, 1, 1]), info)

    assert checked.index.tolist() == [0, 2]
    assert errors_of(checked) == {1: ("numbers within float32", "1e+39")}


@given(lengths=st.lists(st.integers(0, 4), max_size=8), data=st.data())
def test_row_set_without_some_rows(lengths, data):
    """Leaving rows out keeps the others' numbers, lengths and indices, packed or not."""
    rows = [np.full((n, 3), i, np.float32) for i, n in enumerate(lengths)]
    values = np.concatenate([*rows, np.zeros((0, 3), np.float32)])
    for form in (rows, PackedRows(values, np.array(lengths, np.int64))):
        checked = check_rows(form, FEATURES)
        places = data.draw(st.sets(st.integers(0, max(len(checked.index) - 1, 0))))
        places = sorted(places) if len(checked.index) else []

        kept = checked.without(np.array(places, np.int64), ())

        left = [i for p, i in enumerate(checked.index.tolist()) if p not in places]
        assert kept.index.tolist() == left
        assert kept.lengths.tolist() == [lengths[i] for i in left]
        expected = [number for i in left for number in [i] * lengths[i]]
        assert numbers_of(kept)[:, 0].tolist() == expected


def test_states_join_their_rows(make_rows):
    """Each row goes with its own state, None starts fresh, and a bad one is its row's error."""
    rows = check_rows([*make_rows(1, 2), None, *make_rows(3, 4, 1)], FEATURES)
    states = [[1.0, 2.0], None, [9.0, 9.0], np.zeros(3), np.array([5, 6], np.float16), [1e39, 0]]

    joined = attach_states(rows, states, FEATURES)

    assert joined.index.tolist() == [0, 1, 4]
    assert joined.states.tolist() == [[1, 2], [0, 0], [5, 6]]
    assert joined.states.dtype == np.float32
    fields = {error.row: error.field for error in joined.errors}
    assert fields == {2: "values", 3: "state", 5: "state"}


def test_states_in_one_array(make_rows):
    """An array [B, S] gives each row its own, also when a row before it was refused."""
    rows = check_rows([None, *make_rows(1, 2)], FEATURES)
    states = np.arange(6, dtype=np.float32).reshape(3, 2)

    assert attach_states(rows, states, FEATURES).states.tolist() == [[2, 3], [4, 5]]


def test_states_must_be_one_a_row(make_rows):
    """Another number of states than rows is refused as a whole."""
    with pytest.raises(InputError, match="one a row, 2, got 1"):
        attach_states(check_rows(make_rows(1, 2), FEATURES), [None], FEATURES)
