"""Errors to gRPC status: one table, and the details that a client can act on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from qrnn_serve.core.errors import (
    ArtefactError,
    CheckpointError,
    ConfigError,
    DeadlineExceededError,
    InputError,
    ModelNotFoundError,
    NotAllowedError,
    OverloadedError,
    QRNNError,
    UnavailableError,
)
from qrnn_serve.server.validation import FieldError

_CODES: dict[type[BaseException], grpc.StatusCode] = {
    InputError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    NotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    # Of a model that was to be loaded.
    ArtefactError: grpc.StatusCode.FAILED_PRECONDITION,
    CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    QRNNError: grpc.StatusCode.INTERNAL,
}
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_NEVER_RETRY = "-1"
# Trailers share gRPC's 8 KB limit of header lists, and the text is in them twice.
_MAX_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """How a call that failed ends.

    Attributes:
        code: The status code.
        message: For people.
        trailers: google.rpc.Status with BadRequest or RetryInfo, and gRPC's own retry pushback.
    """

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def code_of(error: type[QRNNError]) -> grpc.StatusCode:
    """The code for a class of errors: its own, or that of its nearest base in the table."""
    return next(_CODES[base] for base in error.__mro__ if base in _CODES)


def status_of(error: QRNNError) -> CallStatus:
    """The status that tells a caller about `error`."""
    code = code_of(type(error))
    message = str(error)[:_MAX_MESSAGE_CHARACTERS]
    status = status_pb2.Status(code=code.value[0], message=message)
    trailers: list[tuple[str, str | bytes]] = []
    if isinstance(error, FieldError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=f"expected {error.expected}, got {error.got}"[:500]
        )
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError):
        if math.isinf(error.retry_after_s):
            trailers.append((_PUSHBACK_KEY, _NEVER_RETRY))
        else:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
            _add(status, retry)
            trailers.append((_PUSHBACK_KEY, str(math.ceil(error.retry_after_s * 1000))))
    if status.details:
        trailers.append((_DETAILS_KEY, status.SerializeToString()))
    return CallStatus(code=code, message=message, trailers=tuple(trailers))


def _add(
    status: status_pb2.Status,
    detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)
