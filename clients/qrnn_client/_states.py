"""Carried states that the caller gives, joined to the rows they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qrnn_client._cast import UnfitError, as_array, describe, narrow_floats, overflowed
from qrnn_client._checks import row_error
from qrnn_client._dtypes import DType, dtype_of_name, is_float
from qrnn_client._errors import InputError
from qrnn_client._models import ModelInfo
from qrnn_client._prediction import RowError
from qrnn_client._rows import Array, RowSet

States = Sequence[npt.ArrayLike | None] | npt.NDArray[Any]


def attach_states(rows: RowSet, states: States, info: ModelInfo) -> RowSet:
    """Return `rows` with their states; rows whose state does not fit leave with an error.

    Args:
        rows: The rows to send.
        states: [B, S], or for each of the caller's rows [S], or None for a fresh start.
        info: The model that they are for.

    Raises:
        InputError: There is not one state a row.
    """
    if len(states) != rows.total:
        raise InputError(f"states: expected one a row, {rows.total}, got {len(states)}")
    dtype = dtype_of_name(info.dtype)
    shape = (rows.total, info.state_size)
    if isinstance(states, np.ndarray) and states.shape == shape and states.dtype == dtype:
        return dataclasses.replace(rows, states=states[rows.index])
    # A state of zeros is a fresh start.
    sent = np.zeros((len(rows.index), info.state_size), dtype)
    unfit: list[int] = []
    errors: list[RowError] = []
    given: Sequence[Any] | Array = states
    for place, row in enumerate(rows.index.tolist()):
        state: Any = given[row]
        if state is None:
            continue
        try:
            sent[place] = _cast_state(state, info, dtype)
        except UnfitError as error:
            unfit.append(place)
            errors.append(row_error(row, error, field="state"))
    with_states = dataclasses.replace(rows, states=sent)
    return with_states.without(np.array(unfit, np.int64), errors)


def _cast_state(state: npt.ArrayLike, info: ModelInfo, dtype: DType) -> Array:
    array = as_array(state)
    if array.shape != (info.state_size,) or not is_float(array.dtype):
        raise UnfitError(f"a state [{info.state_size}] {info.dtype}", describe(array))
    narrowed = narrow_floats(array, dtype)
    if overflowed(array, narrowed):
        raise UnfitError(f"numbers within {dtype}", "larger ones")
    return narrowed
