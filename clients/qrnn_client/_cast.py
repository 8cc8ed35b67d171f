"""One row, or many laid end to end, as an array of the type that goes over the wire."""

from __future__ import annotations

from typing import Any

import numpy as np

from qrnn_client._dtypes import INT64, DType, is_float
from qrnn_client._models import ModelInfo
from qrnn_client._rows import Array


class UnfitError(Exception):
    """What is wrong with the numbers: what the model takes, and what came."""

    def __init__(self, expected: str, got: str, *, timestep: int | None = None) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected = expected
        self.got = got
        self.timestep = timestep


def as_array(row: object) -> Array:
    """Return what the caller gave for one row as an array.

    Raises:
        UnfitError: It has no rectangular shape, or no numbers.
    """
    if row is None:
        raise UnfitError("an array", "None")
    if isinstance(row, np.ma.MaskedArray):
        raise UnfitError("an array without a mask", "a masked array: fill it or leave values out")
    try:
        array = np.asarray(row)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UnfitError("an array of numbers", f"{type(row).__name__} ({error})") from None
    if array.dtype.kind not in "iuf" and not is_float(array.dtype):
        raise UnfitError("an array of numbers", describe(array))
    return array


def cast_values(values: Array, info: ModelInfo, dtype: DType) -> Array:
    """Return `values` as the model takes them: [T, I] or [T], at least one timestep, `dtype`.

    Raises:
        UnfitError: Shape or type do not fit, or a number cannot be held by `dtype`.
    """
    if values.ndim and not len(values):
        raise unfit_empty(info)
    if not values.ndim or values.shape[1:] != info.timestep_shape:
        raise UnfitError(info.expects, describe(values))
    if values.dtype == dtype:
        return values
    return _cast_ids(values, info, dtype) if info.takes_ids else _cast_floats(values, info, dtype)


def unfit_empty(info: ModelInfo) -> UnfitError:
    """Return the error of a row without timesteps."""
    return UnfitError(f"{info.expects} with at least 1 timestep", "no timesteps")


def describe(array: Array) -> str:
    """Return type and shape, for messages."""
    return f"{array.dtype} [{', '.join(map(str, array.shape))}]"


def narrow_floats(values: Array, dtype: DType) -> Array:
    """Return floats as `dtype`, rounded to nearest; what is too large becomes infinite."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(dtype)


def overflowed(values: Array, narrowed: Array) -> bool:
    """Say whether `narrow_floats` turned a finite number into an infinite one."""
    infinite = np.isinf(narrowed)
    return bool(infinite.any()) and bool(np.isfinite(values[infinite]).any())


def _cast_ids(values: Array, info: ModelInfo, dtype: DType) -> Array:
    if values.dtype.kind not in "iu":
        raise UnfitError(info.expects, describe(values))
    if values.dtype == np.uint64 and int(values.max()) > np.iinfo(INT64).max:
        raise UnfitError("token ids within int64", str(int(values.max())))
    return values.astype(dtype)


def _cast_floats(values: Array, info: ModelInfo, dtype: DType) -> Array:
    narrowed = narrow_floats(values, dtype)
    if values.dtype.kind in "iu":
        exact: Any = narrowed.astype(np.float64) == values
        # float64 itself rounds integers past 2**53, so both ways must agree.
        if not exact.all() or not (np.abs(narrowed.astype(np.float64)) <= 2**53).all():
            raise UnfitError(f"{info.expects}, or integers that it holds exactly", describe(values))
        return narrowed
    if overflowed(values, narrowed):
        wrong = np.isinf(narrowed) & np.isfinite(values)
        timestep = int(np.argmax(wrong.any(axis=-1)))
        raise UnfitError(f"numbers within {dtype}", str(values[wrong].flat[0]), timestep=timestep)
    return narrowed
