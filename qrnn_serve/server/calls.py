"""Around every call of our service: admission, request id, errors to status, one log line.

The line of a call that went well is at level debug, of another at level info.

The outermost guard: an exception that nobody expected ends here, with its text in the log and only
a reference to it in the reply.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from qrnn_serve.core.errors import OverloadedError, QRNNError, UnavailableError
from qrnn_serve.engine.request import ScoredRequest
from qrnn_serve.server.status import CallStatus, status_of

Context = grpc.aio.ServicerContext[Any, Any]

_REQUEST_ID_KEY = "x-request-id"
_MAX_ID_CHARACTERS = 128
_BUSY_RETRY_S = 0.5
_process_id = secrets.token_hex(4)
_call_numbers = itertools.count(1)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call while it runs: what its handler may know, and what its log line will say.

    Attributes:
        method: For example "Predict".
        request_id: From the metadata, or made up; a request's own id replaces it.
        deadline_s: When the caller stops waiting, on the monotonic clock; None for never.
        requests: Messages of the caller, 1 for a unary call.
        rows: Rows in them.
        row_errors: Rows that were not scored.
        decode_s: Seconds that reading and checking them took.
        queue_s: Seconds that they waited.
        upload_s: Seconds that their batches took to reach the device.
        compute_s: Seconds that the model took for their batches.
        download_s: Seconds that the answers took to come back.
        encode_s: Seconds that writing the replies took.
    """

    method: str
    request_id: str
    deadline_s: float | None
    started_s: float = field(default_factory=time.monotonic)
    requests: int = 0
    rows: int = 0
    row_errors: int = 0
    decode_s: float = 0.0
    queue_s: float = 0.0
    upload_s: float = 0.0
    compute_s: float = 0.0
    download_s: float = 0.0
    encode_s: float = 0.0

    def note_request(self, request_id: str, rows: int, row_errors: int) -> None:
        """Count one message of the caller."""
        self.request_id = request_id[:_MAX_ID_CHARACTERS] or self.request_id
        self.requests += 1
        self.rows += rows
        self.row_errors += row_errors

    def note_answer(self, answer: ScoredRequest) -> None:
        """Count where its time went."""
        self.row_errors += len(answer.failures)
        self.queue_s += answer.timing.queue_s
        self.upload_s += answer.timing.upload_s
        self.compute_s += answer.timing.compute_s
        self.download_s += answer.timing.download_s

    def note_codec(self, decode_s: float, encode_s: float) -> None:
        """Count the time of one message and its reply in the server itself."""
        self.decode_s += decode_s
        self.encode_s += encode_s


UnaryMethod = Callable[[bytes, Call], Awaitable[bytes]]
StreamMethod = Callable[[AsyncIterator[bytes], Call], AsyncIterator[bytes]]


class CallGuard:
    """Admits calls, at most so many at once and none while draining, and ends each in order."""

    def __init__(self, max_concurrent_calls: int) -> None:
        self._max_concurrent_calls = max_concurrent_calls
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = asyncio.Event()
        """Set at shutdown: new calls are refused, streams take no more messages."""

    def unary(self, method: UnaryMethod, name: str) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of a call with one message each way, as bytes."""

        async def handle(message: bytes, context: Context) -> bytes:
            call = _call_of(name, context)
            try:
                self._admit()
                try:
                    reply = await method(message, call)
                finally:
                    self._release()
            except BaseException as error:
                await self._end(call, context, error)
                raise
            _log(call, "OK", "")
            return reply

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, method: StreamMethod, name: str) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of a call with a stream of messages each way, as bytes."""

        async def handle(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            call = _call_of(name, context)
            try:
                self._admit()
                try:
                    async for reply in method(messages, call):
                        yield reply
                finally:
                    self._release()
            except BaseException as error:
                await self._end(call, context, error)
                raise
            _log(call, "OK", "")

        return grpc.stream_stream_rpc_method_handler(handle)

    async def drain(self) -> None:
        """Refuse new calls from now on; wait until the running ones have ended."""
        self.draining.set()
        await self._idle.wait()

    def _admit(self) -> None:
        if self.draining.is_set():
            raise UnavailableError("the server is shutting down")
        if self._active >= self._max_concurrent_calls:
            raise OverloadedError(
                f"{self._active} calls are running, the most at once; try again later",
                retry_after_s=_BUSY_RETRY_S,
            )
        self._active += 1
        self._idle.clear()

    def _release(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    async def _end(self, call: Call, context: Context, error: BaseException) -> None:
        """Log how the call failed, and end it with its status unless the caller has left."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            _log(call, "CANCELLED", "")
            return
        if isinstance(error, QRNNError):
            status = status_of(error)
        else:
            logger.error(
                "unexpected error method=%s request_id=%r",
                call.method,
                call.request_id,
                exc_info=error,
            )
            text = f"internal error; the server's log has it under request id {call.request_id}"
            status = CallStatus(code=grpc.StatusCode.INTERNAL, message=text, trailers=())
        _log(call, status.code.name, status.message)
        await context.abort(status.code, status.message, status.trailers)


def _call_of(method: str, context: Context) -> Call:
    metadata = dict(context.invocation_metadata() or ())
    request_id = metadata.get(_REQUEST_ID_KEY) or f"{_process_id}-{next(_call_numbers)}"
    remaining_s: float | None = context.time_remaining()
    return Call(
        method=method,
        request_id=str(request_id)[:_MAX_ID_CHARACTERS],
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )


def _log(call: Call, code: str, message: str) -> None:
    # At thousands of calls a second a line for each that went well would cost more than the calls.
    level = logging.DEBUG if code == "OK" else logging.INFO
    logger.log(
        level,
        "call method=%s request_id=%r code=%s requests=%d rows=%d row_errors=%d "
        "decode_s=%.6f queue_s=%.6f upload_s=%.6f compute_s=%.6f download_s=%.6f encode_s=%.6f "
        "total_s=%.6f message=%r",
        call.method,
        call.request_id,
        code,
        call.requests,
        call.rows,
        call.row_errors,
        call.decode_s,
        call.queue_s,
        call.upload_s,
        call.compute_s,
        call.download_s,
        call.encode_s,
        time.monotonic() - call.started_s,
        message,
    )
