"""Random and damaged Predict messages, and what must hold of each in the real decoder.

A message starts as a good request for one of SCHEMAS; its fields are set to what nobody should
send, then its bytes are cut, changed, doubled or mixed with those of another. `check` sends it
through framing, parsing, validation and encoding, and compares with protobuf's own reading of the
whole message and with plain loops over its rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.framing import lift_data
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import InputError, OverloadedError
from qrnn_serve.engine.request import BatchTiming, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, ScoredRows
from qrnn_serve.server import codec
from qrnn_serve.server.codec import DecodedRequest, ModelIdentity

MAX_ROW_TIMESTEPS = 10_000
TENSORS = ("values", "lengths", "state")
_TENSOR_NUMBERS = [pb.PredictRequest.DESCRIPTOR.fields_by_name[name].number for name in TENSORS]
_DTYPES = {
    "float32": pb.DATA_TYPE_FLOAT32,
    "float16": pb.DATA_TYPE_FLOAT16,
    "int32": pb.DATA_TYPE_INT32,
    "int64": pb.DATA_TYPE_INT64,
}
_NAMES = {data_type: name for name, data_type in _DTYPES.items()}
_ODD_NUMBERS = [0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63)]
_LARGE_SHARE = 0.02
"""Of the messages, those whose data are long enough to be found by hand."""


def _schema(**facts: Any) -> ModelSchema:
    defaults: dict[str, Any] = {
        "takes_ids": False,
        "input_size": 3,
        "vocabulary_size": 0,
        "dtype": "float32",
        "output_name": "output",
        "output_size": 2,
        "output_per_timestep": False,
        "state_size": 5,
        "weights_sha256": "0" * 64,
    }
    return ModelSchema(**defaults | facts)


SCHEMAS = (
    _schema(),
    _schema(output_per_timestep=True),
    _schema(takes_ids=True, input_size=0, vocabulary_size=10),
    _schema(takes_ids=True, input_size=2, vocabulary_size=10),
)


class Finding(Exception):  # noqa: N818  what a fuzzer finds
    """A message that breaks what must hold."""


class Fuzzer:
    """Makes messages; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._before = b""

    def message(self, schema: ModelSchema) -> bytes:
        """The next message for a model of that schema: good, wrong or damaged."""
        request = self._good(schema)
        for _ in range(self._choose([0, 1, 1, 1, 2, 3])):
            self._choose(_SPOILERS)(self._random, request)
        message = request.SerializeToString()
        for _ in range(self._choose([0, 0, 0, 1, 2])):
            message = self._damaged(message)
        self._before = message[:4096]
        return message[:MAX_MESSAGE_BYTES]

    def _good(self, schema: ModelSchema) -> pb.PredictRequest:
        random = self._random
        most = 4000 if random.random() < _LARGE_SHARE else 6
        lengths = random.integers(1, most, int(random.integers(1, 8)))
        shape = (int(lengths.sum()), *schema.timestep_shape)
        if schema.takes_ids:
            dtype = self._choose(["int32", "int64"])
            values = random.integers(0, schema.vocabulary_size, shape).astype(dtype)
        else:
            dtype = self._choose(["float32", "float32", "float16"])
            values = random.standard_normal(shape).astype(dtype)
        request = pb.PredictRequest(
            values=_tensor(values),
            lengths=_tensor(lengths.astype(self._choose(["int32", "int64"]))),
            return_state=bool(random.integers(2)),
            request_id=self._choose(["", "a", "row 7"]),
            output_dtype=self._choose([pb.DATA_TYPE_UNSPECIFIED, pb.DATA_TYPE_FLOAT16]),
        )
        if random.integers(2):
            state = random.standard_normal((len(lengths), schema.state_size))
            request.state.CopyFrom(_tensor(state.astype(np.float32)))
        return request

    def _damaged(self, message: bytes) -> bytes:
        random, data = self._random, bytearray(message)
        at = int(random.integers(0, len(data) + 1))
        match int(random.integers(0, 9)):
            case 0:
                return random.bytes(int(random.integers(0, 200)))
            case 1:
                return bytes(data[:at])
            case 2:
                data[at:at] = random.bytes(int(random.integers(1, 9)))
            case 3:
                return message + self._before
            case 4:
                return message[:at] + self._before[int(random.integers(0, 64)) :]
            case 5:
                return message + message
            case 6:
                # A field that nobody knows: number, varint, length or group.
                data[at:at] = self._choose(
                    [b"\xf8\x07\x01", b"\xfa\x07\x02ab", b"\xfb\x07\xfc\x07"]
                )
            case 7:
                # A varint longer than it need be, or without end.
                data[at:at] = b"\x80" * int(random.integers(1, 12))
            case _:
                for place in random.integers(0, max(len(data), 1), int(random.integers(1, 6))):
                    if data:
                        data[place] = int(random.integers(0, 256))
        return bytes(data)

    def _choose(self, choices: Sequence[Any]) -> Any:
        return choices[int(self._random.integers(len(choices)))]


