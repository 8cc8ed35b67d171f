"""The asyncio client. Only I/O: what is sent and how replies are read is decided elsewhere."""

from __future__ import annotations

import asyncio
import collections
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import grpc
import grpc.aio

from qrnn_client._batch import Batching
from qrnn_client._channel import (
    CHANNEL_OPTIONS,
    HEALTH_CHECK,
    LIST_MODELS,
    PREDICT,
    TLS,
    channel_target,
)
from qrnn_client._checks import GatheredRows, Rows, check_rows, gather_rows
from qrnn_client._client import Client
from qrnn_client._codec import Call, decode_reply, encode_call, parse_reply
from qrnn_client._errors import ClientError, ModelChangedError, PredictionError
from qrnn_client._models import Catalogue, Found, Health, ModelInfo, read_catalogue
from qrnn_client._plan import Options, Sent, join_answers, plan_calls
from qrnn_client._prediction import Prediction
from qrnn_client._retry import Attempts, RetryPolicy
from qrnn_client._session import (
    DEFAULT_TIMEOUT_S,
    Session,
    Settings,
    check_timeout,
    decode_health_response,
    encode_health_request,
)
from qrnn_client._states import States
from qrnn_protos.v1 import prediction_pb2 as pb

if TYPE_CHECKING:
    from qrnn_client._score import Progress, ScoreReport

_Method = Any  # grpc.aio.UnaryUnaryMultiCallable of several message types


