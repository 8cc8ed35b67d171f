"""The methods of PredictionService: decode, submit, encode; nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import grpc

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_serve.core.errors import UnavailableError
from qrnn_serve.server import codec
from qrnn_serve.server.calls import Call, CallGuard, UnaryMethod
from qrnn_serve.server.codec import DecodedRequest
from qrnn_serve.server.models import Models

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PredictionService"].full_name

# Larger messages are decoded and encoded in another thread: they would hold up the event loop.
_INLINE_BYTES = 256 * 1024
_STREAM_WINDOW = 8
_ROW_ERROR_BYTES = 1024
"""What writing one row error costs, in bytes of tensor that take as long."""

Result = TypeVar("Result")


CONTROL_METHODS = ("ListModels", "LoadModel", "UnloadModel")


class Control(Protocol):
    """What is loaded, and what should be."""

    async def answer(self, method: str, message: bytes) -> bytes:
        """Answer one of CONTROL_METHODS, as bytes; raises what the caller is to be told."""
        ...


class PredictionService:
    """The methods of our service: predictions over the served models, and what `Control` does."""

    def __init__(self, models: Models[Any], guard: CallGuard, control: Control) -> None:
        """`control` answers all that is not a prediction."""
        self._models = models
        self._guard = guard
        self._control = control

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to route calls here. Messages come and go as bytes."""
        guard = self._guard
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Predict": guard.unary(self.predict, "Predict"),
                "PredictStream": guard.stream(self.predict_stream, "PredictStream"),
                **{name: guard.unary(self._controlled(name), name) for name in CONTROL_METHODS},
            },
        )

    async def predict(self, message: bytes, call: Call) -> bytes:
        """Score one PredictRequest; returns a PredictResponse.

        Raises:
            InputError: The request as a whole is wrong.
            ModelNotFoundError: Its model is not served.
            OverloadedError: The queue is full, or the request or its reply is too large.
            DeadlineExceededError: Its deadline passed before it was scored.
            UnavailableError: The server is starting or ending.
        """
        started_s = time.monotonic()
        request = await _run(len(message), codec.parse, message)
        model = self._models.find(request.fields.model, request.fields.version)
        with model.in_use():
            most = model.pool.max_row_timesteps
            decoded = await _run(len(message), codec.decode, request, model.identity.schema, most)
            call.note_request(decoded.request_id, _rows(decoded), len(decoded.problems))
            decode_s = time.monotonic() - started_s
            answer = None
            if decoded.rows is not None:
                answer = await model.pool.submit(decoded.rows, deadline_s=call.deadline_s)
                call.note_answer(answer)
            started_s = time.monotonic()
            nbytes = _ROW_ERROR_BYTES * len(decoded.problems) + (answer.nbytes if answer else 0)
            reply = await _run(nbytes, codec.encode, decoded, answer, model.identity, decode_s)
        encode_s = time.monotonic() - started_s
        call.note_codec(decode_s, encode_s)
        model.stages.add(decode_s, answer.timing if answer else None, encode_s)
        return reply

    async def predict_stream(
        self, messages: AsyncIterator[bytes], call: Call
    ) -> AsyncIterator[bytes]:
        """Score each PredictRequest of a stream; answers come in order, eight may be under way."""
        pending: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        window = asyncio.Semaphore(_STREAM_WINDOW)
        tasks: set[asyncio.Task[bytes]] = set()

        async def read() -> None:
            try:
                async for message in _until(self._guard.draining, messages):
                    await window.acquire()
                    task = asyncio.create_task(self.predict(message, call))
                    tasks.add(task)
                    pending.put_nowait(task)
            finally:
                pending.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (task := await pending.get()) is not None:
                yield await task
                tasks.discard(task)
                window.release()
            await reader
        finally:
            await _cancel(reader, *tasks)
        if self._guard.draining.is_set():
            raise UnavailableError("the server is shutting down; open the stream on another one")

    def _controlled(self, method: str) -> UnaryMethod:
        async def answer(message: bytes, call: Call) -> bytes:
            return await self._control.answer(method, message)

        return answer


async def _run(nbytes: int, function: Callable[..., Result], *args: object) -> Result:
    if nbytes <= _INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def _rows(decoded: DecodedRequest) -> int:
    return len(decoded.indices) + len(decoded.problems)


async def _until(stop: asyncio.Event, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The messages, until they end or `stop` is set."""
    stopped = asyncio.ensure_future(stop.wait())
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(messages))
            await asyncio.wait((stopped, following), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        stopped.cancel()
        if following is not None:
            following.cancel()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
