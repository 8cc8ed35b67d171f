"""Requests from bytes to packed rows and replies to bytes, for right and wrong input."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import InputError, OverloadedError, ReplicaError
from qrnn_serve.engine.request import BatchTiming, RowFailure, ScoredRequest
from qrnn_serve.engine.types import ScoredRows
from qrnn_serve.server import codec, validation
from qrnn_serve.server.validation import FieldError
from support.scorers import FEATURE_SCHEMA, TIMESTEP_SCHEMA
from support.servers import array, request, tensor

ID_SCHEMA = replace(FEATURE_SCHEMA, takes_ids=True, input_size=0, vocabulary_size=10)
LIMIT = 1 << 20
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def decode(message, schema=FEATURE_SCHEMA, max_row_timesteps=LIMIT):
    """A request from its bytes to packed rows."""
    return codec.decode(codec.parse(message.SerializeToString()), schema, max_row_timesteps)


@st.composite
def feature_rows(draw):
    lengths = draw(LENGTHS)
    return [draw(hnp.arrays(np.float32, (t, 2), elements=FLOATS)) for t in lengths]


@settings(max_examples=80, deadline=None)
@given(rows=feature_rows(), with_state=st.booleans(), return_state=st.booleans())
def test_decode_gives_back_every_number_read_only(rows, with_state, return_state):
    """What a client packed is what the engine gets: same bits, same rows, not to be changed."""
    state = np.arange(2 * len(rows), dtype=np.float32).reshape(len(rows), 2) if with_state else None
    message = request(rows, state=state, return_state=return_state, request_id="r")

    decoded = decode(message)

    np.testing.assert_array_equal(decoded.rows.values, np.concatenate(rows))
    np.testing.assert_array_equal(decoded.rows.lengths, [len(row) for row in rows])
    assert not decoded.rows.values.flags.writeable
    assert (decoded.rows.state is None) == (state is None)
    if with_state:
        np.testing.assert_array_equal(decoded.rows.state, state)
    assert (decoded.problems, decoded.return_state, decoded.request_id) == ([], return_state, "r")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_decode_names_a_wrong_id_among_several(dtype):
    """Three ids a timestep: the row, its timestep, the id and its place."""
    schema = replace(ID_SCHEMA, input_size=3)
    good = np.array([[0, 9, 3], [1, 1, 1]], dtype)
    bad = np.array([[0, 9, 3], [1, 1, 10], [-1, 0, 0]], dtype)

    decoded = decode(request([good, bad, good]), schema, LIMIT)

    np.testing.assert_array_equal(decoded.rows.values, np.concatenate([good, good]))
    assert [(p.row, p.timestep, p.got) for p in decoded.problems] == [(1, 1, "10 in column 2")]
    with pytest.raises(FieldError, match=r"\[any, 3\], got int.. \[3\]"):
        decode(request([good[0]]), schema, LIMIT)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decode_sets_aside_exactly_the_rows_with_ids_out_of_range(dtype, data):
    """Each wrong row is named with its first wrong timestep; the others are kept as they came."""
    ids = st.integers(-3, 12)
    rows = data.draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=6))
    wrong = {r: [i for i in row if not 0 <= i < 10] for r, row in enumerate(rows)}

    decoded = decode(request([np.array(row, dtype) for row in rows]), ID_SCHEMA, LIMIT)

    good = [row for r, row in enumerate(rows) if not wrong[r]]
    assert [problem.row for problem in decoded.problems] == [r for r in wrong if wrong[r]]
    for problem in decoded.problems:
        assert problem.got == str(wrong[problem.row][0])
        assert problem.timestep == rows[problem.row].index(wrong[problem.row][0])
        assert problem.expected == "an id from 0 to 9"
    if good:
        assert decoded.rows.values.dtype == np.int64
        np.testing.assert_array_equal(decoded.rows.values, np.concatenate(good))
        np.testing.assert_array_equal(decoded.indices, [r for r in wrong if not wrong[r]])
    else:
        assert decoded.rows is None


def test_decode_names_not_finite_features_and_states():
    """NaN and infinity are found in values and state, with timestep and column."""
    rows = [np.zeros((n, 2), np.float32) for n in (3, 1, 2, 2)]
    rows[0][2, 1] = np.nan
    rows[3][0, 0] = -np.inf
    rows[3][1, 0] = np.nan
    state = np.zeros((4, 2), np.float32)
    state[2, 1] = np.inf

    decoded = decode(request(rows, state=state), FEATURE_SCHEMA, LIMIT)

    facts = [(p.row, p.field, p.timestep, p.got) for p in decoded.problems]
    assert facts == [
        (0, "values", 2, "nan in column 1"),
        (2, "state", -1, "inf in column 1"),
        (3, "values", 0, "-inf in column 0"),
    ]
    np.testing.assert_array_equal(decoded.indices, [1])
    assert decoded.rows.state.shape == (1, 2)


def test_decode_names_rows_without_timesteps_and_rows_too_long():
    """A length below 1 and one past the memory limit are errors of their rows alone."""
    message = request([np.ones((6, 2), np.float32)])
    message.lengths.CopyFrom(tensor(np.array([0, 2, -5, 4, 0], np.int32)))

    decoded = decode(message, FEATURE_SCHEMA, max_row_timesteps=3)

    facts = [(p.row, p.field, p.got, p.too_large) for p in decoded.problems]
    assert facts == [
        (0, "lengths", "0", False),
        (2, "lengths", "-5", False),
        (3, "lengths", "4", True),
        (4, "lengths", "0", False),
    ]
    np.testing.assert_array_equal(decoded.rows.lengths, [2])
    np.testing.assert_array_equal(decoded.rows.values, np.ones((2, 2)))


def features(*shape, dtype=np.float32):
    return tensor(np.zeros(shape, dtype))


GOOD = {"values": features(3, 2), "lengths": tensor(np.array([1, 2]))}
WRONG_REQUESTS = {
    "no lengths": ({"lengths": None}, "lengths", "nothing"),
    "no rows": ({"lengths": tensor(np.zeros(0, np.int64))}, "lengths", "none"),
    "float lengths": ({"lengths": features(2)}, "lengths", "float32 [2]"),
    "lengths of rank 2": (
        {"lengths": tensor(np.ones((1, 2), np.int64))},
        "lengths",
        "int64 [1, 2]",
    ),
    "short sum": ({"lengths": tensor(np.array([1, 1]))}, "lengths", "a sum of 2"),
    "long sum": ({"lengths": tensor(np.array([2, 2]))}, "lengths", "a sum of 4"),
    "overflowing sum": (
        {"lengths": tensor(np.array([2**62, 2**62, 2**62, 2**62 + 3]))},
        "lengths",
        "a row of 4611686018427387907",
    ),
    "no values": ({"values": None}, "values", "nothing"),
    "wrong width": ({"values": features(3, 5)}, "values", "float32 [3, 5]"),
    "wrong rank": ({"values": features(6)}, "values", "float32 [6]"),
    "rank 3": ({"values": features(3, 2, 1)}, "values", "float32 [3, 2, 1]"),
    "rank 9": ({"values": features(*[1] * 9)}, "values", "float32 [1, 1, 1, ...]"),
    "wrong dtype": ({"values": features(3, 2, dtype=np.float64)}, "values", "float64 [3, 2]"),
    "ids to a model of features": (
        {"values": tensor(np.zeros(3, np.int64))},
        "values",
        "int64 [3]",
    ),
    "unknown dtype": (
        {"values": pb.Tensor(dtype=99, shape=[3, 2], data=bytes(24))},  # type: ignore[arg-type]
        "values",
        "dtype 99 [3, 2]",
    ),
    "unspecified dtype": ({"values": pb.Tensor(shape=[3, 2], data=bytes(24))}, "values", "[3, 2]"),
    "negative size": (
        {"values": pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[-3, 2], data=bytes(24))},
        "values",
        "float32 [-3, 2]",
    ),
    "too few bytes": (
        {"values": pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[3, 2], data=bytes(23))},
        "values",
        "23 bytes",
    ),
    "size that multiplies past any memory": (
        {"values": pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[2**62, 2], data=bytes(24))},
        "values",
        "24 bytes",
    ),
    "state of the wrong width": ({"state": features(2, 3)}, "state", "float32 [2, 3]"),
    "state of another batch": ({"state": features(5, 2)}, "state", "float32 [5, 2]"),
}


@pytest.mark.parametrize(("change", "field", "got"), WRONG_REQUESTS.values(), ids=WRONG_REQUESTS)
def test_decode_refuses_a_request_that_is_wrong_as_a_whole(change, field, got):
    """The error names the field, what the model takes there and what came."""
    tensors = {name: value for name, value in (GOOD | change).items() if value is not None}

    with pytest.raises(FieldError) as refused:
        decode(pb.PredictRequest(**tensors), FEATURE_SCHEMA, LIMIT)

    assert refused.value.field == field
    assert got in refused.value.got
    assert refused.value.expected


def test_decode_names_both_sizes_of_a_state_of_another_batch():
    """A carried state for two rows with a request of one says both numbers."""
    message = request([np.zeros((1, 2), np.float32)], state=np.zeros((2, 2), np.float32))

    with pytest.raises(FieldError, match=r"expected float32 \[1, 2\], got float32 \[2, 2\]"):
        decode(message, FEATURE_SCHEMA, LIMIT)


def test_decode_refuses_a_request_whose_reply_could_not_be_sent():
    """Scores larger than a message are refused before they are computed, for ever."""
    schema = replace(TIMESTEP_SCHEMA, output_size=MAX_MESSAGE_BYTES // 16)
    message = request([np.zeros((5, 2), np.float32)])

    with pytest.raises(OverloadedError, match="fewer rows") as refused:
        decode(message, schema, LIMIT)

    assert math.isinf(refused.value.retry_after_s)


def test_decode_refuses_a_flood_of_wrong_rows():
    """A request with more wrong rows than a reply can list is refused as a whole."""
    rows = validation.MAX_ROW_PROBLEMS + 1
    message = pb.PredictRequest(
        values=tensor(np.full(rows, 99)), lengths=tensor(np.ones(rows, np.int64))
    )

    with pytest.raises(FieldError, match="10001 wrong"):
        decode(message, ID_SCHEMA, LIMIT)


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff", b"\x0a\x02\xc3\x28", b"\x1a\xff\xff\xff\xff\x0f"]
)
def test_parse_refuses_bytes_that_are_no_message(garbage):
    """Bytes that are no PredictRequest are the caller's error."""
    with pytest.raises(InputError, match="PredictRequest"):
        codec.parse(garbage)


