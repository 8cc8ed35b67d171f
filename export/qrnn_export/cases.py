"""The points at which an artefact is compared with the module it was made from.

Letters: B rows, T timesteps, N timesteps of all rows, I input width, C output width, S state width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qrnn_serve.model.config import SequenceModelConfig

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Point:
    """One size to try: T, B, whether rows differ in length, whether a state comes in."""

    timesteps: int
    rows: int
    uneven: bool
    with_state: bool


POINTS = (
    Point(1, 1, uneven=False, with_state=False),
    Point(1, 3, uneven=False, with_state=True),
    Point(2, 2, uneven=False, with_state=False),
    Point(4, 1, uneven=False, with_state=True),
    Point(5, 3, uneven=True, with_state=False),
    Point(7, 2, uneven=True, with_state=True),
    Point(9, 3, uneven=True, with_state=True),
    Point(5, 65, uneven=True, with_state=False),
    Point(500, 1, uneven=False, with_state=False),
    Point(500, 3, uneven=True, with_state=True),
)

_MULTIPLICATIONS = 4e10
_OUTPUT_NUMBERS = 8e6


@dataclass(frozen=True, slots=True)
class Case:
    """One batch and what the eager module makes of it.

    Attributes:
        name: For people, for example "T=7 B=2 uneven, state".
        input: [B, T, I] or int64 ids; past a row's length NaN or -1, which must not matter.
        lengths: [B] int64, or None when all rows have T.
        state: [B, S] or None.
        output: [B, T, C] or [B, C], from the module.
        state_out: [B, S], from the module.
        relative_scale: None when the difference to measure is the largest one. Else it is a
            relative norm, and this is how many times the tolerance is allowed.
    """

    name: str
    input: Array
    lengths: npt.NDArray[np.int64] | None
    state: Array | None
    output: Array
    state_out: Array
    relative_scale: float | None = None


def bounded_points(config: SequenceModelConfig, weight_count: int) -> list[Point]:
    """POINTS with T cut where a large model would compute for minutes or answer gigabytes.

    Args:
        config: The model.
        weight_count: Weights that each timestep is multiplied with.
    """
    per_timestep = config.output_size if config.pooling == "none" else 1
    limit = min(_MULTIPLICATIONS / max(weight_count, 1), _OUTPUT_NUMBERS / per_timestep)
    return [
        Point(
            timesteps=max(1, min(p.timesteps, int(limit) // p.rows)),
            rows=p.rows,
            uneven=p.uneven,
            with_state=p.with_state,
        )
        for p in POINTS
    ]


def random_batch(
    config: SequenceModelConfig, state_size: int, point: Point, dtype: npt.DTypeLike
) -> Case:
    """A batch of unit scale for one point, the same at every call; its answers are empty."""
    T, B = point.timesteps, point.rows
    random = np.random.default_rng([T, B, point.uneven, point.with_state])
    shape = (B, T, *config.timestep_shape)
    if config.takes_ids:
        values = random.integers(0, config.vocabulary_size or 1, shape)
    else:
        values = random.standard_normal(shape).astype(dtype)
    lengths = None
    if point.uneven:
        lengths = random.integers(1, T + 1, B)
        lengths[0], lengths[-1] = T, 1
        padding = np.arange(T) >= lengths[:, None]
        values[padding] = -1 if config.takes_ids else np.nan
    state = None
    if point.with_state:
        state = random.standard_normal((B, state_size)).astype(dtype)
    details = f"{' uneven' if point.uneven else ''}{', state' if point.with_state else ''}"
    nothing = np.empty(0, dtype)
    return Case(f"T={T} B={B}{details}", values, lengths, state, nothing, nothing)


def save_cases(cases: Iterable[Case], directory: Path) -> None:
    """Write each case to a file in a new folder; one is in memory at a time, if `cases` lets it."""
    directory.mkdir()
    for number, case in enumerate(cases):
        arrays: dict[str, Array] = {"name": np.array(case.name)}
        for field in ("input", "lengths", "state", "output", "state_out"):
            array = getattr(case, field)
            if array is not None:
                arrays[field] = array
        if case.relative_scale is not None:
            arrays["relative_scale"] = np.array(case.relative_scale)
        # The type stub takes the arrays for its keyword `allow_pickle`.
        np.savez(directory / f"{number:05}.npz", **arrays)  # pyright: ignore[reportArgumentType]


def load_cases(directory: Path) -> Iterator[Case]:
    """Read what `save_cases` wrote, one case at a time."""
    for path in sorted(directory.iterdir()):
        with np.load(path, allow_pickle=False) as arrays:
            yield Case(
                name=str(arrays["name"]),
                input=arrays["input"],
                lengths=arrays.get("lengths"),
                state=arrays.get("state"),
                output=arrays["output"],
                state_out=arrays["state_out"],
                relative_scale=(
                    float(arrays["relative_scale"]) if "relative_scale" in arrays else None
                ),
            )
