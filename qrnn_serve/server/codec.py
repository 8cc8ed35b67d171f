"""Wire messages to packed rows and back. The only file that touches fields of predict messages.

Numbers are read as read-only numpy views over the message's bytes and written as one block of bytes
a tensor. Sizes are checked against each other, in Python's unbounded integers, before an array is
made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import InputError, OverloadedError
from qrnn_serve.engine.request import RowFailure, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, PackedRows
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
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}
_INTEGERS = (np.dtype("<i8"), np.dtype("<i4"))
# Room for everything in a reply beside its large tensors.
_REPLY_OVERHEAD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRequest:
    """A request whose wrong rows were set aside.

    Attributes:
        rows: The good rows; None when there is none.
        indices: Their indices in the request, ascending, [G] int64.
        problems: The wrong rows.
        return_state: Whether the caller asked for the state.
        request_id: The caller's name for the request.
    """

    rows: PackedRows | None
    indices: npt.NDArray[np.int64]
    problems: list[RowProblem]
    return_state: bool
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What a reply says of the model that made it, beside what the engine reports."""

    name: str
    version: str
    schema: ModelSchema


def parse(message: bytes) -> pb.PredictRequest:
    """Read a PredictRequest.

    Raises:
        InputError: The bytes are not one.
    """
    try:
        return pb.PredictRequest.FromString(message)
    except DecodeError as error:
        raise InputError("the message is not a qrnn_serve.v1.PredictRequest") from error


def decode(
    request: pb.PredictRequest, schema: ModelSchema, max_row_timesteps: int
) -> DecodedRequest:
    """Check a request against the model and make packed rows of it.

    Raises:
        FieldError: A tensor is missing, has the wrong dtype, rank, width or byte count, or the
            lengths do not sum to the timesteps: nothing can be scored.
        OverloadedError: The reply would be larger than a message may be.
    """
    lengths = _lengths(request)
    values = _values(request, schema)
    _check_sum(lengths, len(values))
    state = _state(request, schema, len(lengths))
    rows = PackedRows(values=values, lengths=lengths, state=state)
    problems = find_row_problems(rows, schema, max_row_timesteps)
    rows, indices = without_rows(rows, problems)
    _check_reply_size(rows, schema, return_state=request.return_state)
    return DecodedRequest(
        rows=rows if rows.rows else None,
        indices=indices,
        problems=problems,
        return_state=request.return_state,
        request_id=request.request_id,
    )


def encode(decoded: DecodedRequest, answer: ScoredRequest | None, model: ModelIdentity) -> bytes:
    """The serialized PredictResponse; `answer` is None when no row was good."""
    schema = model.schema
    response = pb.PredictResponse(
        model=model.name, version=model.version, request_id=decoded.request_id
    )
    failures: tuple[RowFailure, ...] = ()
    scored_rows = np.zeros(0, np.int64)
    output = np.zeros((0, schema.output_size), schema.dtype)
    state = np.zeros((0, schema.state_size), schema.dtype)
    lengths = np.zeros(0, np.int64)
    if answer is not None:
        failures = answer.failures
        response.device, response.engine = answer.device, answer.engine
        response.timing.CopyFrom(_timing(answer))
        if answer.scored is not None and decoded.rows is not None:
            scored_rows = decoded.indices[answer.rows]
            lengths = decoded.rows.lengths[answer.rows]
            output, state = answer.scored.output, answer.scored.state
    _put(response.rows, scored_rows)
    _put(response.output, output)
    if schema.output_per_timestep:
        _put(response.output_lengths, lengths)
    if decoded.return_state:
        _put(response.state, state)
    response.errors.extend(_row_errors(decoded, failures))
    return response.SerializeToString()


def model_info(model: ModelIdentity, engine: str, devices: tuple[str, ...]) -> pb.ModelInfo:
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
        devices=devices,
        weights_sha256=schema.weights_sha256,
        dtype=_DATA_TYPES[np.dtype(schema.dtype)],
    )


def _lengths(request: pb.PredictRequest) -> npt.NDArray[np.int64]:
    if not request.HasField("lengths"):
        raise FieldError("lengths", expected="int64 [rows]", got="nothing")
    lengths = _view("lengths", request.lengths, _INTEGERS, (None,))
    if not len(lengths):
        raise FieldError("lengths", expected="at least one row", got="none")
    return lengths.astype(np.int64, copy=False)