MODEL = codec.ModelIdentity(name="sums", version="7", schema=FEATURE_SCHEMA)
TIMING = BatchTiming(
    queue_s=0.25, upload_s=0.125, compute_s=0.5, download_s=1.0, batch_rows=4, batch_timesteps=9
)


@settings(max_examples=60, deadline=None)
@given(rows=feature_rows(), data=st.data(), per_timestep=st.booleans())
def test_encode_names_every_row_once(rows, data, per_timestep):
    """Scored rows and row errors, of validation and of the engine, name each row exactly once."""
    model = replace(MODEL, schema=TIMESTEP_SCHEMA if per_timestep else FEATURE_SCHEMA)
    kinds = data.draw(
        st.lists(
            st.sampled_from(["good", "wrong", "failed"]), min_size=len(rows), max_size=len(rows)
        )
    )
    for row, kind in zip(rows, kinds, strict=True):
        if kind == "wrong":
            row[-1, 0] = np.nan
    message = request(rows, return_state=True, request_id="abc")
    decoded = decode(message, model.schema, LIMIT)
    submitted = [kind for kind in kinds if kind != "wrong"]
    scored = np.array([i for i, kind in enumerate(submitted) if kind == "good"], np.int64)
    failed = [i for i, kind in enumerate(submitted) if kind == "failed"]
    lengths = decoded.rows.lengths[scored] if decoded.rows else np.zeros(0, np.int64)
    count = int(lengths.sum()) if per_timestep else len(scored)
    output = np.random.default_rng(0).standard_normal((count, 2)).astype(np.float32)
    state = np.ones((len(scored), 2), np.float32)
    answer = ScoredRequest(
        rows=scored,
        scored=ScoredRows(output=output, state=state) if len(scored) else None,
        failures=tuple(RowFailure(row=i, error=ReplicaError("broke")) for i in failed),
        timing=TIMING,
        device="cpu",
        engine="native",
    )

    encoded = codec.encode(decoded, answer if submitted else None, model, decode_s=2.0)
    reply = pb.PredictResponse.FromString(encoded)

    of_kind = {
        k: [r for r, kind in enumerate(kinds) if kind == k] for k in ("good", "wrong", "failed")
    }
    np.testing.assert_array_equal(array(reply.rows), of_kind["good"])
    np.testing.assert_array_equal(array(reply.output), output)
    np.testing.assert_array_equal(array(reply.state), state)
    if per_timestep:
        np.testing.assert_array_equal(array(reply.output_lengths), lengths)
    errors = {error.row: error.code for error in reply.errors}
    assert list(errors) == sorted(errors)
    assert errors == dict.fromkeys(of_kind["wrong"], 3) | dict.fromkeys(of_kind["failed"], 13)
    assert (reply.model, reply.version, reply.request_id) == ("sums", "7", "abc")
    if submitted:
        told = reply.timing
        times = (told.decode_s, told.queue_s, told.upload_s, told.compute_s, told.download_s)
        assert times == (2.0, 0.25, 0.125, 0.5, 1.0)
        assert (told.batch_rows, told.batch_timesteps) == (4, 9)
        assert told.encode_s > 0


