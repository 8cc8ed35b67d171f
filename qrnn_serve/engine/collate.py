"""Parts of many requests to one packed batch, and the batch's results back to its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.request import Outcome, Part
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows


def collate(parts: Sequence[Part]) -> PackedRows:
    """Lay the rows of all parts end to end. One part alone is passed on without a copy."""
    pieces = [_rows_of(part) for part in parts]
    if len(pieces) == 1:
        return pieces[0]
    state = None
    if any(piece.state is not None for piece in pieces):
        state = np.concatenate([_state_of(piece, pieces) for piece in pieces])
    return PackedRows(
        values=np.concatenate([piece.values for piece in pieces]),
        lengths=np.concatenate([piece.lengths for piece in pieces]),
        state=state,
    )


def split(scored: ScoredRows, parts: Sequence[Part], schema: ModelSchema) -> list[Outcome]:
    """Give each part its own rows of a scored batch, as views.

    Raises:
        ReplicaError: The scorer returned another number of rows or columns than it was asked for;
            nobody is answered from such a batch.
    """
    rows = sum(part.rows for part in parts)
    timesteps = sum(part.timesteps for part in parts)
    vectors = timesteps if schema.output_per_timestep else rows
    _check_shape("output", scored.output, (vectors, schema.output_size))
    _check_shape("state", scored.state, (rows, schema.state_size))
    outcomes: list[Outcome] = []
    row = vector = 0
    for part in parts:
        next_row = row + part.rows
        next_vector = vector + (part.timesteps if schema.output_per_timestep else part.rows)
        output = scored.output[vector:next_vector]
        if not (part.ends_row or schema.output_per_timestep):
            # The output after the last timestep of a piece is not one of the model's.
            output = output[:0]
        result = ScoredRows(output=output, state=scored.state[row:next_row])
        outcomes.append(Outcome(part=part, result=result))
        row, vector = next_row, next_vector
    return outcomes


def halve(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Cut a batch of at least two rows in two, each with about half of the rows, in their order."""
    room = sum(part.rows for part in parts) // 2
    left: list[Part] = []
    right: list[Part] = []
    for part in parts:
        if room >= part.rows:
            left.append(part)
        elif room > 0:
            before, after = part.cut(part.first + room)
            left.append(before)
            right.append(after)
        else:
            right.append(part)
        room = max(room - part.rows, 0)
    return left, right


def _rows_of(part: Part) -> PackedRows:
    rows, timesteps = part.request.rows, part.timesteps
    lengths = rows.lengths[part.first : part.last]
    if part.begin > 0 or part.end is not None:
        lengths = np.array([timesteps], np.int64)
    state = part.state
    if state is None and rows.state is not None:
        state = rows.state[part.first : part.last]
    return PackedRows(values=rows.values[part.start : part.stop], lengths=lengths, state=state)


def _state_of(piece: PackedRows, pieces: Sequence[PackedRows]) -> npt.NDArray[np.generic]:
    """The state of one piece; zeros, the state of a fresh row, where its caller sent none."""
    if piece.state is not None:
        return piece.state
    like = next(other.state for other in pieces if other.state is not None)
    return np.zeros((piece.rows, like.shape[1]), like.dtype)


def _check_shape(name: str, array: npt.NDArray[np.generic], expected: tuple[int, int]) -> None:
    if array.shape != expected:
        raise ReplicaError(
            f"the scorer returned {name} of shape {array.shape}, expected {expected}; "
            "no row of the batch is answered. This is a bug."
        )