def _values(request: pb.PredictRequest, schema: ModelSchema) -> npt.NDArray[np.generic]:
    dtypes = _INTEGERS if schema.takes_ids else (np.dtype(schema.dtype),)
    shape = (None, *schema.timestep_shape)
    if not request.HasField("values"):
        raise FieldError("values", expected=_describe(dtypes, shape), got="nothing")
    values = _view("values", request.values, dtypes, shape)
    return values.astype(np.int64, copy=False) if schema.takes_ids else values


def _state(
    request: pb.PredictRequest, schema: ModelSchema, rows: int
) -> npt.NDArray[np.generic] | None:
    if not request.HasField("state"):
        return None
    return _view("state", request.state, (np.dtype(schema.dtype),), (rows, schema.state_size))


def _view(
    field: str, tensor: pb.Tensor, dtypes: tuple[np.dtype[Any], ...], shape: tuple[int | None, ...]
) -> npt.NDArray[np.generic]:
    """A read-only array over the tensor's bytes; None in `shape` is any size."""
    sizes = tuple(tensor.shape[: len(shape) + 1])
    dtype = _DTYPES.get(tensor.dtype)
    fits = len(sizes) == len(shape) and all(
        size >= 0 and (expected is None or expected == size)
        for size, expected in zip(sizes, shape, strict=True)
    )
    if dtype is None or dtype not in dtypes or not fits:
        raise FieldError(field, expected=_describe(dtypes, shape), got=_received(tensor, sizes))
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
    too_long = int(lengths.max()) > timesteps
    total = None if too_long else int(np.maximum(lengths, 0).sum())
    if total != timesteps:
        got = f"a row of {int(lengths.max())}" if too_long else f"a sum of {total}"
        raise FieldError(
            "lengths", expected=f"a sum of {timesteps}, the timesteps in values", got=got
        )


def _check_reply_size(rows: PackedRows, schema: ModelSchema, *, return_state: bool) -> None:
    vectors = rows.timesteps if schema.output_per_timestep else rows.rows
    numbers = vectors * schema.output_size + rows.rows * schema.state_size * return_state
    nbytes = numbers * np.dtype(schema.dtype).itemsize
    limit = MAX_MESSAGE_BYTES - _REPLY_OVERHEAD_BYTES
    if nbytes > limit:
        raise OverloadedError(
            f"the reply to {rows.rows} rows of {rows.timesteps} timesteps would hold {nbytes} "
            f"bytes of scores; a reply holds at most {limit}; send fewer rows a call",
            retry_after_s=math.inf,
        )


def _timing(answer: ScoredRequest) -> pb.Timing:
    timing = answer.timing
    return pb.Timing(
        queue_s=timing.queue_s,
        compute_s=timing.compute_s,
        batch_rows=timing.batch_rows,
        batch_timesteps=timing.batch_timesteps,
    )


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


def _put(tensor: pb.Tensor, array: npt.NDArray[np.generic]) -> None:
    tensor.dtype = _DATA_TYPES[array.dtype.newbyteorder("<")]
    tensor.shape.extend(array.shape)
    tensor.data = array.tobytes()


def _received(tensor: pb.Tensor, sizes: tuple[int, ...]) -> str:
    """Dtype and shape that came, as text; `sizes` are the first of them."""
    name = f"dtype {tensor.dtype}"
    if tensor.dtype in pb.DataType.values():
        name = pb.DataType.Name(tensor.dtype).removeprefix("DATA_TYPE_").lower()
    return f"{name} {_sizes_text(sizes, more=len(tensor.shape) > len(sizes))}"


def _describe(dtypes: tuple[np.dtype[Any], ...], shape: tuple[int | None, ...]) -> str:
    return f"{' or '.join(dtype.name for dtype in dtypes)} {_sizes_text(shape)}"


def _sizes_text(sizes: tuple[int | None, ...], *, more: bool = False) -> str:
    texts = ["any" if size is None else str(size) for size in sizes]
    return f"[{', '.join(texts + ['...'] * more)}]"