def test_encode_leaves_out_a_state_that_nobody_asked_for():
    """The state is sent only on request."""
    decoded = decode(request([np.ones((1, 2), np.float32)]), FEATURE_SCHEMA, LIMIT)
    scored = ScoredRows(output=np.ones((1, 2), np.float32), state=np.ones((1, 2), np.float32))
    answer = ScoredRequest(
        rows=np.zeros(1, np.int64),
        scored=scored,
        failures=(),
        timing=TIMING,
        device="cpu",
        engine="native",
    )

    reply = pb.PredictResponse.FromString(codec.encode(decoded, answer, MODEL))

    assert not reply.HasField("state")
    assert reply.output.dtype == pb.DATA_TYPE_FLOAT32


def answer_of(output, state, **fields):
    """An engine's answer whose rows are all scored."""
    return ScoredRequest(
        rows=np.arange(len(state)),
        scored=ScoredRows(output=output, state=state),
        failures=(),
        timing=TIMING,
        device="cpu",
        engine="native",
        **fields,
    )


def test_large_message_is_read_in_place():
    """The numbers of a large message are views of its bytes, also where these are not aligned."""
    values = np.random.default_rng(0).standard_normal((30_000, 2)).astype(np.float32)
    for name in ("", "a", "ab", "abc"):
        message = request([values[:7], values[7:]], model=name).SerializeToString()

        decoded = codec.decode(codec.parse(message), FEATURE_SCHEMA, LIMIT)

        assert np.shares_memory(decoded.rows.values, np.frombuffer(message, np.uint8))
        np.testing.assert_array_equal(decoded.rows.values, values)
        np.testing.assert_array_equal(decoded.rows.lengths, [7, 29_993])


