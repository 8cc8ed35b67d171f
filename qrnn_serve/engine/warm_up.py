"""Runs a scorer on made-up rows before it serves, so that no caller pays for its first calls.

Sizes double up to the batch limit: memory pools grow, executors specialise and kernels compile now.
The times are the first measure of the drain rate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.types import ModelSchema, PackedRows, Scorer

_SEED = 20161105
_LONGEST_ROW = 128
# Larger sizes of a slow model would only delay readiness: they run the same code.
_SLOW_BATCH_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpReport:
    """How the warm-up went.

    Attributes:
        timesteps: Of the largest batch that was scored.
        seconds: That it took.
        out_of_memory: True when the next larger one did not fit the device.
    """

    timesteps: int
    seconds: float
    out_of_memory: bool = False


def example_rows(schema: ModelSchema, lengths: npt.ArrayLike, *, with_state: bool) -> PackedRows:
    """Made-up rows of the given lengths that the schema allows, the same at every call."""
    random = np.random.default_rng(_SEED)
    row_lengths = np.asarray(lengths, np.int64)
    timesteps = int(row_lengths.sum())
    shape = (timesteps, *schema.timestep_shape)
    values: npt.NDArray[np.generic]
    if schema.takes_ids:
        values = random.integers(0, schema.vocabulary_size, shape, np.int64)
    else:
        values = random.standard_normal(shape).astype(schema.dtype)
    state = None
    if with_state:
        state = np.zeros((len(row_lengths), schema.state_size), schema.dtype)
    return PackedRows(values=values, lengths=row_lengths, state=state)


def warm_up(scorer: Scorer, max_timesteps: int) -> WarmUpReport:
    """Score batches of growing size, with and without carried state.

    Raises:
        ReplicaError: A score is not finite: the kernel did not run, or the weights are damaged.
        Exception: Whatever the scorer raises; such a scorer must not serve.
    """
    timesteps, seconds = 1, _score_twice(scorer, 1)
    while timesteps < max_timesteps and seconds <= _SLOW_BATCH_S:
        larger = min(timesteps * 2, max_timesteps)
        try:
            seconds = _score_twice(scorer, larger)
        except MemoryError:
            return WarmUpReport(timesteps=timesteps, seconds=seconds, out_of_memory=True)
        timesteps = larger
    return WarmUpReport(timesteps=timesteps, seconds=seconds)


def _score_twice(scorer: Scorer, timesteps: int) -> float:
    """Score made-up rows without and with state; the seconds of the second time."""
    seconds = 0.0
    for with_state in (False, True):
        rows = example_rows(scorer.schema, _lengths(timesteps), with_state=with_state)
        started_s = time.monotonic()
        scored = scorer.score(rows)
        seconds = time.monotonic() - started_s
        if not (_finite(scored.output) and _finite(scored.state)):
            raise ReplicaError(
                f"warm-up on {scorer.device}: scores of finite input are not finite; "
                "the weights are damaged or a kernel is broken"
            )
    return seconds


def _lengths(timesteps: int) -> npt.NDArray[np.int64]:
    """Uneven row lengths with the given sum."""
    random = np.random.default_rng(_SEED)
    lengths: list[int] = []
    while timesteps > 0:
        lengths.append(min(int(random.integers(1, _LONGEST_ROW + 1)), timesteps))
        timesteps -= lengths[-1]
    return np.array(lengths, np.int64)


def _finite(array: npt.NDArray[np.generic]) -> bool:
    return bool(np.isfinite(array).all())
