"""Packed rows to padded groups and back, for runtimes that take only dense batches.

Rows are sorted by length and cut into groups of similar length, so that padding stays a bounded
share of the work.

Letters: N timesteps of all rows together, I input width, C output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MAX_PADDING_SHARE = 0.15
# Below that a further call of the runtime costs more than the padding.
_FREE_PADDING_TIMESTEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedGroup:
    """Rows of similar length.

    Attributes:
        rows: Their indices in the batch, [G].
        lengths: Their lengths, [G] int64.
        positions: For each timestep of the padded group, which timestep of the batch it is, [G, T];
            anything valid where the group is padded.
        real: Which timesteps are not padding, [G, T].
    """

    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    real: npt.NDArray[np.bool_]

    @property
    def padding(self) -> int:
        """Padded timesteps."""
        return int(self.real.size - self.lengths.sum())

    def padded(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The group's part of `values` [N, ...] as [G, T, ...], zero where padded."""
        dense = np.zeros((*self.real.shape, *values.shape[1:]), values.dtype)
        dense[self.real] = values[self.positions[self.real]]
        return dense


def group_by_length(lengths: npt.NDArray[np.int64]) -> list[PaddedGroup]:
    """Cut a batch into groups; every row is in exactly one.

    Args:
        lengths: Of the rows, [B], each at least 1.
    """
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    groups: list[PaddedGroup] = []
    for first, last in _bounds(lengths[order]):
        rows = order[first:last]
        longest = int(lengths[rows[0]])
        steps = np.arange(longest)
        real = steps < lengths[rows, None]
        positions = np.where(real, starts[rows, None] + steps, 0)
        groups.append(PaddedGroup(rows=rows, lengths=lengths[rows], positions=positions, real=real))
    return groups


def _bounds(descending: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where to cut rows sorted by falling length, so that each group stays within its padding."""
    bounds: list[tuple[int, int]] = []
    totals = np.concatenate(([0], np.cumsum(descending)))
    first, count = 0, len(descending)
    while first < count:
        # The share of padding grows with each row: the group ends before the first row too many.
        sizes = np.arange(1, count - first + 1)
        cells = sizes * descending[first]
        padding = cells - (totals[first + 1 :] - totals[first])
        allowed = np.maximum(cells * _MAX_PADDING_SHARE, _FREE_PADDING_TIMESTEPS)
        last = first + int(np.argmin(padding <= allowed) or count - first)
        bounds.append((first, last))
        first = last
    return bounds