@pytest.mark.parametrize("position", [0, 1, 29_999])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_large_message_with_a_number_that_is_not_finite_names_its_row(position, bad):
    """One bad number in a large message is found wherever it is; huge finite ones are no error."""
    values = np.full((30_000, 2), np.finfo(np.float32).max, np.float32)
    values[position, 1] = bad
    message = request([values[:1], values[1:]])

    [problem] = decode(message).problems

    assert (problem.row, problem.timestep) == (int(position > 0), max(position - 1, 0))
    values[position, 1] = 0
    assert decode(request([values[:1], values[1:]])).problems == []


@settings(max_examples=60, deadline=None)
@given(values=hnp.arrays(np.float16, (3, 2), elements=st.floats(width=16, allow_nan=False)))
def test_decode_widens_features_of_float16(values):
    """A model of float32 takes float16 features, each exactly; infinities are named as ever."""
    decoded = decode(request([values]))

    if np.isfinite(values).all():
        assert decoded.rows.values.dtype == np.float32
        np.testing.assert_array_equal(decoded.rows.values, values.astype(np.float32))
    else:
        assert [problem.expected for problem in decoded.problems] == ["finite numbers"]


@pytest.mark.parametrize(
    ("schema", "asked"),
    [
        (FEATURE_SCHEMA, pb.DATA_TYPE_FLOAT64),
        (FEATURE_SCHEMA, pb.DATA_TYPE_INT64),
        (FEATURE_SCHEMA, 77),
        (replace(FEATURE_SCHEMA, dtype="float64"), pb.DATA_TYPE_FLOAT16),
    ],
)
def test_decode_refuses_other_output_dtypes(schema, asked):
    """Only float16 for float32, and the model's own dtype, can be asked for."""
    values = np.ones((1, 2), schema.dtype)

    with pytest.raises(FieldError, match=f"output_dtype: expected {schema.dtype}"):
        decode(request([values], output_dtype=asked), schema)


