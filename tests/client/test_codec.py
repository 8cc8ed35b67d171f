"""Calls to bytes and replies to arrays, against protobuf itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qrnn_client import InputError, ModelChangedError, PackedRows, ProtocolError
from qrnn_client._checks import check_rows
from qrnn_client._codec import Call, decode_reply, encode_call, parse_reply
from qrnn_client._states import attach_states
from qrnn_protos.v1 import prediction_pb2 as pb
from support.client_wire import dtype_of, make_info, read_info, tensor

FLOATS = ("float32", "float16", "bfloat16", "float64")


def make_call(rows, info, part=None, **fields):
    part = part or slice(0, len(rows.index))
    defaults = {"version": "", "return_state": False, "request_id": "id/0"}
    return Call(info=info, rows=rows, part=part, **(defaults | fields))


@st.composite
def feature_rows(draw):
    """Rows of a model of features in any float type, with states."""
    dtype, width = dtype_of(draw(st.sampled_from(FLOATS))), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    numbers = st.integers(-50, 50)
    rows = [draw(hnp.arrays(np.int8, (n, width), elements=numbers)).astype(dtype) for n in lengths]
    states = draw(hnp.arrays(np.int8, (len(rows), 3), elements=numbers)).astype(dtype)
    return dtype, width, rows, states


@settings(deadline=None)
@given(given_rows=feature_rows(), with_states=st.booleans(), packed=st.booleans(), data=st.data())
def test_encode_is_what_protobuf_writes(given_rows, with_states, packed, data):
    """The framed bytes are those of protobuf's own serializer, for any rows and any cut of them."""
    dtype, width, rows, states = given_rows
    info = make_info(input_size=width, state_size=3, dtype=dtype.name)
    given_form = PackedRows(np.concatenate(rows), [len(row) for row in rows]) if packed else rows
    row_set = check_rows(given_form, info)
    if with_states:
        row_set = attach_states(row_set, states, info)
    start = data.draw(st.integers(0, len(rows) - 1))
    part = slice(start, data.draw(st.integers(start + 1, len(rows))))
    call = make_call(row_set, info, part, version="7", return_state=True)

    expected = pb.PredictRequest(
        model="model",
        version="7",
        values=tensor(np.concatenate(rows[part])),
        lengths=tensor(np.array([len(row) for row in rows[part]], np.int64)),
        state=tensor(states[part]) if with_states else None,
        return_state=True,
        request_id="id/0",
    )
    assert encode_call(call) == expected.SerializeToString()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_encode_ids(dtype, rng):
    """Token ids travel as one row of numbers of their own type."""
    rows = [rng.integers(0, 100, n).astype(dtype) for n in (1, 300, 7)]
    info = make_info(vocabulary_size=100)

    request = pb.PredictRequest.FromString(encode_call(make_call(check_rows(rows, info), info)))

    assert request.values == tensor(np.concatenate(rows))
    assert request.lengths == tensor(np.array([1, 300, 7]))


def test_encode_skips_rows_that_were_refused(rng):
    """Gaps that refused rows leave in packed values are cut out of the message."""
    info = make_info(input_size=2)
    values = rng.standard_normal((6, 2)).astype(np.float32)
    rows = check_rows(PackedRows(values, [2, 0, 1, 0, 3]), info)
    kept = rows.without(np.array([1]), ())

    request = pb.PredictRequest.FromString(encode_call(make_call(kept, info)))

    assert request.values == tensor(np.concatenate([values[:2], values[3:]]))
    assert request.lengths == tensor(np.array([2, 3]))


def reply_for(call, scored, rng, **changes):
    """A right reply that scores the rows `scored` of a call and refuses the others."""
    info, lengths = call.info, call.lengths[scored]
    vectors = int(lengths.sum()) if info.output_per_timestep else len(scored)
    dtype = dtype_of(info.dtype)
    refused = sorted(set(range(len(call.index))) - set(scored))
    response = pb.PredictResponse(
        model=info.name,
        version=info.version,
        rows=tensor(np.array(scored, np.int64)),
        output=tensor(rng.standard_normal((vectors, info.output_size)).astype(dtype)),
        errors=[pb.RowError(row=row, code=3, message=f"no {row}", timestep=-1) for row in refused],
        request_id=call.request_id,
    )
    if info.output_per_timestep:
        response.output_lengths.CopyFrom(tensor(lengths))
    if call.return_state:
        state = rng.standard_normal((len(scored), info.state_size)).astype(dtype)
        response.state.CopyFrom(tensor(state))
    for field, value in changes.items():
        getattr(response, field).CopyFrom(value)
    return response


