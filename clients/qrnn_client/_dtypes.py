"""The number types of the wire and their numpy dtypes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np

from qrnn_client._errors import InputError, ProtocolError
from qrnn_protos.v1 import prediction_pb2 as pb

DType = np.dtype[Any]

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)

_DTYPE_OF_WIRE: dict[pb.DataType, DType] = {
    pb.DATA_TYPE_FLOAT32: FLOAT32,
    pb.DATA_TYPE_FLOAT16: np.dtype(np.float16),
    pb.DATA_TYPE_FLOAT64: FLOAT64,
    pb.DATA_TYPE_INT32: INT32,
    pb.DATA_TYPE_INT64: INT64,
}
_WIRE_OF_DTYPE = {dtype: wire for wire, dtype in _DTYPE_OF_WIRE.items()}
_NAME_OF_WIRE = {wire: dtype.name for wire, dtype in _DTYPE_OF_WIRE.items()} | {
    pb.DATA_TYPE_BFLOAT16: "bfloat16"
}


def dtype_of_wire(wire: pb.DataType) -> DType:
    """Return the numpy dtype of a DataType.

    Raises:
        InputError: It is bfloat16 and ml_dtypes is not installed; numpy alone has no such type.
        ProtocolError: It is none that this client knows.
    """
    if wire == pb.DATA_TYPE_BFLOAT16:
        return _bfloat16()
    if wire not in _DTYPE_OF_WIRE:
        raise ProtocolError(f"dtype: expected one of {sorted(_NAME_OF_WIRE.values())}, got {wire}")
    return _DTYPE_OF_WIRE[wire]


def wire_of_dtype(dtype: DType) -> pb.DataType:
    """Return the DataType of a numpy dtype that `dtype_of_wire` gives."""
    wire = _WIRE_OF_DTYPE.get(dtype)
    if wire is not None:
        return wire
    if is_bfloat16(dtype):
        return pb.DATA_TYPE_BFLOAT16
    raise InputError(f"dtype: expected one of {sorted(_NAME_OF_WIRE.values())}, got {dtype}")


def wire_name(wire: pb.DataType) -> str:
    """Return the numpy name of a DataType, for example "float32"."""
    return _NAME_OF_WIRE.get(wire, f"unknown ({wire})")


def dtype_of_name(name: str) -> DType:
    """Return the numpy dtype of a name that `wire_name` gives."""
    return _bfloat16() if name == "bfloat16" else np.dtype(name)


def is_bfloat16(dtype: DType) -> bool:
    """Say whether `dtype` is the bfloat16 of ml_dtypes."""
    # numpy knows the type as a void; making its name up takes long.
    return dtype.kind == "V" and dtype.name == "bfloat16"


def is_float(dtype: DType) -> bool:
    """Say whether `dtype` is a float of the wire."""
    return dtype.kind == "f" or is_bfloat16(dtype)


@functools.cache
def _bfloat16() -> DType:
    if importlib.util.find_spec("ml_dtypes") is None:
        raise InputError(
            "this model computes in bfloat16, which numpy has only with ml_dtypes: "
            "pip install ml-dtypes"
        )
    return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
