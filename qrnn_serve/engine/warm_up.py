"""Runs a scorer on made-up rows before it serves, so that no caller pays for its first calls.

Sizes double up to the largest batch: memory pools grow, executors specialise and kernels compile
now. The times are what the cost model is fitted to, so each size runs as rows of uneven length, as
one row, and as rows of one timestep.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.cost_model import Launch
from qrnn_serve.engine.types import ModelSchema, PackedRows, Scorer

_SEED = 20161105
_LONGEST_ROW = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpReport:
    """How the warm-up went.

    Attributes:
        launches: What was scored, and how long each took once it had run before.
        timesteps: Of the largest batch that was scored.
        out_of_memory: True when the next larger one did not fit the device.
    """

    launches: tuple[Launch, ...]
    timesteps: int
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


def warm_up(scorer: Scorer, limits: BatchLimits) -> WarmUpReport:
    """Score batches of growing size, with and without carried state.

    Sizes end with the limit, or with the first that takes longer than a batch should: larger ones
    would only delay readiness. They grow in any case until the time grows with them.

    Raises:
        ReplicaError: A score is not finite: the kernel did not run, or the weights are damaged.
        Exception: Whatever the scorer raises; such a scorer must not serve.
    """
    launches: list[Launch] = []
    timesteps, larger, enough_s = 0, 1, limits.target_s
    while timesteps < limits.max_timesteps:
        try:
            measured = [_measure(scorer, lengths) for lengths in _shapes(larger, limits.max_rows)]
        except MemoryError:
            if not launches:
                raise
            return WarmUpReport(launches=tuple(launches), timesteps=timesteps, out_of_memory=True)
        launches += measured
        enough_s = max(enough_s, 2 * launches[0].seconds)
        timesteps = larger
        if measured[0].seconds > enough_s:
            break
        larger = min(timesteps * 2, limits.max_timesteps)
    return WarmUpReport(launches=tuple(launches), timesteps=timesteps)


def _measure(scorer: Scorer, lengths: npt.NDArray[np.int64]) -> Launch:
    """Score made-up rows without and with state; the shorter of both times."""
    times_s: list[float] = []
    for with_state in (False, True):
        rows = example_rows(scorer.schema, lengths, with_state=with_state)
        started_s = time.monotonic()
        scored = scorer.score(rows)
        times_s.append(time.monotonic() - started_s)
        if not (_finite(scored.output) and _finite(scored.state)):
            raise ReplicaError(
                f"warm-up on {scorer.device}: scores of finite input are not finite; "
                "the weights are damaged or a kernel is broken"
            )
    return Launch(
        timesteps=int(lengths.sum()),
        longest=int(lengths.max()),
        rows=len(lengths),
        seconds=min(times_s),
    )


def _shapes(timesteps: int, max_rows: int) -> list[npt.NDArray[np.int64]]:
    """Row lengths with the given sum: uneven, one row, and as many rows as may be."""
    shapes = [_uneven_lengths(timesteps)]
    if timesteps > 1:
        shapes.append(np.array([timesteps], np.int64))
        shapes.append(np.ones(min(timesteps, max_rows), np.int64))
    return shapes


def _uneven_lengths(timesteps: int) -> npt.NDArray[np.int64]:
    """Uneven row lengths with the given sum."""
    random = np.random.default_rng(_SEED)
    lengths: list[int] = []
    while timesteps > 0:
        lengths.append(min(int(random.integers(1, _LONGEST_ROW + 1)), timesteps))
        timesteps -= lengths[-1]
    return np.array(lengths, np.int64)


def _finite(array: npt.NDArray[np.generic]) -> bool:
    return bool(np.isfinite(array).all())
