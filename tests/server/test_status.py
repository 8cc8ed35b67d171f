"""Errors as gRPC status with details that a client can act on."""

from __future__ import annotations

import inspect
import math

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from qrnn_serve.core import errors
from qrnn_serve.core.errors import OverloadedError, QRNNError
from qrnn_serve.server.status import code_of, status_of
from qrnn_serve.server.validation import FieldError

CODES = {
    "InputError": grpc.StatusCode.INVALID_ARGUMENT,
    "DTypeError": grpc.StatusCode.INVALID_ARGUMENT,
    **dict.fromkeys(
        (
            "ArtefactError",
            "CheckpointError",
            "UntrustedFileError",
            "AmbiguousCheckpointError",
            "ConfigError",
        ),
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    "NotAllowedError": grpc.StatusCode.PERMISSION_DENIED,
    "ModelNotFoundError": grpc.StatusCode.NOT_FOUND,
    "OverloadedError": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DeadlineExceededError": grpc.StatusCode.DEADLINE_EXCEEDED,
    "UnavailableError": grpc.StatusCode.UNAVAILABLE,
}
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, QRNNError) and cls.__module__ == errors.__name__
]


def details(status):
    trailers = dict(status.trailers)
    return status_pb2.Status.FromString(trailers["grpc-status-details-bin"])


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_code(cls):
    """Errors of the caller, of load and of lookup have their own codes; all others are INTERNAL."""
    assert code_of(cls) == CODES.get(cls.__name__, grpc.StatusCode.INTERNAL)


def test_wrong_field_comes_as_bad_request():
    """A wrong field reaches the client as data: name, expected, got."""
    status = status_of(FieldError("values", expected="float32 [any, 2]", got="float64 [3, 2]"))

    rich = details(status)
    bad_request = error_details_pb2.BadRequest()
    assert rich.details[0].Unpack(bad_request)
    violation = bad_request.field_violations[0]
    assert (violation.field, violation.description) == (
        "values",
        "expected float32 [any, 2], got float64 [3, 2]",
    )
    assert (rich.code, rich.message) == (3, status.message)


def test_overload_comes_with_a_time_to_wait():
    """A refused caller gets the computed wait as RetryInfo and as gRPC's own pushback."""
    status = status_of(OverloadedError("full", retry_after_s=0.0125))

    retry = error_details_pb2.RetryInfo()
    assert details(status).details[0].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 12_500_000
    assert dict(status.trailers)["grpc-retry-pushback-ms"] == "13"


def test_request_that_never_fits_is_not_to_be_retried():
    """A request larger than the server takes tells gRPC clients not to send it again."""
    status = status_of(OverloadedError("too large", retry_after_s=math.inf))

    assert dict(status.trailers) == {"grpc-retry-pushback-ms": "-1"}
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_status_stays_below_the_limit_of_header_lists():
    """A long message is cut, so that the status reaches the client at all."""
    status = status_of(FieldError("x" * 5000, expected="y" * 5000, got="z" * 5000))

    assert len(status.message) + sum(len(key) + len(value) for key, value in status.trailers) < 8192
