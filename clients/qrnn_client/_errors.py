"""The errors of qrnn_client, and the one table from gRPC codes to them.

    ClientError
    |-- InputError (ValueError)           an argument is wrong; nothing was sent
    |-- FileError                         a file cannot be read, written or scored
    |-- PredictionError                   some rows have errors; carries the whole Prediction
    |-- ModelChangedError                 the server switched versions under a job
    |-- ProtocolError                     the reply does not fit the request; no score was given out
    `-- CallError                         a call failed as a whole
        |-- InvalidRequestError           ... the server does not take it as it is
        |-- ModelNotFoundError            ... no model of that name or version is loaded
        |-- AccessError                   ... credentials are missing or refused
        |-- OverloadedError               ... the server is full, also after every retry
        |-- DeadlineError (TimeoutError)  ... no answer in time
        |-- UnavailableError (ConnectionError)  ... no server there, or it went away
        `-- ServerError                   ... the server failed

One wrong row among good ones is no exception but a value: see RowError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import grpc

if TYPE_CHECKING:
    from qrnn_client._prediction import Prediction


class ClientError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(ClientError, ValueError):
    """An argument is wrong; nothing was sent."""


class FileError(ClientError):
    """A file cannot be read, written or scored."""


class PredictionError(ClientError):
    """Some rows were not scored.

    Attributes:
        prediction: The outputs of the other rows, and the error of each failed one.
    """

    def __init__(self, prediction: Prediction) -> None:
        errors = prediction.errors
        super().__init__(
            f"{len(errors)} of {len(prediction.outputs)} rows were not scored; first: {errors[0]}. "
            'The others are in .prediction; on_error="return" returns it instead of raising'
        )
        self.prediction = prediction


class ModelChangedError(ClientError):
    """The server switched to another version of the model while rows were being scored."""


class ProtocolError(ClientError):
    """The reply does not fit the request, so none of its scores can be given to a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """The facts of a call that failed for good.

    Attributes:
        target: The server, as the caller named it.
        code: gRPC status of the last attempt.
        details: The server's or gRPC's own words about it.
        attempts: How often the call was sent.
        elapsed_s: From the first attempt to giving up.
    """

    target: str
    code: grpc.StatusCode
    details: str
    attempts: int
    elapsed_s: float


class CallError(ClientError):
    """A call failed as a whole, also after the retries that its code allows.

    Attributes:
        call: Code, server, attempts and the server's words.
    """

    advice: ClassVar[str] = ""

    def __init__(self, call: FailedCall) -> None:
        tried = f"{call.attempts} attempts" if call.attempts > 1 else "1 attempt"
        message = (
            f"{call.target}: {call.code.name} after {tried} in {call.elapsed_s:.1f} s: "
            f"{call.details or 'no details given'}"
        )
        super().__init__(f"{message}. {self.advice}" if self.advice else message)
        self.call = call


class InvalidRequestError(CallError):
    """The server does not take the request as it is; sending it again cannot help."""


class ModelNotFoundError(CallError):
    """No model of that name or version is loaded."""


class AccessError(CallError):
    """Credentials are missing or refused."""

    advice = "Check the TLS files and the server's access rules"


class OverloadedError(CallError):
    """The server's queue was full, also after every retry."""

    advice = "Send fewer rows at once (Batching.in_flight), or raise RetryPolicy.total_s"


class DeadlineError(CallError, TimeoutError):
    """No answer came within timeout_s."""

    advice = "Raise timeout_s, or lower Batching.max_timesteps so that one call holds less work"


class UnavailableError(CallError, ConnectionError):
    """No server answers there, or it went away and did not come back in time."""

    advice = (
        "Is the server running (qrnn-serve ARTEFACT --port 8001)? Check host, port and TLS; "
        "wait_for_ready=True waits for a server that is still starting"
    )


class ServerError(CallError):
    """The server failed while it handled the call."""

    advice = "The server's log has the cause"


_ERROR_OF_CODE: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: ModelNotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
}


def error_of_call(call: FailedCall) -> CallError:
    """Return the exception for a call that failed for good."""
    return _ERROR_OF_CODE.get(call.code, ServerError)(call)
