"""Wire messages to packed rows and back. The only file that touches fields of predict messages.

Numbers are read as read-only numpy views over the message's bytes, which may be unaligned, and
copied once into the reply. Sizes are checked against each other, in Python's unbounded integers,
before an array is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.framing import Buffer, lift_data, tensor_field
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import InputError, OverloadedError
from qrnn_serve.engine.replica_status import ReplicaStatus
from qrnn_serve.engine.request import RowFailure, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, PackedRows
from qrnn_serve.server.half import outputs_in_half
from qrnn_serve.server.status import code_of
from qrnn_serve.server.validation import (
    FieldError,
    RowProblem,
    find_row_problems,
    without_rows,
)

_DTYPES = {
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    pb.DATA_TYPE_FLOAT64: np.dtype("<f8"),
    pb.DATA_TYPE_INT32: np.dtype("<i4"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
}
_LITTLE_ENDIAN = {dtype.newbyteorder("="): dtype for dtype in _DTYPES.values()}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}
_INTEGERS = (np.dtype("<i8"), np.dtype("<i4"))
_FLOAT32, _FLOAT16 = np.dtype("<f4"), np.dtype("<f2")
_TENSORS = {
    name: pb.PredictRequest.DESCRIPTOR.fields_by_name[name].number
    for name in ("values", "lengths", "state")
}
# Below, protobuf's own copies take less time than finding the data by hand.
_LIFT_BYTES = 32 << 10
# protobuf takes up to 17 times the bytes that it reads: a shape of ones, 8 for each in steps.
_MAX_PARSED_BYTES = 4 << 20
# Room for everything in a reply beside its large tensors.
_REPLY_OVERHEAD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A message that is a PredictRequest, and no more is known of it.

    Attributes:
        fields: The message. Its tensors may lack their data.
        data: Those data, as views of the message's bytes, by the tensors' field numbers.
    """

    fields: pb.PredictRequest
    data: Mapping[int, memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRequest:
    """A request whose wrong rows were set aside.

    Attributes:
        rows: The good rows; None when there is none.
        indices: Their indices in the request, ascending, [G] int64.
        problems: The wrong rows.
        output_dtype: The numbers that the caller wants its scores in.
        return_state: Whether the caller asked for the state.
        request_id: The caller's name for the request.
    """

    rows: PackedRows | None
    indices: npt.NDArray[np.int64]
    problems: list[RowProblem]
    output_dtype: np.dtype[Any]
    return_state: bool
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What a reply says of the model that made it, beside what the engine reports."""

    name: str
    version: str
    schema: ModelSchema


def parse(message: bytes) -> ParsedRequest:
    """Read a PredictRequest, in a time that does not depend on how much data it carries.

    Raises:
        InputError: The bytes are not one, or too many of them are not data of its tensors.
    """
    lifted = None
    if len(message) >= _LIFT_BYTES:
        lifted = lift_data(message, _TENSORS.values())
    small, data = lifted or (message, {})
    if len(small) > _MAX_PARSED_BYTES:
        raise InputError(
            f"the message: expected at most {_MAX_PARSED_BYTES} bytes beside the data of values, "
            f"lengths and state, each given once, got {len(small)}"
        )
    try:
        return ParsedRequest(fields=pb.PredictRequest.FromString(small), data=data)
    except DecodeError as error:
        raise InputError("the message is not a qrnn_serve.v1.PredictRequest") from error


def decode(request: ParsedRequest, schema: ModelSchema, max_row_timesteps: int) -> DecodedRequest:
    """Check a request against the model and make packed rows of it.

    Raises:
        FieldError: A tensor is missing, has the wrong dtype, rank, width or byte count, or the
            lengths do not sum to the timesteps: nothing can be scored.
        OverloadedError: The reply would be larger than a message may be.
    """
    fields = request.fields
    output_dtype = _output_dtype(fields, schema)
    lengths = _lengths(request)
    values = _values(request, schema)
    _check_sum(lengths, len(values))
    state = _state(request, schema, len(lengths))
    rows = PackedRows(values=values, lengths=lengths, state=state)
    problems = find_row_problems(rows, schema, max_row_timesteps)
    rows, indices = without_rows(rows, problems)
    decoded = DecodedRequest(
        rows=rows if rows.rows else None,
        indices=indices,
        problems=problems,
        output_dtype=output_dtype,
        return_state=fields.return_state,
        request_id=fields.request_id,
    )
    _check_reply_size(decoded, schema)
    return decoded


def encode(
    decoded: DecodedRequest,
    answer: ScoredRequest | None,
    model: ModelIdentity,
    decode_s: float = 0.0,
) -> bytes:
    """The serialized PredictResponse; `answer` is None when no row was good.

    Raises:
        FieldError: Too many rows have scores past what float16 holds, and that was asked for.
    """
    started_s = time.monotonic()
    schema = model.schema
    tail = pb.PredictResponse(request_id=decoded.request_id)
    failures: tuple[RowFailure, ...] = ()
    if answer is not None and decoded.rows is not None:
        if decoded.output_dtype != np.dtype(schema.dtype):
            answer = outputs_in_half(answer, decoded.rows, schema)
        failures = answer.failures
        tail.device, tail.engine = answer.device, answer.engine
    if answer is not None and decoded.rows is not None and answer.scored is not None:
        scored_rows, lengths = decoded.indices, decoded.rows.lengths
        if len(answer.rows) < len(scored_rows):
            scored_rows, lengths = scored_rows[answer.rows], lengths[answer.rows]
        output, state = answer.scored.output, answer.scored.state
    else:
        scored_rows = lengths = np.zeros(0, np.int64)
        output = np.zeros((0, schema.output_size), decoded.output_dtype)
        state = np.zeros((0, schema.state_size), schema.dtype)
    reply = pb.PredictResponse
    head = reply(model=model.name, version=model.version)
    pieces = [head.SerializeToString(), *_field(reply.ROWS_FIELD_NUMBER, scored_rows)]
    pieces += _field(reply.OUTPUT_FIELD_NUMBER, output)
    if schema.output_per_timestep:
        pieces += _field(reply.OUTPUT_LENGTHS_FIELD_NUMBER, lengths)
    if decoded.return_state:
        pieces += _field(reply.STATE_FIELD_NUMBER, state)
    if decoded.problems or failures:
        tail.errors.extend(_row_errors(decoded, failures))
    if answer is not None:
        _put_timing(tail.timing, answer, decode_s)
        tail.timing.encode_s = time.monotonic() - started_s
    return b"".join([*pieces, tail.SerializeToString()])


def model_info(
    model: ModelIdentity, engine: str, replicas: Sequence[ReplicaStatus]
) -> pb.ModelInfo:
    """What ListModels says of a model."""
    schema = model.schema
    return pb.ModelInfo(
        name=model.name,
        version=model.version,
        takes_ids=schema.takes_ids,
        input_size=schema.input_size,
        vocabulary_size=schema.vocabulary_size,
        output_name=schema.output_name,
        output_size=schema.output_size,
        output_per_timestep=schema.output_per_timestep,
        state_size=schema.state_size,
        engine=engine,
        devices=[replica.device for replica in replicas],
        weights_sha256=schema.weights_sha256,
        dtype=_DATA_TYPES[np.dtype(schema.dtype)],
        replicas=[
            pb.ReplicaStatus(
                device=replica.device,
                state=f"REPLICA_STATE_{replica.state.name}",
                restarts=replica.restarts,
                last_error=replica.last_error,
            )
            for replica in replicas
        ],
    )


def _output_dtype(fields: pb.PredictRequest, schema: ModelSchema) -> np.dtype[Any]:
    own = np.dtype(schema.dtype)
    asked = fields.output_dtype
    if asked in (pb.DATA_TYPE_UNSPECIFIED, _DATA_TYPES[own]):
        return own
    if asked != pb.DATA_TYPE_FLOAT16 or own != _FLOAT32:
        raise FieldError(
            "output_dtype",
            expected=" or ".join(dtype.name for dtype in _float_dtypes(schema)),
            got=_dtype_name(asked),
        )
    return _FLOAT16


def _float_dtypes(schema: ModelSchema) -> tuple[np.dtype[Any], ...]:
    """What features and outputs may be: the model's dtype, or half of float32."""
    own = np.dtype(schema.dtype)
    return (own, _FLOAT16) if own == _FLOAT32 else (own,)


def _lengths(request: ParsedRequest) -> npt.NDArray[np.int64]:
    if not request.fields.HasField("lengths"):
        raise FieldError("lengths", expected="int64 [rows]", got="nothing")
    lengths = _view(request, "lengths", _INTEGERS, (None,))
    if not len(lengths):
        raise FieldError("lengths", expected="at least one row", got="none")
    return lengths.astype(np.int64, copy=False)


def _values(request: ParsedRequest, schema: ModelSchema) -> npt.NDArray[np.generic]:
    dtypes = _INTEGERS if schema.takes_ids else _float_dtypes(schema)
    shape = (None, *schema.timestep_shape)
    if not request.fields.HasField("values"):
        raise FieldError("values", expected=_describe(dtypes, shape), got="nothing")
    values = _view(request, "values", dtypes, shape)
    return values.astype(np.int64 if schema.takes_ids else schema.dtype, copy=False)


def _state(
    request: ParsedRequest, schema: ModelSchema, rows: int
) -> npt.NDArray[np.generic] | None:
    if not request.fields.HasField("state"):
        return None
    return _view(request, "state", (np.dtype(schema.dtype),), (rows, schema.state_size))


def _view(
    request: ParsedRequest,
    field: str,
    dtypes: tuple[np.dtype[Any], ...],
    shape: tuple[int | None, ...],
) -> npt.NDArray[np.generic]:
    """A read-only array over the tensor's bytes; None in `shape` is any size."""
    tensor: pb.Tensor = getattr(request.fields, field)
    sizes = tuple(tensor.shape[: len(shape) + 1])
    dtype = _DTYPES.get(tensor.dtype)
    fits = len(sizes) == len(shape) and all(
        size >= 0 and (expected is None or expected == size)
        for size, expected in zip(sizes, shape, strict=True)
    )
    if dtype is None or dtype not in dtypes or not fits:
        raise FieldError(field, expected=_describe(dtypes, shape), got=_received(tensor, sizes))
    data = request.data.get(_TENSORS[field])
    if data is None:
        # One access: each makes a copy of the bytes.
        data = tensor.data
    expected_bytes = math.prod(sizes) * dtype.itemsize
    if len(data) != expected_bytes:
        raise FieldError(
            field,
            expected=f"{expected_bytes} bytes for {_received(tensor, sizes)}",
            got=f"{len(data)} bytes",
        )
    return np.frombuffer(data, dtype).reshape(sizes)


def _check_sum(lengths: npt.NDArray[np.int64], timesteps: int) -> None:
    # Each alone first, so that the sum cannot overflow.
    longest = int(lengths.max())
    too_long = longest > timesteps
    total = 0 if too_long else int(np.maximum(lengths, 0).sum())
    if too_long or total != timesteps:
        got = f"a row of {longest}" if too_long else f"a sum of {total}"
        raise FieldError(
            "lengths", expected=f"a sum of {timesteps}, the timesteps in values", got=got
        )


def _check_reply_size(decoded: DecodedRequest, schema: ModelSchema) -> None:
    rows = decoded.rows
    if rows is None:
        return
    vectors = rows.timesteps if schema.output_per_timestep else rows.rows
    nbytes = vectors * schema.output_size * decoded.output_dtype.itemsize
    nbytes += len(decoded.request_id.encode())
    if decoded.return_state:
        nbytes += rows.rows * schema.state_size * np.dtype(schema.dtype).itemsize
    limit = MAX_MESSAGE_BYTES - _REPLY_OVERHEAD_BYTES
    if nbytes > limit:
        raise OverloadedError(
            f"the reply to {rows.rows} rows of {rows.timesteps} timesteps would hold {nbytes} "
            f"bytes of scores; a reply holds at most {limit}; send fewer rows a call",
            retry_after_s=math.inf,
        )


def _put_timing(timing: pb.Timing, answer: ScoredRequest, decode_s: float) -> None:
    timing.decode_s = decode_s
    timing.queue_s = answer.timing.queue_s
    timing.upload_s = answer.timing.upload_s
    timing.compute_s = answer.timing.compute_s
    timing.download_s = answer.timing.download_s
    timing.batch_rows = answer.timing.batch_rows
    timing.batch_timesteps = answer.timing.batch_timesteps


def _row_errors(decoded: DecodedRequest, failures: tuple[RowFailure, ...]) -> list[pb.RowError]:
    errors = [
        pb.RowError(
            row=problem.row,
            code=code_of(OverloadedError if problem.too_large else InputError).value[0],
            message=problem.message,
            field=problem.field,
            expected=problem.expected,
            got=problem.got,
            timestep=problem.timestep,
        )
        for problem in decoded.problems
    ]
    errors.extend(
        pb.RowError(
            row=int(decoded.indices[failure.row]),
            code=code_of(type(failure.error)).value[0],
            message=str(failure.error),
            timestep=-1,
        )
        for failure in failures
    )
    return sorted(errors, key=lambda error: error.row)


def _field(number: int, array: npt.NDArray[np.generic]) -> list[Buffer]:
    # Little-endian where the machine is not, too; no copy on any other.
    array = np.ascontiguousarray(array, _LITTLE_ENDIAN[array.dtype])
    dtype = array.dtype
    header = pb.Tensor(dtype=_DATA_TYPES[dtype], shape=array.shape)
    return tensor_field(number, header, [array], array.nbytes)


def _received(tensor: pb.Tensor, sizes: tuple[int, ...]) -> str:
    """Dtype and shape that came, as text; `sizes` are the first of them."""
    more = len(tensor.shape) > len(sizes)
    return f"{_dtype_name(tensor.dtype)} {_sizes_text(sizes, more=more)}"


def _dtype_name(data_type: pb.DataType) -> str:
    if data_type in pb.DataType.values():
        return pb.DataType.Name(data_type).removeprefix("DATA_TYPE_").lower()
    return f"dtype {data_type}"


def _describe(dtypes: tuple[np.dtype[Any], ...], shape: tuple[int | None, ...]) -> str:
    return f"{' or '.join(dtype.name for dtype in dtypes)} {_sizes_text(shape)}"


def _sizes_text(sizes: tuple[int | None, ...], *, more: bool = False) -> str:
    texts = ["any" if size is None else str(size) for size in sizes]
    return f"[{', '.join(texts + ['...'] * more)}]"