def as_parsed(response):
    """A reply as it comes from the wire."""
    return parse_reply(response.SerializeToString())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["m" * length for length in range(1, 9)])
def test_decode_large_replies_in_place(dtype, name, rng):
    """A large reply, wherever its numbers lie in the message: exact, aligned, read-only, and not
    taken from protobuf's copy.
    """
    info = dataclasses.replace(
        make_info(input_size=2, output_size=33, output_per_timestep=True, dtype=dtype), name=name
    )
    rows = check_rows([np.ones((n, 2), dtype_of(dtype)) for n in (1000, 1, 30)], info)
    call = make_call(rows, info, return_state=True)
    response = reply_for(call, [0, 2], rng)

    parsed = as_parsed(response)
    answer = decode_reply(parsed, call)

    assert not parsed.fields.output.data
    assert answer.output.tobytes() == response.output.data
    assert answer.state.tobytes() == response.state.data
    assert answer.output.flags.aligned
    assert not answer.output.flags.writeable
    assert answer.lengths.tolist() == [1000, 30]


@settings(deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    per_timestep=st.booleans(),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    data=st.data(),
)
def test_decode_gives_each_row_its_numbers(dtype, per_timestep, lengths, data):
    """A reply decodes to its own numbers, by the caller's index, whichever rows were refused."""
    rng = np.random.default_rng(len(lengths))
    info = make_info(
        input_size=2, output_size=3, output_per_timestep=per_timestep, state_size=4, dtype=dtype
    )
    rows = check_rows([np.ones((n, 2), dtype_of(dtype)) for n in lengths], info)
    rows = rows.within(100, np.arange(len(lengths)) * 10 + 3, ())
    call = make_call(rows, info, return_state=True)
    scored = sorted(data.draw(st.sets(st.sampled_from(range(len(lengths))))))
    response = reply_for(call, scored, rng)

    answer = decode_reply(as_parsed(response), call)

    assert answer.index.tolist() == [10 * row + 3 for row in scored]
    assert answer.output.tobytes() == response.output.data
    assert answer.output.dtype == dtype_of(dtype)
    assert answer.state.tobytes() == response.state.data
    assert answer.lengths.tolist() == [lengths[row] for row in scored]
    assert {error.row: error.message for error in answer.errors} == {
        10 * row + 3: f"no {row}" for row in range(len(lengths)) if row not in scored
    }
    assert not answer.output.flags.writeable


def int64s(*values):
    return tensor(np.array(values, np.int64))


def set_rows(*values):
    return lambda response: response.rows.CopyFrom(int64s(*values))


def set_output(array):
    return lambda response: response.output.CopyFrom(tensor(array))


def cut_output(response):
    response.output.data = response.output.data[:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(set_rows(0, 1, 1), r"missing \[2\], unknown or repeated \[1\]", id="twice"),
        pytest.param(set_rows(0, 1), r"missing \[2\]", id="left-out"),
        pytest.param(set_rows(0, 1, 3), r"unknown or repeated \[3\]", id="unknown"),
        pytest.param(set_rows(-1, 0, 1), r"unknown or repeated \[-1\]", id="negative"),
        pytest.param(set_rows(1, 0, 2), "ascending", id="order"),
        pytest.param(lambda r: r.errors.add(row=1), r"repeated \[1\]", id="row-and-error"),
        pytest.param(lambda r: setattr(r, "request_id", "other"), "request_id", id="request-id"),
        pytest.param(lambda r: setattr(r, "model", "other"), "'other'", id="model"),
        pytest.param(set_output(np.zeros((3, 1), np.float32)), r"float32 \[3, 2\]", id="width"),
        pytest.param(set_output(np.zeros((2, 2), np.float32)), r"got float32 \[2, 2\]", id="few"),
        pytest.param(set_output(np.zeros((3, 2), np.float64)), "float64", id="type"),
        pytest.param(set_output(np.zeros(6, np.float32)), r"\[6\]", id="rank"),
        pytest.param(cut_output, "takes 24 bytes, got 23", id="bytes"),
        pytest.param(lambda r: r.ClearField("output"), "output", id="no-output"),
        pytest.param(lambda r: setattr(r.output, "dtype", 99), "dtype", id="dtype"),
        pytest.param(
            lambda r: r.output.shape.__setitem__(slice(None), [-3, -2]),
            "output",
            id="negative-shape",
        ),
        pytest.param(
            lambda r: r.rows.CopyFrom(tensor(np.zeros(3, np.float32))), "int64", id="float-rows"
        ),
        pytest.param(
            lambda r: r.rows.CopyFrom(tensor(np.zeros((3, 1), np.int64))), "rank 1", id="rows-rank"
        ),
    ],
)
def test_decode_refuses_a_reply_that_does_not_fit(change, message, make_rows, rng):
    """No score is given out when a reply does not name each row once with the right numbers."""
    info = make_info(input_size=3, output_size=2)
    call = make_call(check_rows(make_rows(2, 1, 4), info), info)
    response = reply_for(call, [0, 1, 2], rng)
    change(response)

    with pytest.raises(ProtocolError, match=message):
        decode_reply(as_parsed(response), call)