def _spoil_dtype(random: np.random.Generator, request: pb.PredictRequest) -> None:
    data_type: Any = int(random.choice([0, 1, 2, 3, 4, 5, 6, 7, 99, -1]))
    _any_tensor(random, request).dtype = data_type


def _spoil_shape(random: np.random.Generator, request: pb.PredictRequest) -> None:
    shape = _any_tensor(random, request).shape
    match int(random.integers(0, 4)):
        case 0:
            shape.append(int(random.choice(_ODD_NUMBERS)))
        case 1:
            del shape[:]
        case 2:
            shape.extend([1] * int(random.integers(1, 300)))
        case _:
            for place in range(len(shape)):
                shape[place] = int(random.choice(_ODD_NUMBERS))


def _spoil_data(random: np.random.Generator, request: pb.PredictRequest) -> None:
    tensor = _any_tensor(random, request)
    data = tensor.data
    match int(random.integers(0, 3)):
        case 0:
            tensor.data = data[: int(random.integers(0, len(data) + 1))]
        case 1:
            tensor.data = data + random.bytes(int(random.integers(1, 50)))
        case _:
            tensor.data = random.bytes(len(data))


def _spoil_numbers(random: np.random.Generator, request: pb.PredictRequest) -> None:
    """One number, so that its row is wrong and the others are not."""
    for tensor in (request.values, request.state):
        dtype = np.dtype(_NAMES.get(tensor.dtype, "int64"))
        array = _whole_numbers(tensor.data, dtype)
        if len(array):
            odd: list[Any] = _ODD_NUMBERS if array.dtype.kind == "i" else [np.nan, np.inf, -np.inf]
            with np.errstate(over="ignore"):
                number = np.array(odd[int(random.integers(len(odd)))])
                array[int(random.integers(len(array)))] = number.astype(array.dtype)
            tensor.data = array.tobytes()


def _spoil_lengths(random: np.random.Generator, request: pb.PredictRequest) -> None:
    lengths = _whole_numbers(request.lengths.data, np.dtype(np.int64))
    if not len(lengths):
        return
    match int(random.integers(0, 3)):
        case 0:
            lengths[int(random.integers(len(lengths)))] = int(random.choice(_ODD_NUMBERS))
        case 1:
            # Their sum in 64 bits is small.
            lengths[:] = int(random.choice([2**62, 2**63 - 1, -(2**63)]))
        case _:
            lengths = np.insert(lengths, int(random.integers(len(lengths) + 1)), [0, -3])
    request.lengths.CopyFrom(_tensor(lengths))


def _spoil_fields(random: np.random.Generator, request: pb.PredictRequest) -> None:
    match int(random.integers(0, 5)):
        case 0:
            request.ClearField(str(random.choice(TENSORS)))
        case 1:
            data_type: Any = int(random.choice([0, 1, 2, 3, 4, 5, 99, -1]))
            request.output_dtype = data_type
        case 2:
            request.request_id = "x" * int(random.choice([1, 500, 100_000]))
        case 3:
            request.model = "m" * int(random.choice([1, 100_000]))
        case _:
            request.version = "\u2603" * int(random.choice([1, 10_000]))


Spoiler = Callable[[np.random.Generator, pb.PredictRequest], None]
_SPOILERS: tuple[Spoiler, ...] = (
    _spoil_dtype,
    _spoil_shape,
    _spoil_data,
    _spoil_numbers,
    _spoil_numbers,
    _spoil_lengths,
    _spoil_fields,
)


def _whole_numbers(data: bytes, dtype: np.dtype) -> np.ndarray:
    """A copy of the data, without the bytes of a last number that is not whole."""
    return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype).copy()


def _any_tensor(random: np.random.Generator, request: pb.PredictRequest) -> pb.Tensor:
    return getattr(request, str(random.choice(TENSORS)))


def _tensor(array: np.ndarray) -> pb.Tensor:
    return pb.Tensor(dtype=_DTYPES[array.dtype.name], shape=array.shape, data=array.tobytes())


