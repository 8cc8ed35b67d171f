"""Rows in the two forms that are sent without copying them first, and the set of rows to send.

Letters: B rows of the caller, K rows that may be sent, N timesteps, I input width, S state width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qrnn_client._dtypes import DType, is_bfloat16
from qrnn_client._prediction import RowError

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows laid end to end: the form that `predict` sends without touching each row.

    Attributes:
        values: [N, I] features or [N] token ids.
        lengths: Timesteps of each row, [B] integers that sum to N.
    """

    values: Array
    lengths: npt.ArrayLike


class Values(Protocol):
    """The numbers of the rows to send."""

    def take(self, places: Indices) -> Values:
        """Return the rows at these places, ascending."""
        ...

    def buffers(self, start: int, stop: int) -> list[Array]:
        """Return the bytes of rows start to stop, in order, as C-contiguous arrays."""
        ...


@dataclass(frozen=True, slots=True)
class ListValues:
    """One C-contiguous array a row, all of one dtype."""

    arrays: list[Array]

    def take(self, places: Indices) -> ListValues:
        """Return the rows at these places, ascending."""
        return ListValues([self.arrays[place] for place in places.tolist()])

    def buffers(self, start: int, stop: int) -> list[Array]:
        """Return one buffer a row."""
        arrays = self.arrays[start:stop]
        if arrays and is_bfloat16(arrays[0].dtype):
            # ml_dtypes arrays do not offer their memory as a buffer.
            return [array.view(np.uint16) for array in arrays]
        return arrays


@dataclass(frozen=True, slots=True)
class PackedValues:
    """Rows inside one C-contiguous array, with gaps where rows were left out.

    Attributes:
        values: [N, I] or [N].
        starts: [K] first timestep of each row, ascending.
        lengths: [K] timesteps of each row.
    """

    values: Array
    starts: Indices
    lengths: Indices

    def take(self, places: Indices) -> PackedValues:
        """Return the rows at these places, ascending."""
        return PackedValues(self.values, self.starts[places], self.lengths[places])

    def buffers(self, start: int, stop: int) -> list[Array]:
        """Return one buffer for each run of rows without a gap."""
        starts, ends = self.starts[start:stop], (self.starts + self.lengths)[start:stop]
        if not len(starts):
            return []
        values = self.values.view(np.uint16) if is_bfloat16(self.values.dtype) else self.values
        after_gap = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        run_starts = starts[np.r_[0, after_gap]].tolist()
        run_ends = ends[np.r_[after_gap - 1, -1]].tolist()
        return [values[a:b] for a, b in zip(run_starts, run_ends, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """The rows of one `predict` that fit the model, and the errors of the others.

    Attributes:
        total: B, rows that the caller gave.
        index: [K] the caller's index of each row here, ascending.
        lengths: [K] timesteps of each row here, each at least 1.
        values: Their numbers.
        dtype: Type of the numbers.
        width: I; 0 for ids.
        states: [K, S] of the model's dtype, or None when every row starts fresh.
        errors: One for each row of the caller that is not in `index`, in any order.
    """

    total: int
    index: Indices
    lengths: Indices
    values: Values
    dtype: DType
    width: int
    states: Array | None
    errors: tuple[RowError, ...]

    @property
    def bytes_per_timestep(self) -> int:
        """Size of one timestep on the wire."""
        return self.dtype.itemsize * max(self.width, 1)

    def within(self, total: int, places: Indices, errors: Sequence[RowError]) -> RowSet:
        """Return the set as a part of `total` rows: its rows are at `places`, `errors` the rest."""
        own = [dataclasses.replace(error, row=int(places[error.row])) for error in self.errors]
        return dataclasses.replace(
            self, total=total, index=places[self.index], errors=(*own, *errors)
        )

    def without(self, places: Indices, errors: Sequence[RowError]) -> RowSet:
        """Return the set without the rows at these places, for which `errors` are added."""
        if not len(places):
            return self
        kept = np.delete(np.arange(len(self.index)), places)
        return dataclasses.replace(
            self,
            index=self.index[kept],
            lengths=self.lengths[kept],
            values=self.values.take(kept),
            states=None if self.states is None else self.states[kept],
            errors=(*self.errors, *errors),
        )


def starts_of(lengths: Indices) -> Indices:
    """Return where each row begins when rows of these lengths lie end to end."""
    return np.cumsum(lengths) - lengths
