"""Messages with their data lifted out mean what protobuf reads in them, right or wrong."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.framing import lift_data, tensor_field

TENSORS = {"values": 3, "lengths": 4, "state": 5}
TENSOR = st.none() | st.builds(
    pb.Tensor,
    dtype=st.sampled_from([0, 1, 5]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    data=st.binary(max_size=300),
)
REQUEST = st.builds(
    pb.PredictRequest,
    model=st.text(max_size=200),
    values=TENSOR,
    lengths=TENSOR,
    state=TENSOR,
    return_state=st.booleans(),
    request_id=st.text(max_size=3),
    output_dtype=st.integers(-5, 300),
)


def put_together(message):
    """The request with its data put back, or None where protobuf has to read it itself."""
    lifted = lift_data(message, TENSORS.values())
    if lifted is None:
        return None
    small, data = lifted
    request = pb.PredictRequest.FromString(small)
    for name, number in TENSORS.items():
        tensor = getattr(request, name)
        assert not tensor.data
        if number in data:
            tensor.data = bytes(data[number])
    return request


@settings(max_examples=300, deadline=None)
@given(request=REQUEST)
def test_lift_data_loses_nothing_of_a_request(request):
    """Every request as protobuf writes it is taken apart, and is itself when put together."""
    message = request.SerializeToString()

    assert put_together(message) == request
    small, data = lift_data(message, TENSORS.values())
    assert len(small) <= len(message) - sum(map(len, data.values()))


@settings(max_examples=800, deadline=None)
@given(request=REQUEST, data=st.data())
def test_lift_data_agrees_with_protobuf_on_damaged_bytes(request, data):
    """Of bytes changed, cut, put in or repeated, both read the same, or protobuf must."""
    message = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message)))
        match data.draw(st.integers(0, 3)):
            case 0:
                del message[at:]
            case 1:
                message[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case 2:
                message[at:at] = data.draw(st.binary(max_size=5))
            case 3:
                message += message[:at]
    message = bytes(message)

    try:
        expected = pb.PredictRequest.FromString(message)
    except DecodeError:
        with pytest.raises((DecodeError, AssertionError)):
            assert put_together(message) is not None
    else:
        assert put_together(message) in (None, expected)


def field(number, content):
    return pb.PredictRequest(**{number: content}).SerializeToString()


@pytest.mark.parametrize(
    "message",
    [
        field("values", pb.Tensor(data=b"1")) * 2,
        b"\x1a\x06\x1a\x01x\x1a\x01y",
        b"\x1a\x81\x00x",
        b"\x18\x01",
        b"\x0b\x0c",
        b"\x1a\x05\x1a",
        field("model", "m") * 65,
    ],
    ids=["twice", "data twice", "long varint", "not bytes", "group", "cut", "many fields"],
)
def test_lift_data_leaves_unusual_framing_to_protobuf(message):
    """What our clients do not write is read by protobuf as a whole."""
    assert lift_data(message, TENSORS.values()) is None


def test_lift_data_returns_views():
    """The data are not copied."""
    message = pb.PredictRequest(values=pb.Tensor(data=bytes(1000))).SerializeToString()

    _, data = lift_data(message, TENSORS.values())

    assert data[3].obj is message


@settings(max_examples=100, deadline=None)
@given(tensor=TENSOR.filter(lambda tensor: tensor is not None), number=st.integers(1, 5000))
@example(tensor=pb.Tensor(), number=3)
def test_tensor_field_is_what_protobuf_writes(tensor, number):
    """The pieces joined are the field's key, length, header and data."""
    header = pb.Tensor(dtype=tensor.dtype, shape=tensor.shape)
    half = len(tensor.data) // 2
    parts = [np.frombuffer(tensor.data[:half], np.uint8), tensor.data[half:]]

    framed = b"".join(tensor_field(number, header, parts, len(tensor.data)))

    content = tensor.SerializeToString()
    assert framed.endswith(content)
    wrapped = pb.PredictRequest(values=tensor).SerializeToString()
    if number == 3:
        assert framed == wrapped
    assert framed[len(framed) - len(wrapped) + 1 :] == wrapped[1:]