@pytest.mark.parametrize("field", ["output_lengths", "state"])
def test_decode_checks_lengths_and_states(field, make_rows, rng):
    """Lengths that are not those that were sent, and states of another width, are refused."""
    info = make_info(input_size=3, output_per_timestep=True, state_size=5)
    call = make_call(check_rows(make_rows(2, 1), info), info, return_state=True)
    wrong = {"output_lengths": int64s(1, 2), "state": tensor(np.zeros((2, 4), np.float32))}
    response = reply_for(call, [0, 1], rng, **{field: wrong[field]})

    with pytest.raises(ProtocolError, match=field):
        decode_reply(as_parsed(response), call)


def test_decode_notices_another_version(make_rows, rng):
    """Rows that were checked against one version are not scored by another unnoticed."""
    info = make_info(input_size=3)
    call = make_call(check_rows(make_rows(2), info), info)
    response = reply_for(call, [0], rng)
    response.version = "2"

    with pytest.raises(ModelChangedError, match="version '2' answered"):
        decode_reply(as_parsed(response), call)


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch):
    """Where numpy has no bfloat16, the error names the package that brings it."""
    from qrnn_client import _dtypes

    info = read_info(pb.ModelInfo(name="model", input_size=2, dtype=pb.DATA_TYPE_BFLOAT16))
    monkeypatch.setattr(_dtypes.importlib.util, "find_spec", lambda name: None)
    _dtypes._bfloat16.cache_clear()
    try:
        with pytest.raises(InputError, match="pip install ml-dtypes"):
            check_rows([np.ones((1, 2), np.float32)], info)
    finally:
        _dtypes._bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "wire"), [("float32", "float16"), ("float64", "float64"), ("bfloat16", "bfloat16")]
)
def test_half_halves_models_of_float32_alone(rng, dtype, wire):
    """With half, features go and outputs come as float16 where the model has float32."""
    info = dataclasses.replace(make_info(input_size=2, state_size=3, dtype=dtype), half=True)
    values = rng.standard_normal((4, 2)).astype(np.float32)
    rows = check_rows([values], info)
    call = make_call(rows, info, return_state=True)

    request = pb.PredictRequest.FromString(encode_call(call))
    output = np.ones((1, 1), dtype_of(wire))
    reply = reply_for(call, [0], rng, output=tensor(output))
    answer = decode_reply(as_parsed(reply), call)

    assert request.values == tensor(values.astype(dtype_of(wire)))
    assert request.output_dtype == (pb.DATA_TYPE_FLOAT16 if wire == "float16" else 0)
    assert answer.output.dtype == dtype_of(wire)
    assert answer.state.dtype == dtype_of(dtype)


def test_half_refuses_features_that_float16_cannot_hold(rng):
    """A feature past the range of float16 is the error of its row, before anything is sent."""
    info = dataclasses.replace(make_info(input_size=2), half=True)
    rows = check_rows([np.ones((1, 2)), np.full((3, 2), 1e5, np.float32)], info)

    assert [error.row for error in rows.errors] == [1]
    assert "float16" in rows.errors[0].expected
