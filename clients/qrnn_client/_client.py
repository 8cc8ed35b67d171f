"""The blocking client. Only I/O: what is sent and how replies are read is decided elsewhere."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import grpc

from qrnn_client._batch import Batching
from qrnn_client._channel import (
    HEALTH_CHECK,
    LIST_MODELS,
    PREDICT,
    TLS,
)
from qrnn_client._checks import GatheredRows, Rows, check_rows, gather_rows
from qrnn_client._codec import Call, decode_reply, encode_call
from qrnn_client._connection import Connections
from qrnn_client._errors import ModelChangedError, PredictionError
from qrnn_client._models import Catalogue, Found, Health, ModelInfo, read_catalogue
from qrnn_client._plan import Options, Sent, join_answers, plan_calls
from qrnn_client._prediction import Prediction
from qrnn_client._retry import Attempts, RetryPolicy
from qrnn_client._sending import Alone, Sender, Together, next_result
from qrnn_client._session import (
    DEFAULT_TIMEOUT_S,
    Session,
    Settings,
    check_timeout,
    encode_health_request,
)
from qrnn_client._states import States
from qrnn_protos.v1 import prediction_pb2 as pb

if TYPE_CHECKING:
    from qrnn_client._score import Progress, ScoreReport


class Client:
    """Scores sequences on a qrnn-serve server, waiting for each answer. Threads may share one.

    Args:
        target: HOST:PORT; several IP:PORT with commas between, or "dns:///name:port" with several
            addresses, to share the calls evenly among servers (those that die are left out).
        timeout_s: Most seconds of one attempt of one call.
        retry: When failed calls are sent again, and for how long in all.
        batching: How rows are cut into calls, and how many calls are under way at a time.
        wait_for_ready: Wait for a server that does not answer yet for retry.total_s, not
            retry.connect_s.
        tls: Credentials; None connects without encryption.
        half: Send features to models of float32 and ask for outputs as float16, half the bytes:
            worth it on slow networks. Prediction.outputs are then float16.

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
        self._connections = Connections(settings)
        self._alone = Alone(self._connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._connections.close()

    def predict(
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
        """Score rows of any number and length; many rows are cut into calls that fit the server.

        Args:
            model: Name of a loaded model; "" when the server has only one.
            rows: A list of arrays [T, I] of features or [T] of token ids, or one array [B, T, I] or
                [B, T], or PackedRows. Other floats are rounded to the model's dtype.
            states: States to go on from: [B, S], or for each row [S], or None for a fresh start.
            return_state: Ask for Prediction.states.
            version: Version to use; "" for the one that serves now.
            timeout_s: Most seconds of one attempt of one call; None for the client's own.
            on_error: "raise" when any row has an error, or "return" the prediction with its errors.

        Returns:
            Outputs and errors by row, in the order of `rows`.

        Raises:
            PredictionError: Some rows were not scored; it carries the Prediction.
            InputError: An argument is wrong as a whole.
            CallError: A call failed, also after the retries that its code allows.
            ProtocolError: A reply does not fit its request.
        """
        options = Options(states=states, return_state=return_state, version=version)
        timeout_s = self._timeout_s(timeout_s)
        gathered = gather_rows(rows)
        try:
            prediction = self._predict_once(model, gathered, options, timeout_s)
        except ModelChangedError:
            # The rows were checked against the version before; once more against the new one.
            self._session.forget()
            prediction = self._predict_once(model, gathered, options, timeout_s)
        if on_error == "raise" and prediction.errors:
            raise PredictionError(prediction)
        return prediction

    def score(
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
        """Score every row of a Parquet or Arrow file into another one, in the same order.

        The output has the columns `id` (its own name, type and values kept), `score` (a list, or
        a list a timestep; null for a row that failed) and `error` (null for a row that was
        scored). It appears under its name only when it is whole. Memory stays bounded for files
        of any size.

        Args:
            model: Name of a loaded model; "" when the server has only one.
            input_path: A Parquet, Arrow or Feather file.
            output_path: File to write: .parquet, .arrow or .feather.
            id_column: Column that is copied.
            input_column: List column with the sequences; None for "features", or else the only list
                column that fits the model.
            overwrite: Replace an output file that exists.
            progress: Called after each written piece, in this thread.

        Returns:
            How many rows were scored and how many failed, with the first errors.

        Raises:
            FileError: A file cannot be read or written, or does not fit the model.
            ClientError: As `predict` raises, but for PredictionError. No output is left then.
        """
        from qrnn_client._score import ScoreOptions, score_file

        options = ScoreOptions(
            input_path=Path(input_path),
            output_path=Path(output_path),
            id_column=id_column,
            input_column=input_column,
            overwrite=overwrite,
            batching=self._session.settings.batching,
        )
        timeout_s = self._timeout_s(None)
        found = self._fetch_model(model, "", timeout_s)
        return score_file(
            options, found, functools.partial(self._run_calls, timeout_s=timeout_s), progress
        )

    def models(self) -> list[ModelInfo]:
        """Return what the server has loaded.

        Raises:
            CallError: The server does not answer.
        """
        timeout_s = self._timeout_s(None)
        attempts = self._session.start_attempts(time.monotonic(), timeout_s)
        return list(self._fetch_catalogue(attempts, timeout_s).models)

    def health(self, model: str = "") -> Health:
        """Ask once whether the server, or one of its models, is ready.

        Raises:
            CallError: The server does not answer.
        """
        attempts = self._session.start_attempts(time.monotonic(), self._timeout_s(None))
        timeout_s = attempts.next_timeout_s(time.monotonic(), self._timeout_s(None))
        try:
            return self._alone.send(HEALTH_CHECK, encode_health_request(model), timeout_s)
        except grpc.RpcError as error:
            return self._session.health_of(error, attempts, time.monotonic())

    def _predict_once(
        self, model: str, rows: GatheredRows, options: Options, timeout_s: float
    ) -> Prediction:
        started_s = time.monotonic()
        found = self._session.known(model, options.version)
        row_set = check_rows(rows, found.info) if found else None
        if found is None or row_set is None or row_set.errors:
            # The model that refused a row may have been replaced since it was looked up.
            found = self._fetch_model(model, options.version, timeout_s)
            row_set = check_rows(rows, found.info)
        plan = plan_calls(row_set, found, self._session.settings.batching, options)
        if len(plan.calls) > 1:
            sent = list(self._run_calls(plan.calls, timeout_s=timeout_s))
        else:
            sent = [self._send(call, timeout_s, self._alone) for call in plan.calls]
        return join_answers(plan, sent, total_s=time.monotonic() - started_s)

    def _run_calls(self, calls: Iterable[Call], *, timeout_s: float) -> Generator[Sent, None, None]:
        """Send calls, several under way at a time; yield their answers in order.

        The first call that fails ends the others.
        `calls` is read only as far as calls are sent, so what is held in memory stays bounded.
        """
        together = Together(self._connections)
        in_flight = self._session.settings.batching.in_flight
        pending: collections.deque[Future[Sent]] = collections.deque()
        with ThreadPoolExecutor(in_flight, "qrnn-client") as pool:
            try:
                for call in calls:
                    pending.append(pool.submit(self._send, call, timeout_s, together))
                    if len(pending) >= in_flight:
                        yield next_result(pending)
                while pending:
                    yield next_result(pending)
            finally:
                together.stop()

    def _send(self, call: Call, timeout_s: float, sender: Sender) -> Sent:
        attempts = self._session.start_attempts(time.monotonic(), timeout_s)
        response = self._attempt(PREDICT, encode_call(call), attempts, timeout_s, sender)
        return Sent(decode_reply(response, call), attempts.sent)

    def _attempt(
        self, method: str, request: bytes, attempts: Attempts, timeout_s: float, sender: Sender
    ) -> Any:
        """Send one call until it is answered, fails for good, or the run stops."""
        while True:
            try:
                attempt_s = attempts.next_timeout_s(time.monotonic(), timeout_s)
                response = sender.send(method, request, attempt_s)
            except grpc.RpcError as error:
                now_s = time.monotonic()
                wait_s = self._session.wait_s(error, attempts, now_s)
                if wait_s is None or sender.wait(wait_s):
                    raise self._session.error(error, attempts, now_s) from error
            else:
                self._session.succeeded()
                return response

    def _fetch_catalogue(self, attempts: Attempts, timeout_s: float) -> Catalogue:
        request = pb.ListModelsRequest().SerializeToString()
        response = self._attempt(LIST_MODELS, request, attempts, timeout_s, self._alone)
        return self._session.learn(read_catalogue(response))

    def _fetch_model(self, model: str, version: str, timeout_s: float) -> Found:
        attempts = self._session.start_attempts(time.monotonic(), timeout_s)
        while True:
            catalogue = self._fetch_catalogue(attempts, timeout_s)
            wait_s = self._session.wait_for_models_s(catalogue, attempts, time.monotonic())
            if wait_s is None:
                break
            time.sleep(wait_s)
        return self._session.find(model, version, catalogue)

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._session.settings.timeout_s if timeout_s is None else check_timeout(timeout_s)