class AsyncClient:
    """Scores sequences on a qrnn-serve server from one event loop, many predictions at a time.

    Args:
        target: As for Client.
        timeout_s: Most seconds of one attempt of one call.
        retry: When failed calls are sent again, and for how long in all.
        batching: How rows are cut into calls, and how many calls of one prediction are under way
            at a time.
        wait_for_ready: Wait for a server that does not answer yet for retry.total_s, not
            retry.connect_s.
        tls: Credentials; None connects without encryption.
        half: As for Client.

    Raises:
        InputError: An argument is wrong. Nothing is connected before the first call.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        batching: Batching | None = None,
        wait_for_ready: bool = False,
        tls: TLS | None = None,
        half: bool = False,
    ) -> None:
        settings = Settings(
            target=target,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
            batching=batching or Batching(),
            wait_for_ready=wait_for_ready,
            tls=tls,
            half=half,
        )
        self._session = Session(settings)
        self._credentials = tls.credentials() if tls else None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._closed = True
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def predict(
        self,
        model: str,
        rows: Rows,
        *,
        states: States | None = None,
        return_state: bool = False,
        version: str = "",
        timeout_s: float | None = None,
        on_error: Literal["raise", "return"] = "raise",
    ) -> Prediction:
        """Score rows of any number and length. Arguments, result and errors as Client.predict."""
        options = Options(states=states, return_state=return_state, version=version)
        timeout_s = self._timeout_s(timeout_s)
        gathered = gather_rows(rows)
        try:
            prediction = await self._predict_once(model, gathered, options, timeout_s)
        except ModelChangedError:
            # The rows were checked against the version before; once more against the new one.
            self._session.forget()
            prediction = await self._predict_once(model, gathered, options, timeout_s)
        if on_error == "raise" and prediction.errors:
            raise PredictionError(prediction)
        return prediction

    async def score(
        self,
        model: str,
        input_path: str | Path,
        output_path: str | Path,
        *,
        id_column: str = "id",
        input_column: str | None = None,
        overwrite: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> ScoreReport:
        """Score a file in a thread of its own, over a connection of its own.

        Arguments, result and errors as Client.score; `progress` is called in that thread.
        """
        settings = self._session.settings
        client = Client(
            settings.target,
            timeout_s=settings.timeout_s,
            retry=settings.retry,
            batching=settings.batching,
            wait_for_ready=settings.wait_for_ready,
            tls=settings.tls,
        )
        # When this task is cancelled the thread goes on until its connection is closed.
        with client:
            return await asyncio.to_thread(
                client.score,
                model,
                input_path,
                output_path,
                id_column=id_column,
                input_column=input_column,
                overwrite=overwrite,
                progress=progress,
            )

    async def models(self) -> list[ModelInfo]:
        """Return what the server has loaded.

        Raises:
            CallError: The server does not answer.
        """
        timeout_s = self._timeout_s(None)
        attempts = self._session.start_attempts(time.monotonic(), timeout_s)
        return list((await self._fetch_catalogue(attempts, timeout_s)).models)

    async def health(self, model: str = "") -> Health:
        """Ask once whether the server, or one of its models, is ready.

        Raises:
            CallError: The server does not answer.
        """
        attempts = self._session.start_attempts(time.monotonic(), self._timeout_s(None))
        timeout_s = attempts.next_timeout_s(time.monotonic(), self._timeout_s(None))
        try:
            return await self._health(encode_health_request(model), timeout=timeout_s)
        except grpc.RpcError as error:
            return self._session.health_of(error, attempts, time.monotonic())

    # An asyncio channel belongs to the loop that runs when it is made: the first call makes it.
    @functools.cached_property
    def _channel(self) -> grpc.aio.Channel:
        settings = self._session.settings
        target = channel_target(settings.target)
        if settings.tls is None or self._credentials is None:
            return grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        options = (*CHANNEL_OPTIONS, *settings.tls.channel_options)
        return grpc.aio.secure_channel(target, self._credentials, options)

    @functools.cached_property
    def _predict(self) -> _Method:
        return self._method(PREDICT, parse_reply)

    @functools.cached_property
    def _list_models(self) -> _Method:
        return self._method(LIST_MODELS, pb.ListModelsResponse.FromString)

    @functools.cached_property
    def _health(self) -> _Method:
        return self._method(HEALTH_CHECK, decode_health_response)

    def _method(self, name: str, deserializer: Callable[[bytes], Any]) -> _Method:
        channel: Any = self._channel
        return channel.unary_unary(name, response_deserializer=deserializer)

    async def _predict_once(
        self, model: str, rows: GatheredRows, options: Options, timeout_s: float
    ) -> Prediction:
        started_s = time.monotonic()
        found = self._session.known(model, options.version)
        row_set = check_rows(rows, found.info) if found else None
        if found is None or row_set is None or row_set.errors:
            # The model that refused a row may have been replaced since it was looked up.
            found = await self._fetch_model(model, options.version, timeout_s)
            row_set = check_rows(rows, found.info)
        plan = plan_calls(row_set, found, self._session.settings.batching, options)
        sent = [item async for item in self._run_calls(plan.calls, timeout_s)]
        return join_answers(plan, sent, total_s=time.monotonic() - started_s)

    async def _run_calls(self, calls: Iterable[Call], timeout_s: float) -> AsyncIterator[Sent]:
        """Send calls, several under way at a time; yield their answers in order.

        The first call that fails ends the others.
        """
        in_flight = self._session.settings.batching.in_flight
        pending: collections.deque[asyncio.Task[Sent]] = collections.deque()
        try:
            for call in calls:
                pending.append(asyncio.create_task(self._send(call, timeout_s)))
                if len(pending) >= in_flight:
                    yield await _next_result(pending)
            while pending:
                yield await _next_result(pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _send(self, call: Call, timeout_s: float) -> Sent:
        attempts = self._session.start_attempts(time.monotonic(), timeout_s)
        response = await self._attempt(self._predict, encode_call(call), attempts, timeout_s)
        return Sent(decode_reply(response, call), attempts.sent)

    async def _attempt(
        self, method: _Method, request: bytes, attempts: Attempts, timeout_s: float
    ) -> Any:
        """Send one call until it is answered or fails for good."""
        while True:
            if self._closed:
                raise ClientError("this client is closed; make a new one")
            try:
                attempt_s = attempts.next_timeout_s(time.monotonic(), timeout_s)
                response = await method(request, timeout=attempt_s)
            except grpc.RpcError as error:
                now_s = time.monotonic()
                wait_s = self._session.wait_s(error, attempts, now_s)
                if wait_s is None:
                    raise self._session.error(error, attempts, now_s) from error
                await asyncio.sleep(wait_s)
            else:
                self._session.succeeded()
                return response

    async def _fetch_catalogue(self, attempts: Attempts, timeout_s: float) -> Catalogue:
        request = pb.ListModelsRequest().SerializeToString()
        response = await self._attempt(self._list_models, request, attempts, timeout_s)
        return self._session.learn(read_catalogue(response))

    async def _fetch_model(self, model: str, version: str, timeout_s: float) -> Found:
        attempts = self._session.start_attempts(time.monotonic(), timeout_s)
        while True:
            catalogue = await self._fetch_catalogue(attempts, timeout_s)
            wait_s = self._session.wait_for_models_s(catalogue, attempts, time.monotonic())
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
        return self._session.find(model, version, catalogue)

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._session.settings.timeout_s if timeout_s is None else check_timeout(timeout_s)


async def _next_result(pending: collections.deque[asyncio.Task[Sent]]) -> Sent:
    """Return the first task's result and take it off; raise as soon as any of them fails."""
    first, running = pending[0], set(pending)
    while not first.done():
        finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    return pending.popleft().result()
