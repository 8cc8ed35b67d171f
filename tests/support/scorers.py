"""A small scorer with exact answers, that a test can block, break or make run out of memory."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np

from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageTimes

FEATURE_SCHEMA = ModelSchema(
    takes_ids=False,
    input_size=2,
    vocabulary_size=0,
    dtype="float32",
    output_name="output",
    output_size=2,
    output_per_timestep=False,
    state_size=2,
    weights_sha256="0" * 64,
)
TIMESTEP_SCHEMA = ModelSchema(
    takes_ids=False,
    input_size=2,
    vocabulary_size=0,
    dtype="float32",
    output_name="output",
    output_size=2,
    output_per_timestep=True,
    state_size=2,
    weights_sha256="0" * 64,
)
POISON = 666.0
"""A feature value that makes SumScorer fail on the batch that holds it."""


class SumScorer:
    """Scores a row as its carried state plus the sum of its timesteps; whole numbers stay exact.

    With a schema of one vector a timestep, the output is the running sum. A test may clear `gate`
    to hold batches inside `score` (`entered` is released as each arrives), set `dead`, lower
    `memory_timesteps`, or set `forgets_a_row` to lose the last of several rows. `batches` records
    the row lengths of every batch. Each batch takes at least `second_per_timestep` of its size,
    and says that it took `times`.
    """

    def __init__(
        self,
        schema: ModelSchema = FEATURE_SCHEMA,
        *,
        max_timesteps: int = 1 << 20,
        device: str = "cpu",
        second_per_timestep: float = 0.0,
    ):
        self.schema = schema
        self.second_per_timestep = second_per_timestep
        self.max_timesteps = max_timesteps
        self.device = device
        self.engine = "native"
        self.stages = ()
        self.alive = True
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.dead = False
        self.graphs = self.replayed = 0
        self.forgets_a_row = False
        self.memory_timesteps = 1 << 30
        self.batches: list[list[int]] = []
        self.times = StageTimes(compute_s=1e-6)
        self.closed = False

    def score(self, rows: PackedRows) -> ScoredRows:
        self.batches.append(rows.lengths.tolist())
        self.entered.release()
        self.gate.wait()
        if self.second_per_timestep:
            # A device that works beside this process, not on its processor.
            time.sleep(self.second_per_timestep * rows.timesteps)
        if self.dead:
            raise RuntimeError("the device is gone")
        if rows.timesteps > self.memory_timesteps:
            raise MemoryError(f"no room for {rows.timesteps} timesteps")
        if (rows.values == POISON).any():
            raise RuntimeError("poisoned value")
        scored = replace(
            sum_rows(self.schema, rows),
            times=self.times,
            graphs=self.graphs,
            replayed=self.replayed,
        )
        if self.forgets_a_row and rows.rows > 1:
            return replace(scored, output=scored.output[:-1])
        return scored

    def interrupt(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def sum_rows(schema: ModelSchema, rows: PackedRows) -> ScoredRows:
    """What SumScorer answers, row by row."""
    state = rows.state
    if state is None:
        state = np.zeros((rows.rows, schema.state_size), schema.dtype)
    outputs, states, start = [], [], 0
    for row, length in enumerate(rows.lengths):
        running = state[row] + np.cumsum(rows.values[start : start + length], axis=0)
        outputs.append(running if schema.output_per_timestep else running[-1:])
        states.append(running[-1:])
        start += length
    dtype = schema.dtype
    return ScoredRows(
        output=np.concatenate(outputs).astype(dtype), state=np.concatenate(states).astype(dtype)
    )


def whole_number_rows(lengths, *, seed: int = 0, with_state: bool = False) -> PackedRows:
    """Rows of small whole numbers for FEATURE_SCHEMA and TIMESTEP_SCHEMA."""
    random = np.random.default_rng(seed)
    values = random.integers(-9, 10, (int(np.sum(lengths)), 2)).astype(np.float32)
    state = random.integers(-9, 10, (len(lengths), 2)).astype(np.float32) if with_state else None
    return PackedRows(values=values, lengths=np.asarray(lengths, np.int64), state=state)