class Checker:
    """Sends messages through the decoder.

    Attributes:
        ends: How many messages ended in each way.
        slowest_s: Most processor seconds that one took.
    """

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.slowest_s = 0.0

    def check(self, message: bytes, schema: ModelSchema) -> None:
        """Check one message.

        Raises:
            Finding: It was read in another way than protobuf reads it, or a row was lost, doubled,
                or wrongly taken or refused.
            Exception: What the decoder must not raise.
        """
        whole = _parsed(message)
        _check_framing(message, whole)
        started_s = time.process_time()
        try:
            request = codec.parse(message)
            decoded = codec.decode(request, schema, MAX_ROW_TIMESTEPS)
        except (InputError, OverloadedError) as error:
            end = type(error).__name__
            _expect(len(str(error)) < 2000, "an error as long as the message")
        else:
            end = "rows refused" if decoded.problems else "decoded"
            _expect(whole is not None, "decoded what protobuf refuses")
            _check_rows(decoded, whole, schema)
            _check_reply(decoded, schema)
        self.slowest_s = max(self.slowest_s, time.process_time() - started_s)
        self.ends[end] += 1


def _parsed(message: bytes) -> pb.PredictRequest | None:
    try:
        return pb.PredictRequest.FromString(message)
    except DecodeError:
        return None


def _check_framing(message: bytes, whole: pb.PredictRequest | None) -> None:
    """What is found by hand, put back, is what protobuf reads; also below the usual size."""
    lifted = lift_data(message, _TENSOR_NUMBERS)
    if lifted is None:
        return
    small, data = lifted
    request = _parsed(small)
    _expect((request is None) == (whole is None), "framing and protobuf disagree")
    if request is None:
        return
    for name, number in zip(TENSORS, _TENSOR_NUMBERS, strict=True):
        if number in data:
            _expect(not getattr(request, name).data, "data were left in the message")
            getattr(request, name).data = bytes(data[number])
    _expect(request == whole, "framing and protobuf read another message")


def _check_rows(
    decoded: DecodedRequest, whole: pb.PredictRequest | None, schema: ModelSchema
) -> None:
    """Every row once, the good ones with their own numbers, by plain loops."""
    assert whole is not None  # noqa: S101

    def array(tensor: pb.Tensor) -> np.ndarray:
        return np.frombuffer(tensor.data, _NAMES[tensor.dtype]).reshape(tuple(tensor.shape))

    lengths, values = array(whole.lengths), array(whole.values)
    states = array(whole.state) if whole.HasField("state") else [np.zeros(0)] * len(lengths)
    good: list[int] = []
    kept: list[np.ndarray] = []
    start = 0
    for row, (length, state) in enumerate(zip(lengths.tolist(), states, strict=True)):
        steps = values[start : start + max(length, 0)]
        start += len(steps)
        fits = 1 <= length <= MAX_ROW_TIMESTEPS and bool(np.isfinite(state).all())
        if schema.takes_ids:
            fits = fits and all(0 <= i < schema.vocabulary_size for i in steps.ravel().tolist())
        else:
            fits = fits and bool(np.isfinite(steps).all())
        if fits:
            good.append(row)
            kept.append(steps)
    _expect(decoded.indices.tolist() == good, "other rows are good")
    bad = [problem.row for problem in decoded.problems]
    _expect(sorted(good + bad) == list(range(len(lengths))), "a row is lost or named twice")
    if decoded.rows is None:
        _expect(not good, "no rows")
        return
    rows = decoded.rows
    _expect(rows.lengths.tolist() == [len(steps) for steps in kept], "other lengths")
    wanted = np.concatenate(kept).astype(rows.values.dtype)
    _expect(np.array_equal(rows.values, wanted), "other numbers")
    if rows.state is not None:
        _expect(np.array_equal(rows.state, np.array([states[row] for row in good])), "other states")


_TIMING = BatchTiming(
    queue_s=0.0, upload_s=0.0, compute_s=0.0, download_s=0.0, batch_rows=1, batch_timesteps=1
)


def _check_reply(decoded: DecodedRequest, schema: ModelSchema) -> None:
    """The reply can be sent and read, and names every row once."""
    answer = None
    if decoded.rows is not None:
        rows = decoded.rows
        vectors = rows.timesteps if schema.output_per_timestep else rows.rows
        answer = ScoredRequest(
            rows=np.arange(rows.rows),
            scored=ScoredRows(
                output=np.zeros((vectors, schema.output_size), np.float32),
                state=np.zeros((rows.rows, schema.state_size), np.float32),
            ),
            failures=(),
            timing=_TIMING,
            device="cpu",
            engine="native",
        )
    model = ModelIdentity(name="model", version="1", schema=schema)
    message = codec.encode(decoded, answer, model)
    _expect(len(message) <= MAX_MESSAGE_BYTES, "the reply is too large to send")
    reply = pb.PredictResponse.FromString(message)
    named = np.frombuffer(reply.rows.data, np.int64).tolist() + [e.row for e in reply.errors]
    rows = len(decoded.indices) + len(decoded.problems)
    _expect(sorted(named) == list(range(rows)), "the reply loses or doubles a row")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Finding(otherwise)
