"""The methods of PredictionService: decode, submit, encode; nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import InputError, NotAllowedError, UnavailableError
from qrnn_serve.server import codec
from qrnn_serve.server.calls import Call, CallGuard
from qrnn_serve.server.codec import DecodedRequest
from qrnn_serve.server.keeper import Keeper
from qrnn_serve.server.lifecycle import ModelLifecycle
from qrnn_serve.server.models import Models, ServedModel

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PredictionService"].full_name

# Larger messages are decoded and encoded in another thread: they would hold up the event loop.
_INLINE_BYTES = 256 * 1024
_STREAM_WINDOW = 8
_ROW_ERROR_BYTES = 1024
"""What writing one row error costs, in bytes of tensor that take as long."""

Result = TypeVar("Result")
Message = TypeVar("Message", pb.LoadModelRequest, pb.UnloadModelRequest)


class PredictionService:
    """Predict, PredictStream, ListModels, LoadModel and UnloadModel over the served models."""

    def __init__(
        self,
        models: Models,
        guard: CallGuard,
        lifecycle: ModelLifecycle,
        keeper: Keeper | None,
        max_request_timesteps: int,
    ) -> None:
        """`keeper` loads and unloads models for callers; None where they may not ask for that."""
        self._models = models
        self._guard = guard
        self._lifecycle = lifecycle
        self._keeper = keeper
        self._max_request_timesteps = max_request_timesteps

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to route calls here. Messages come and go as bytes."""
        guard = self._guard
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Predict": guard.unary(self.predict, "Predict"),
                "PredictStream": guard.stream(self.predict_stream, "PredictStream"),
                "ListModels": guard.unary(self.list_models, "ListModels"),
                "LoadModel": guard.unary(self.load_model, "LoadModel"),
                "UnloadModel": guard.unary(self.unload_model, "UnloadModel"),
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

    async def list_models(self, message: bytes, call: Call) -> bytes:
        """Names, versions and schemas of the served models, and the limits of a request.

        Raises:
            UnavailableError: The server is starting.
        """
        self._models.check_started()
        return pb.ListModelsResponse(
            models=[_info(model) for model in self._models.all()],
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_request_timesteps=self._max_request_timesteps,
            versions=[
                pb.VersionStatus(
                    model=status.model,
                    version=status.version,
                    state=f"VERSION_STATE_{status.state.name}",
                    error=status.error,
                )
                for status in self._lifecycle.statuses()
            ],
        ).SerializeToString()

    async def load_model(self, message: bytes, call: Call) -> bytes:
        """Load a version from the repository and put it in the place of the one that serves.

        Raises:
            NotAllowedError: The server was not started for that.
            ModelNotFoundError: The repository does not have it.
            QRNNError: It cannot be loaded; what served before serves on.
        """
        keeper = self._controlled()
        request = _parsed(pb.LoadModelRequest, message)
        model = await keeper.load(request.model, request.version)
        return pb.LoadModelResponse(model=_info(model)).SerializeToString()

    async def unload_model(self, message: bytes, call: Call) -> bytes:
        """Take a model out of service and wait until its memory is free.

        Raises:
            NotAllowedError: The server was not started for that.
            ModelNotFoundError: It does not serve.
        """
        keeper = self._controlled()
        await keeper.unload(_parsed(pb.UnloadModelRequest, message).model)
        return pb.UnloadModelResponse().SerializeToString()

    def _controlled(self) -> Keeper:
        self._models.check_started()
        if self._keeper is None:
            raise NotAllowedError(
                "models are loaded and unloaded by calls only if the server was started on a "
                "repository with --model-control rpc"
            )
        return self._keeper


def _info(model: ServedModel) -> pb.ModelInfo:
    return codec.model_info(model.identity, model.pool.engine, model.pool.devices)


def _parsed(kind: type[Message], message: bytes) -> Message:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InputError(f"the message is not a {kind.DESCRIPTOR.full_name}") from error


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
