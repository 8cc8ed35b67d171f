"""A batch in pieces, so that each stage works on another piece at the same time.

The timesteps of all rows lie end to end, and so do the pieces: a piece is a run of timesteps. It
holds whole rows, and a part of a row where a long one is cut, which only models do that read in one
direction: that part goes on from the state that the piece before left.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64
"""Cuts within a row lie at multiples of that many of its timesteps, as the tiles of the kernels."""
_SNAP_SHARE = 0.25
_COUNTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
_LEAST_GAIN = 0.95
"""A cut into pieces must be predicted to take at most that share of the time without."""

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of a batch's timesteps.

    Attributes:
        first_row: Number of the first row that it has timesteps of.
        stop_row: One past the number of the last.
        start: Number of its first timestep among all of the batch.
        stop: One past the number of its last.
        offsets: Where its rows, or parts of rows, begin and end in it, [rows + 1] int64.
        longest: Timesteps of the longest of them.
        ended_rows: Rows, counted from the first, that end in it.
    """

    first_row: int
    stop_row: int
    start: int
    stop: int
    offsets: npt.NDArray[np.int64]
    longest: int
    ended_rows: int


def cut_pieces(offsets: npt.NDArray[np.int64], count: int, *, in_time: bool) -> list[Piece]:
    """Cut a batch into about `count` pieces of equal size.

    Args:
        offsets: Of the batch's rows, [B + 1], each row of at least one timestep.
        count: At least 1. There are fewer where rows are too long or too short for it.
        in_time: Whether rows may be cut.
    """
    total = int(offsets[-1])
    ideal = np.arange(1, count) * total // count
    cuts = np.unique([0, *_allowed(offsets, ideal, total / count, in_time=in_time), total])
    if len(cuts) <= 2:
        return [_whole(offsets)]
    return [_piece(offsets, a, b) for a, b in pairwise(cuts.tolist())]


def _allowed(
    offsets: npt.NDArray[np.int64],
    ideal: npt.NDArray[np.int64],
    size: float,
    *,
    in_time: bool,
) -> npt.NDArray[np.int64]:
    """The nearest places to the ideal ones where a cut may be."""
    rows = np.searchsorted(offsets, ideal, "right") - 1
    starts, stops = offsets[rows], offsets[np.minimum(rows + 1, len(offsets) - 1)]
    border = np.where(ideal - starts <= stops - ideal, starts, stops)
    if not in_time:
        return border
    inside = starts + np.rint((ideal - starts) / _ALIGNMENT).astype(np.int64) * _ALIGNMENT
    # A cut between rows changes no bit: it is taken where it is near enough.
    between = (np.abs(border - ideal) <= size * _SNAP_SHARE) | (inside >= stops)
    return np.where(between, border, inside)


def _whole(offsets: npt.NDArray[np.int64]) -> Piece:
    rows = len(offsets) - 1
    return Piece(
        first_row=0,
        stop_row=rows,
        start=0,
        stop=int(offsets[-1]),
        offsets=offsets,
        longest=int(np.max(np.diff(offsets), initial=0)),
        ended_rows=rows,
    )


def _piece(offsets: npt.NDArray[np.int64], start: int, stop: int) -> Piece:
    first = int(np.searchsorted(offsets, start, "right")) - 1
    stop_row = int(np.searchsorted(offsets, stop, "left"))
    inner = np.clip(offsets[first : stop_row + 1], start, stop) - start
    ended = stop_row - first - int(offsets[stop_row] > stop)
    return Piece(
        first_row=first,
        stop_row=stop_row,
        start=start,
        stop=stop,
        offsets=inner,
        longest=int(np.max(np.diff(inner), initial=0)),
        ended_rows=ended,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTimes:
    """What the stages take, measured, and how many pieces follow from it.

    Attributes:
        sizes: Timesteps of the pieces that were measured, rising, [M].
        seconds: Of each stage for them, alone, [stages, M].
        launch_s: Seconds in which one thread starts a piece's work in all stages, where one thread
            does it for all; 0 where each stage has its own.
        slowdown: Time of pieces in all stages at once over what is predicted from stages alone:
            they may share memory, caches or cores.
    """

    sizes: npt.NDArray[np.int64]
    seconds: Times
    launch_s: float = 0.0
    slowdown: float = 1.0

    def predicted(self, timesteps: int, longest: int, counts: npt.NDArray[np.int64]) -> Times:
        """Seconds of a batch cut into that many pieces, for each of `counts`.

        Args:
            timesteps: Of all rows.
            longest: Timesteps of the longest row that cannot be cut; 0 where all can.
            counts: Numbers of pieces.
        """
        mean = timesteps / counts
        # Each stage starts when the first piece reaches it; the slowest then sets the pace.
        first = self._of_stages(np.maximum(mean, longest)).sum(axis=0)
        pace = self._of_stages(mean).max(axis=0)
        pieces = np.maximum(first + (counts - 1) * pace, counts * self.launch_s)
        return np.where(counts > 1, pieces * self.slowdown, first)

    def best_count(self, timesteps: int, longest: int) -> int:
        """How many pieces a batch is cut into; 1 where more would not pay."""
        if len(self.seconds) == 1:
            return 1
        counts = _COUNTS[timesteps >= 2 * _COUNTS]
        if longest:
            counts = counts[counts <= max(timesteps // longest, 1)]
        if len(counts) < 2:
            return 1
        seconds = self.predicted(timesteps, longest, counts)
        best = int(np.argmin(seconds))
        return int(counts[best]) if seconds[best] <= _LEAST_GAIN * seconds[0] else 1

    def _of_stages(self, sizes: Times) -> Times:
        """Seconds of each stage for pieces of those sizes, [stages, sizes]."""
        return np.stack([_interpolated(sizes, self.sizes, row) for row in self.seconds])


def _interpolated(at: Times, sizes: npt.NDArray[np.int64], seconds: Times) -> Times:
    """By straight lines, the last of them going on beyond what was measured."""
    slope = 0.0
    if len(sizes) > 1:
        slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    return np.interp(at, sizes, seconds) + np.maximum(at - sizes[-1], 0) * slope
