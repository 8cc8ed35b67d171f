"""The errors of qrnn_serve and qrnn_export.

    QRNNError
    |-- InputError (ValueError)        a tensor, row or argument is wrong: the caller's to mend
    |   `-- DTypeError (TypeError)     ... because of its dtype
    |-- ConfigError (ValueError)       a setting is unknown, missing or out of range
    |-- CheckpointError                a model file cannot be used
    |   |-- UntrustedFileError         ... without running code that it carries
    |   `-- AmbiguousCheckpointError   ... without facts that the file does not hold
    |-- ArtefactError                  an exported file is damaged, or not one of ours
    |-- KernelError (RuntimeError)     a kernel is missing, does not compile, or failed to run
    |-- ModelNotFoundError             no model of that name or version is loaded
    |-- NotAllowedError                the server was not started for what a caller asks
    |-- OverloadedError                the queue is full; comes with a time to wait
    |-- DeadlineExceededError          the caller's deadline passed before the rows were scored
    |-- UnavailableError               shutting down, or no replica is left
    `-- ReplicaError                   a batch failed on a device

They know nothing of gRPC: one table in qrnn_serve.server turns them into status codes.
"""

from __future__ import annotations


class QRNNError(Exception):
    """Base of every error that this project raises on purpose."""


class InputError(QRNNError, ValueError):
    """A tensor, row or argument from the caller is wrong."""


class DTypeError(InputError, TypeError):
    """A tensor has a dtype that the operation does not take, or dtypes that do not match."""


class ConfigError(QRNNError, ValueError):
    """A setting is unknown, missing or out of range."""


class CheckpointError(QRNNError):
    """A model file cannot be used."""


class UntrustedFileError(CheckpointError):
    """Loading the file would run code that it carries; that needs an explicit flag."""


class AmbiguousCheckpointError(CheckpointError):
    """The file lacks a fact that the model needs; the message names the flag that gives it."""


class ArtefactError(QRNNError):
    """An exported file is damaged, from another format version, or not one of ours."""


class KernelError(QRNNError, RuntimeError):
    """A kernel is missing, does not compile for this device, or failed to run."""


class ModelNotFoundError(QRNNError):
    """No model of that name or version is loaded."""


class NotAllowedError(QRNNError):
    """The server was not started for what a caller asks."""


class OverloadedError(QRNNError):
    """The request queue is full.

    Attributes:
        retry_after_s: Seconds until the queue is expected to have room.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(QRNNError):
    """The caller's deadline passed before the rows were scored."""


class UnavailableError(QRNNError):
    """The server is shutting down, or no replica is left."""


class ReplicaError(QRNNError):
    """A batch failed on its device."""
