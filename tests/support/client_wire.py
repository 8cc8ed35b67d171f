"""Models and messages for tests of the client's pure parts."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from qrnn_client._dtypes import wire_of_dtype
from qrnn_client._models import ModelInfo, read_catalogue
from qrnn_client.testing import FakeModel
from qrnn_protos.v1 import prediction_pb2 as pb


def make_info(**fields) -> ModelInfo:
    """Return what a client knows of a fake model with these fields."""
    return read_info(FakeModel(score=lambda row: row, **fields).info())


def read_info(message: pb.ModelInfo) -> ModelInfo:
    """Return one model of a catalogue."""
    return read_catalogue(pb.ListModelsResponse(models=[message])).models[0]


def dtype_of(name: str) -> np.dtype:
    """Return the numpy dtype of a name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def tensor(array: np.ndarray) -> pb.Tensor:
    """Return an array as a message."""
    return pb.Tensor(dtype=wire_of_dtype(array.dtype), shape=array.shape, data=array.tobytes())
