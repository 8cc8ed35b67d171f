"""Scores in float16, for callers who ask for half the bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qrnn_serve.core.errors import InputError
from qrnn_serve.engine.request import RowFailure, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows
from qrnn_serve.server.validation import MAX_ROW_PROBLEMS, FieldError

_MOST = float(np.finfo(np.float16).max)


def outputs_in_half(answer: ScoredRequest, rows: PackedRows, schema: ModelSchema) -> ScoredRequest:
    """The answer with its outputs rounded, and a failure for each row that float16 cannot hold.

    Args:
        answer: The scores of `rows`.
        rows: What was scored.
        schema: Of the model.

    Raises:
        FieldError: That is true of more than MAX_ROW_PROBLEMS rows: the reply must stay small.
    """
    scored = answer.scored
    if scored is None:
        return answer
    with np.errstate(over="ignore"):
        output = scored.output.astype(np.float16)
    low, high = float(np.min(scored.output, initial=0)), float(np.max(scored.output, initial=0))
    if low >= -_MOST and high <= _MOST:
        return replace(answer, scored=replace(scored, output=output))
    past = (np.isinf(output) & np.isfinite(scored.output)).any(axis=1)
    # Which of the scored rows each vector of the output belongs to.
    owners = np.arange(len(answer.rows))
    if schema.output_per_timestep:
        owners = np.repeat(owners, rows.lengths[answer.rows])
    lost = np.zeros(len(answer.rows), np.bool_)
    lost[owners[past]] = True
    if (count := int(lost.sum())) > MAX_ROW_PROBLEMS:
        raise FieldError(
            "output_dtype",
            expected=f"float32, as {count} rows have scores past {_MOST:g}",
            got="float16",
        )
    error = InputError(
        f"output_dtype: expected float32, as the row has a score past {_MOST:g}, the largest of "
        "float16; got float16"
    )
    failures = [RowFailure(row=row, error=error) for row in answer.rows[lost].tolist()]
    kept = ScoredRows(output=output[~lost[owners]], state=scored.state[~lost], padded_timesteps=0)
    return replace(
        answer, rows=answer.rows[~lost], scored=kept, failures=(*answer.failures, *failures)
    )