@pytest.mark.parametrize("schema", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["row", "timestep"])
def test_encode_rounds_scores_to_float16_when_asked(schema):
    """Scores are rounded, the state is not; a row that float16 cannot hold has its own error."""
    rows = [np.ones((n, 2), np.float32) for n in (2, 3, 1, 2)]
    decoded = decode(request(rows, return_state=True, output_dtype=pb.DATA_TYPE_FLOAT16), schema)
    count = 8 if schema.output_per_timestep else 4
    output = np.random.default_rng(1).standard_normal((count, 2)).astype(np.float32)
    state = output[:4] + 1
    vectors = slice(2, 5) if schema.output_per_timestep else slice(1, 2)
    output[vectors][-1, 1] = -65520

    reply = pb.PredictResponse.FromString(
        codec.encode(decoded, answer_of(output, state), replace(MODEL, schema=schema))
    )

    np.testing.assert_array_equal(array(reply.rows), [0, 2, 3])
    np.testing.assert_array_equal(
        array(reply.output), np.delete(output, vectors, axis=0).astype(np.float16)
    )
    np.testing.assert_array_equal(array(reply.state), np.delete(state, 1, axis=0))
    [error] = reply.errors
    assert (error.row, error.code) == (1, 3)
    assert "65504" in error.message
    if schema.output_per_timestep:
        np.testing.assert_array_equal(array(reply.output_lengths), [2, 1, 2])


def test_encode_refuses_a_flood_of_scores_past_float16():
    """With more lost rows than a reply can list the request is refused, and told the way out."""
    count = validation.MAX_ROW_PROBLEMS + 1
    rows = np.ones((count, 2), np.float32)
    message = pb.PredictRequest(
        values=tensor(rows),
        lengths=tensor(np.ones(count, np.int64)),
        output_dtype=pb.DATA_TYPE_FLOAT16,
    )

    with pytest.raises(FieldError, match="output_dtype: expected float32"):
        codec.encode(decode(message), answer_of(rows * 1e6, rows), MODEL)


def test_encode_is_what_protobuf_writes():
    """The reply framed by hand is, byte for byte, the one that protobuf would write."""
    rows = [np.ones((2, 2), np.float32), np.full((1, 2), np.nan, np.float32)]
    decoded = decode(request(rows, return_state=True, request_id="r"), TIMESTEP_SCHEMA)
    output, state = np.ones((2, 2), np.float32), np.ones((1, 2), np.float32)

    encoded = codec.encode(
        decoded, answer_of(output, state), replace(MODEL, schema=TIMESTEP_SCHEMA), decode_s=0.125
    )

    reply = pb.PredictResponse.FromString(encoded)
    assert reply.timing.decode_s == 0.125
    assert 0 < reply.timing.encode_s < 10
    assert encoded == reply.SerializeToString(deterministic=True)
