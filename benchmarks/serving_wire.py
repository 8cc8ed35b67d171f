"""How a call to each kind of server is written, sent and read.

Messages are bytes before the clock starts, and answers are read after it has stopped: the client
takes the same little time for each server, and none for arrays. HTTP goes over plain sockets, which
is faster than any HTTP library in Python.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from qrnn_protos.v1 import prediction_pb2 as pb

_GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Else all channels of a process to one address share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)
# Its types are made when it is imported.
kserve: Any = service_pb2
Call = Callable[[bytes], Awaitable[bytes]]


class AnswerError(Exception):
    """A server answered with an error, or closed the connection."""


class Connections(Protocol):
    """What several callers send over."""

    calls: list[Call]
    """One for each caller."""

    async def close(self) -> None:
        """Leave at once, whatever is under way."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How one kind of server is talked to.

    Attributes:
        encode: Sequences, float32 [B, T, I], to a message.
        decode: An answer to scores [B, C]; raises AnswerError if it holds an error.
        connect: Opens connections for so many callers to a port.
    """

    encode: Callable[[np.ndarray], bytes]
    decode: Callable[[bytes], np.ndarray]
    connect: Callable[[int, int], Awaitable[Connections]]


class GrpcConnections:
    """All callers share one channel, as gRPC means it."""

    def __init__(self, method: str, port: int, callers: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_GRPC_OPTIONS)
        self._method = self._channel.unary_unary(method)
        self.calls: list[Call] = [self._call] * callers

    async def _call(self, message: bytes) -> bytes:
        try:
            return await self._method(message)
        except grpc.aio.AioRpcError as error:
            raise AnswerError(f"{error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        """Cancels what is under way."""
        await self._channel.close()


class HttpConnection:
    """One connection that stays open, for one caller."""

    def __init__(self, path: str, content_type: str) -> None:
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
            "Content-Length: "
        ).encode()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def call(self, message: bytes) -> bytes:
        """The body of the answer."""
        if self._reader is None or self._writer is None:
            raise AnswerError("the connection is closed")
        try:
            self._writer.write(self._head + str(len(message)).encode() + b"\r\n\r\n")
            self._writer.write(message)
            head = await self._reader.readuntil(b"\r\n\r\n")
            status, _, rest = head.partition(b"\r\n")
            _, _, length = rest.lower().partition(b"content-length:")
            body = await self._reader.readexactly(int(length.split(None, 1)[0]))
        except (OSError, EOFError, IndexError) as error:
            raise AnswerError(f"no answer: {error!r}") from error
        if status.split()[1] != b"200":
            raise AnswerError(f"{status.decode()}: {body.decode(errors='replace')}")
        return body

    async def open(self, port: int) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)

    def abort(self) -> None:
        """Close without a word."""
        if self._writer is not None:
            self._writer.transport.abort()


class HttpConnections:
    """A connection for each caller."""

    def __init__(self, connections: list[HttpConnection]) -> None:
        self._connections = connections
        self.calls: list[Call] = [connection.call for connection in connections]

    async def close(self) -> None:
        """Abort each."""
        for connection in self._connections:
            connection.abort()


def grpc_to(method: str) -> Callable[[int, int], Awaitable[Connections]]:
    """Opens channels for a method."""

    async def connect(port: int, callers: int) -> Connections:
        return GrpcConnections(method, port, callers)

    return connect


def http_to(path: str, content_type: str) -> Callable[[int, int], Awaitable[Connections]]:
    """Opens connections for a path."""

    async def connect(port: int, callers: int) -> Connections:
        connections = [HttpConnection(path, content_type) for _ in range(callers)]
        for connection in connections:
            try:
                await connection.open(port)
            except OSError as error:
                raise AnswerError(f"cannot connect: {error}") from error
        return HttpConnections(connections)

    return connect


def _encode_ours(values: np.ndarray) -> bytes:
    rows, timesteps, width = values.shape
    lengths = np.full(rows, timesteps)
    return pb.PredictRequest(
        values=pb.Tensor(
            dtype=pb.DATA_TYPE_FLOAT32, shape=(rows * timesteps, width), data=values.tobytes()
        ),
        lengths=pb.Tensor(dtype=pb.DATA_TYPE_INT64, shape=(rows,), data=lengths.tobytes()),
    ).SerializeToString()


def _decode_ours(answer: bytes) -> np.ndarray:
    response = pb.PredictResponse.FromString(answer)
    if response.errors:
        raise AnswerError(response.errors[0].message)
    return np.frombuffer(response.output.data, np.float32).reshape(response.output.shape)


def _encode_kserve(values: np.ndarray) -> bytes:
    tensor = kserve.ModelInferRequest.InferInputTensor(
        name="input", datatype="FP32", shape=values.shape
    )
    return kserve.ModelInferRequest(
        model_name="model", inputs=[tensor], raw_input_contents=[values.tobytes()]
    ).SerializeToString()


def _decode_kserve(answer: bytes) -> np.ndarray:
    response = kserve.ModelInferResponse.FromString(answer)
    scores = np.frombuffer(response.raw_output_contents[0], np.float32)
    return scores.reshape(response.outputs[0].shape)


def _encode_raw(values: np.ndarray) -> bytes:
    return len(values).to_bytes(8, "little") + values.tobytes()


def _encode_json(values: np.ndarray) -> bytes:
    text = base64.b64encode(values.tobytes()).decode()
    return json.dumps({"rows": len(values), "values": text}).encode()


CLASSES = 16
OURS = Wire(
    encode=_encode_ours,
    decode=_decode_ours,
    connect=grpc_to("/qrnn_serve.v1.PredictionService/Predict"),
)
KSERVE = Wire(
    encode=_encode_kserve,
    decode=_decode_kserve,
    connect=grpc_to("/inference.GRPCInferenceService/ModelInfer"),
)
MOSEC = Wire(
    encode=_encode_raw,
    decode=lambda answer: np.frombuffer(answer, np.float32).reshape(-1, CLASSES),
    connect=http_to("/inference", "application/octet-stream"),
)
LITSERVE = Wire(
    encode=_encode_json,
    decode=lambda answer: np.frombuffer(
        base64.b64decode(json.loads(answer)["scores"]), np.float32
    ).reshape(-1, CLASSES),
    connect=http_to("/predict", "application/json"),
)
