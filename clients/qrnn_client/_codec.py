"""Calls to bytes, and replies to arrays that were checked against their call.

Each number is copied once, from the caller's array into the message, and read where it lies in the
reply, or copied once from there where it lies unaligned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from qrnn_client._dtypes import DType, dtype_of_name, dtype_of_wire, is_bfloat16, wire_of_dtype
from qrnn_client._errors import ModelChangedError, ProtocolError
from qrnn_client._models import ModelInfo
from qrnn_client._prediction import RowError
from qrnn_client._rows import Array, Indices, RowSet
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.framing import lift_data, tensor_field

# Below, protobuf's own copies take less time than finding the data by hand.
_LIFT_BYTES = 32 << 10
_TENSORS = {
    name: pb.PredictResponse.DESCRIPTOR.fields_by_name[name].number
    for name in ("rows", "output", "output_lengths", "state")
}
_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request: some rows of a row set, for one model.

    Attributes:
        info: The model that the rows were checked against.
        version: Version to ask for; empty for the one that serves.
        rows: The row set.
        part: Which of its rows.
        return_state: Ask for the rows' states.
        request_id: Echoed by the server.
    """

    info: ModelInfo
    version: str
    rows: RowSet
    part: slice
    return_state: bool
    request_id: str

    @property
    def index(self) -> Indices:
        """The caller's index of each row of this call."""
        return self.rows.index[self.part]

    @property
    def lengths(self) -> Indices:
        """The timesteps of each row of this call."""
        return self.rows.lengths[self.part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A message that is a PredictResponse, and no more is known of it.

    Attributes:
        fields: The message. Its tensors may lack their data.
        data: Those data, as views of the message's bytes, by the tensors' field numbers.
    """

    fields: pb.PredictResponse
    data: Mapping[int, memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply whose rows and errors name every row of its call exactly once.

    Attributes:
        index: [G] the caller's index of each scored row, ascending.
        output: [G, C], or [N, C] for a model with one vector a timestep.
        lengths: [G] timesteps of each scored row.
        state: [G, S] when it was asked for.
        errors: The other rows, by the caller's index.
        timing: Where its time went on the server.
        device: Where it ran.
        engine: By which engine.
    """

    index: Indices
    output: Array
    lengths: Indices
    state: Array | None
    errors: tuple[RowError, ...]
    timing: pb.Timing
    device: str
    engine: str


def encode_call(call: Call) -> bytes:
    """Return the PredictRequest of `call`, as protobuf itself would write it."""
    rows, part = call.rows, call.part
    timesteps = int(call.lengths.sum())
    shape = (timesteps, rows.width) if rows.width else (timesteps,)
    head = pb.PredictRequest(model=call.info.name, version=call.version)
    tail = pb.PredictRequest(return_state=call.return_state, request_id=call.request_id)
    if call.info.wire_dtype != call.info.dtype:
        tail.output_dtype = wire_of_dtype(dtype_of_name(call.info.wire_dtype))
    buffers = rows.values.buffers(part.start, part.stop)
    pieces: list[Any] = [
        head.SerializeToString(),
        *_tensor_field(pb.PredictRequest.VALUES_FIELD_NUMBER, rows.dtype, shape, buffers),
        *_array_field(pb.PredictRequest.LENGTHS_FIELD_NUMBER, call.lengths),
    ]
    if rows.states is not None:
        pieces += _array_field(pb.PredictRequest.STATE_FIELD_NUMBER, rows.states[part])
    return b"".join([*pieces, tail.SerializeToString()])


def parse_reply(message: bytes) -> Reply:
    """Read a PredictResponse, in a time that does not depend on how much data it carries.

    Raises:
        DecodeError: The bytes are not one.
    """
    lifted = None
    if len(message) >= _LIFT_BYTES:
        lifted = lift_data(message, _TENSORS.values())
    small, data = lifted or (message, {})
    return Reply(fields=pb.PredictResponse.FromString(small), data=data)


def decode_reply(reply: Reply, call: Call) -> Answer:
    """Return the reply as read-only arrays.

    Raises:
        ModelChangedError: Another version answered than the one the rows were checked against.
        ProtocolError: The reply does not fit the call.
    """
    response = reply.fields
    _check_sender(response, call)
    info = call.info
    rows = _read_integers(reply, "rows")
    _check_rows(rows, [error.row for error in response.errors], len(call.index))
    lengths = call.lengths[rows]
    vectors = len(rows)
    if info.output_per_timestep:
        vectors = int(lengths.sum())
        if not np.array_equal(_read_integers(reply, "output_lengths"), lengths):
            raise ProtocolError("output_lengths: expected the timesteps of the scored rows as sent")
    state = None
    if call.return_state:
        state = _read_floats(reply, "state", (len(rows), info.state_size), info.dtype)
    return Answer(
        index=call.index[rows],
        output=_read_floats(reply, "output", (vectors, info.output_size), info.wire_dtype),
        lengths=lengths,
        state=state,
        errors=tuple(_row_error(error, int(call.index[error.row])) for error in response.errors),
        timing=response.timing,
        device=response.device,
        engine=response.engine,
    )


def _array_field(number: int, array: Array) -> list[Any]:
    buffer = array.view(np.uint16) if is_bfloat16(array.dtype) else array
    return _tensor_field(number, array.dtype, array.shape, [buffer])


def _tensor_field(
    number: int, dtype: DType, shape: tuple[int, ...], buffers: list[Array]
) -> list[Any]:
    """Return the pieces of a Tensor field whose data are `buffers` end to end."""
    header = pb.Tensor(dtype=wire_of_dtype(dtype), shape=shape)
    return tensor_field(number, header, buffers, math.prod(shape) * dtype.itemsize)


def _check_sender(response: pb.PredictResponse, call: Call) -> None:
    if response.request_id != call.request_id:
        raise ProtocolError(
            f"request_id: expected {call.request_id!r}, got {response.request_id!r}"
        )
    if response.model != call.info.name:
        raise ProtocolError(f"model: expected {call.info.name!r}, got {response.model!r}")
    if response.version != call.info.version:
        raise ModelChangedError(
            f"model {call.info.name!r}: rows were checked against version {call.info.version!r}, "
            f"but version {response.version!r} answered. Send them again"
        )


def _check_rows(rows: Indices, error_rows: list[int], sent: int) -> None:
    """Check that scored and failed rows together are each row of the call exactly once."""
    everyone = np.arange(sent)
    if not error_rows and np.array_equal(rows, everyone):
        return
    named = np.concatenate([rows, np.array(error_rows, np.int64)])
    if not np.array_equal(np.sort(named), everyone):
        missing = np.setdiff1d(everyone, named)[:5].tolist()
        values, counts = np.unique(named, return_counts=True)
        extra = values[(counts > 1) | (values < 0) | (values >= sent)][:5].tolist()
        raise ProtocolError(
            f"rows: expected each of {sent} rows once among rows and errors; "
            f"missing {missing}, unknown or repeated {extra}"
        )
    if not bool(np.all(rows[1:] > rows[:-1])):
        raise ProtocolError(f"rows: expected them ascending, got {rows[:20].tolist()}")


def _read_integers(reply: Reply, field: str) -> Indices:
    tensor, data = _tensor_of(reply, field)
    if len(tensor.shape) > 1:
        raise ProtocolError(f"{field}: expected rank 1, got shape {list(tensor.shape)}")
    if not tensor.shape and not data:
        return np.zeros(0, np.int64)
    array = _array(tensor, data, field)
    if array.dtype.kind != "i":
        raise ProtocolError(f"{field}: expected int64, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def _read_floats(reply: Reply, field: str, shape: tuple[int, ...], dtype: str) -> Array:
    tensor, data = _tensor_of(reply, field)
    if not tensor.shape and not data and 0 in shape:
        return np.zeros(shape, dtype_of_name(dtype))
    array = _array(tensor, data, field)
    if array.shape != shape or array.dtype != dtype_of_name(dtype):
        raise ProtocolError(
            f"{field}: expected {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}"
        )
    return array


def _tensor_of(reply: Reply, field: str) -> tuple[pb.Tensor, bytes | memoryview]:
    """Return a tensor without its data, and its data."""
    tensor: pb.Tensor = getattr(reply.fields, field)
    data = reply.data.get(_TENSORS[field])
    # One access: each makes a copy of the bytes.
    return tensor, tensor.data if data is None else data


def _array(tensor: pb.Tensor, data: bytes | memoryview, field: str) -> Array:
    """Return the tensor as a read-only array, after counting its bytes."""
    try:
        dtype = dtype_of_wire(tensor.dtype)
    except ProtocolError as error:
        raise ProtocolError(f"{field}: {error}") from None
    shape = tuple(tensor.shape)
    expected_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or len(data) != expected_bytes:
        raise ProtocolError(
            f"{field}: {dtype} {list(shape)} takes {expected_bytes} bytes, got {len(data)}"
        )
    array = np.frombuffer(data, dtype).reshape(shape)
    if not array.flags.aligned:
        # Not every library takes such arrays from the caller.
        array = array.copy()
        array.flags.writeable = False
    return array


def _row_error(error: pb.RowError, row: int) -> RowError:
    # The server's own words name the row by its place in this call, which means nothing here.
    spelled_out = f"{error.field}: expected {error.expected}, got {error.got}"
    return RowError(
        row=row,
        code=_CODE_NAMES.get(error.code, f"CODE_{error.code}"),
        message=spelled_out if error.expected and error.got else error.message,
        field=error.field,
        expected=error.expected,
        got=error.got,
        timestep=error.timestep if error.timestep >= 0 else None,
    )
