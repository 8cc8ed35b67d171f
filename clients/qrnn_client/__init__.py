"""Scores sequences and files on a qrnn-serve server. Needs no torch."""

from qrnn_client._aio import AsyncClient
from qrnn_client._batch import Batching
from qrnn_client._channel import TLS
from qrnn_client._client import Client
from qrnn_client._errors import (
    AccessError,
    CallError,
    ClientError,
    DeadlineError,
    FailedCall,
    FileError,
    InputError,
    InvalidRequestError,
    ModelChangedError,
    ModelNotFoundError,
    OverloadedError,
    PredictionError,
    ProtocolError,
    ServerError,
    UnavailableError,
)
from qrnn_client._models import Health, ModelInfo
from qrnn_client._prediction import Prediction, RowError, Timing
from qrnn_client._retry import RetryPolicy
from qrnn_client._rows import PackedRows

__all__ = [
    "TLS",
    "AccessError",
    "AsyncClient",
    "Batching",
    "CallError",
    "Client",
    "ClientError",
    "DeadlineError",
    "FailedCall",
    "FileError",
    "Health",
    "InputError",
    "InvalidRequestError",
    "ModelChangedError",
    "ModelInfo",
    "ModelNotFoundError",
    "OverloadedError",
    "PackedRows",
    "Prediction",
    "PredictionError",
    "ProtocolError",
    "RetryPolicy",
    "RowError",
    "ServerError",
    "Timing",
    "UnavailableError",
]
