"""What a client remembers between calls, and how it reads gRPC's errors. Shared by both clients."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import grpc
from google.protobuf import wrappers_pb2

from qrnn_client._batch import Batching
from qrnn_client._channel import TLS, channel_target
from qrnn_client._errors import CallError, FailedCall, InputError, UnavailableError, error_of_call
from qrnn_client._models import Catalogue, Found, Health
from qrnn_client._retry import Attempts, Failure, RetryPolicy, start_attempts

DEFAULT_TIMEOUT_S = 60.0

_PUSHBACK = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a client talks to its server.

    Attributes:
        target: The server, as the caller named it.
        timeout_s: Most seconds of one attempt of one call.
        retry: What happens after a failed attempt.
        batching: How rows are cut into calls.
        wait_for_ready: Wait for a server that is not there yet.
        tls: Credentials; None for a connection without encryption.
        half: Features and outputs of float32 models travel as float16.
    """

    target: str
    timeout_s: float
    retry: RetryPolicy
    batching: Batching
    wait_for_ready: bool
    tls: TLS | None
    half: bool = False

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        channel_target(self.target)


class Session:
    """The server's catalogue, and whether the server was ever reached. Safe to share by threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._catalogue: Catalogue | None = None
        self._contacted = False

    def known(self, name: str, version: str) -> Found | None:
        """Return the model if the last catalogue has it."""
        with self._lock:
            catalogue = self._catalogue
        info = catalogue.find(name, version) if catalogue else None
        return Found(info, catalogue) if catalogue and info else None

    def learn(self, catalogue: Catalogue) -> Catalogue:
        """Remember what the server has loaded, and how this client sends to it."""
        if self.settings.half:
            models = tuple(replace(model, half=True) for model in catalogue.models)
            catalogue = replace(catalogue, models=models)
        with self._lock:
            self._catalogue = catalogue
        return catalogue

    def forget(self) -> None:
        """Ask the server again before the next prediction."""
        with self._lock:
            self._catalogue = None

    def find(self, name: str, version: str, catalogue: Catalogue) -> Found:
        """Return the model of a catalogue that was fetched just now.

        Raises:
            ModelNotFoundError: It is not there; the message names those that are.
        """
        info = catalogue.find(name, version)
        if info is None:
            raise catalogue.not_found(name, version, self.settings.target)
        return Found(info, catalogue)

    def start_attempts(self, now_s: float, timeout_s: float) -> Attempts:
        """Begin a call. A server that was never reached is given up sooner."""
        retry = self.settings.retry
        if self._contacted or self.settings.wait_for_ready:
            total_s = max(retry.total_s, timeout_s)
        else:
            total_s = retry.connect_s
        return start_attempts(retry, now_s, total_s=total_s)

    def succeeded(self) -> None:
        """Note that the server answered."""
        self._contacted = True

    def wait_s(self, error: grpc.RpcError, attempts: Attempts, now_s: float) -> float | None:
        """Return how long to wait before the next attempt, or None to give up."""
        chance = random.random()  # noqa: S311 - spreads clients in time; guards no secret
        return attempts.wait_s(_failure_of(error), now_s, chance)

    def wait_for_models_s(
        self, catalogue: Catalogue, attempts: Attempts, now_s: float
    ) -> float | None:
        """Return how long a server that loads its first model is given, or None to go on."""
        if catalogue.models:
            return None
        return attempts.wait_s(Failure(code=grpc.StatusCode.UNAVAILABLE), now_s, 1.0)

    def error(self, error: grpc.RpcError, attempts: Attempts, now_s: float) -> CallError:
        """Return the exception for a call that is given up, and forget what it may disprove."""
        status = cast("_Status", error)
        call = FailedCall(
            target=self.settings.target,
            code=status.code(),
            details=status.details() or "",
            attempts=attempts.sent,
            elapsed_s=now_s - attempts.started_s,
        )
        if status.code() is grpc.StatusCode.NOT_FOUND:
            self.forget()
        if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not self._contacted:
            return UnavailableError(call)
        return error_of_call(call)

    def health_of(self, error: grpc.RpcError, attempts: Attempts, now_s: float) -> Health:
        """Return the health that a failed check stands for.

        Raises:
            CallError: It stands for none.
        """
        if cast("_Status", error).code() is grpc.StatusCode.NOT_FOUND:
            return Health.SERVICE_UNKNOWN
        raise self.error(error, attempts, now_s) from error


def _failure_of(error: grpc.RpcError) -> Failure:
    """Return what the retry policy needs to know of a failed attempt."""
    status = cast("_Status", error)
    for key, value in status.trailing_metadata() or ():
        if key == _PUSHBACK:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            return Failure(code=status.code(), pushback_ms=text)
    return Failure(code=status.code())


def check_timeout(timeout_s: float) -> float:
    """Return `timeout_s` if it is a length of time.

    Raises:
        InputError: It is not above 0, or has no end.
    """
    if not 0 < timeout_s < float("inf"):
        raise InputError(f"timeout_s: expected seconds above 0 and finite, got {timeout_s}")
    return timeout_s


# grpc.health.v1 sends one string in field 1 and gets one enum in field 1: the same bytes as these
# two messages, which come with protobuf itself.
def encode_health_request(service: str) -> bytes:
    """Return a HealthCheckRequest."""
    return wrappers_pb2.StringValue(value=service).SerializeToString()


def decode_health_response(data: bytes) -> Health:
    """Return the status of a HealthCheckResponse."""
    names = (Health.UNKNOWN, Health.SERVING, Health.NOT_SERVING, Health.SERVICE_UNKNOWN)
    status = wrappers_pb2.UInt32Value.FromString(data).value
    return names[status] if status < len(names) else Health.UNKNOWN


class _Status(Protocol):
    """What both kinds of gRPC error offer."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Any: ...
