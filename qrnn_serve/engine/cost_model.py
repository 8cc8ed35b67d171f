"""How long a batch takes on one replica: measured at warm-up, corrected by every batch after it.

    seconds = fixed + per_timestep * N + per_longest * T + per_row * B

with N timesteps of all rows, T timesteps of the longest row and B rows. No term is negative, so a
batch never gets cheaper by growing, and what fits a budget can be found by bisection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

# One batch, however odd its time, moves a prediction by at most 2 ** _RATE, 7 percent.
_RATE = 0.1
_MOST_ERROR = math.log(2)
# And all batches together by this factor from what warm-up found.
_MOST_DRIFT = 32.0
_SHORTEST_S = 1e-7

Number = TypeVar("Number", float, npt.NDArray[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The size of a batch and its time.

    Attributes:
        timesteps: Of all rows, N.
        longest: Timesteps of the longest row, T.
        rows: B.
        seconds: That a replica was busy with it, or is expected to be.
    """

    timesteps: int
    longest: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """The terms of the sum, in seconds; none is negative."""

    fixed: float
    per_timestep: float
    per_longest: float
    per_row: float

    def __str__(self) -> str:
        return (
            f"{self.fixed:.2e} + {self.per_timestep:.2e} x timesteps + "
            f"{self.per_longest:.2e} x longest + {self.per_row:.2e} x rows"
        )


class CostModel:
    """Predicts batches of one replica. One thread records, any thread reads."""

    def __init__(self, terms: CostTerms) -> None:
        self._start = terms
        # Replaced as a whole, so that a reader sees the terms of one moment.
        self.terms = terms

    @classmethod
    def fit(cls, launches: Sequence[Launch]) -> CostModel:
        """The terms with the least squared relative error, none negative.

        A launch that took longer than one that is larger in every way was held up by something
        else, and counts as no longer than that one.

        Args:
            launches: At least one. With fewer sizes than terms, some terms stay 0.
        """
        shapes = np.array([[1, m.timesteps, m.longest, m.rows] for m in launches], np.float64)
        seconds = np.array([max(m.seconds, _SHORTEST_S) for m in launches])
        larger = (shapes[None, :, :] >= shapes[:, None, :]).all(axis=2)
        seconds = np.where(larger, seconds, np.inf).min(axis=1)
        fixed, per_timestep, per_longest, per_row = _nonnegative_fit(shapes / seconds[:, None])
        return cls(
            CostTerms(
                fixed=fixed,
                per_timestep=per_timestep,
                per_longest=per_longest,
                per_row=per_row,
            )
        )

    def seconds(self, timesteps: Number, longest: Number, rows: Number) -> Number:
        """Predicted seconds of a batch, or of many."""
        t = self.terms
        return t.fixed + timesteps * t.per_timestep + longest * t.per_longest + rows * t.per_row

    def work_s(self, timesteps: float, rows: float, batch_s: float) -> float:
        """Predicted seconds of that much work in batches of `batch_s` seconds.

        The fixed cost of a batch is shared by what fits beside it; that of its longest row, which
        depends on what comes together, is left out.
        """
        t = self.terms
        alone = timesteps * t.per_timestep + rows * t.per_row
        return alone * batch_s / max(batch_s - t.fixed, batch_s / 2)

    def record(self, launch: Launch) -> None:
        """Learn from a batch: half of the correction is for all terms, half by their shares.

        The error is a clipped logarithm, so that a batch that was held up by something else counts
        no more than any other. A term that warm-up found to be 0 stays 0.
        """
        terms = self.terms
        predicted = max(self.seconds(launch.timesteps, launch.longest, launch.rows), _SHORTEST_S)
        error = math.log(max(launch.seconds, _SHORTEST_S) / predicted)
        step = _RATE * min(max(error, -_MOST_ERROR), _MOST_ERROR)

        def moved(name: str, amount: int) -> float:
            value, start = getattr(terms, name), getattr(self._start, name)
            share = value * amount / predicted
            value *= math.exp(step * (1 + share) / 2)
            return min(max(value, start / _MOST_DRIFT), start * _MOST_DRIFT)

        self.terms = CostTerms(
            fixed=moved("fixed", 1),
            per_timestep=moved("per_timestep", launch.timesteps),
            per_longest=moved("per_longest", launch.longest),
            per_row=moved("per_row", launch.rows),
        )


def _nonnegative_fit(relative: npt.NDArray[np.float64]) -> list[float]:
    """X >= 0 with the least |relative @ x - 1|^2.

    The best solution has some terms at 0 and solves plain least squares in the others, so with four
    terms it is found by trying every choice of them.
    """
    scale = relative.max(axis=0)
    scaled = relative / scale
    best, best_error = np.zeros(relative.shape[1]), math.inf
    terms = range(relative.shape[1])
    for count in range(1, len(terms) + 1):
        for chosen in itertools.combinations(terms, count):
            columns = scaled[:, chosen]
            solution = _least_squares(columns)
            error = float(np.square(columns @ solution - 1).sum())
            if solution.min() >= 0 and error < best_error * (1 - 1e-9):
                best = np.zeros(len(terms))
                best[list(chosen)] = solution
                best_error = error
    return (best / scale).tolist()


def _least_squares(columns: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    return np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)[0]
