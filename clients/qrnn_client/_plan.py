"""From a caller's rows to calls, and from their answers to a Prediction. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qrnn_client._batch import (
    Batching,
    cut,
    refuse_oversized,
    reply_bytes,
    request_bytes,
    server_batching,
)
from qrnn_client._codec import Answer, Call
from qrnn_client._models import Found, ModelInfo
from qrnn_client._prediction import Prediction, Timing
from qrnn_client._rows import Indices, RowSet, starts_of
from qrnn_client._states import States, attach_states

_Outputs = list[npt.NDArray[Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a caller asks for beside the scores.

    Attributes:
        states: The rows' carried states.
        return_state: Ask for the states after the rows.
        version: Version to ask for; empty for the one that serves.
    """

    states: States | None = None
    return_state: bool = False
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The calls that score some rows.

    Attributes:
        info: The model.
        rows: The rows that are sent, and the errors of those that are not.
        calls: Requests that together hold each row once, in order.
        return_state: The rows' states were asked for.
        request_id: What the calls' ids begin with.
    """

    info: ModelInfo
    rows: RowSet
    calls: tuple[Call, ...]
    return_state: bool
    request_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """The answer of one call, and how often it was sent."""

    answer: Answer
    attempts: int


def plan_calls(row_set: RowSet, found: Found, batching: Batching, options: Options) -> Plan:
    """Cut rows that fit the model into calls that fit the server.

    Raises:
        InputError: The states are wrong as a whole.
    """
    info, catalogue = found.info, found.catalogue
    if options.states is not None:
        row_set = attach_states(row_set, options.states, info)
    sizes = row_sizes(row_set, info, options)
    fitting = refuse_oversized(row_set, sizes, catalogue)
    if fitting is not row_set:
        row_set, sizes = fitting, row_sizes(fitting, info, options)
    request_id = uuid.uuid4().hex
    parts = cut(sizes, row_set.lengths, server_batching(batching, catalogue))
    calls = tuple(
        Call(
            info=info,
            version=options.version,
            rows=row_set,
            part=part,
            return_state=options.return_state,
            request_id=f"{request_id}/{number}",
        )
        for number, part in enumerate(parts)
    )
    return Plan(
        info=info,
        rows=row_set,
        calls=calls,
        return_state=options.return_state,
        request_id=request_id,
    )


def join_answers(plan: Plan, sent: Sequence[Sent], *, total_s: float) -> Prediction:
    """Return the answers of every call of `plan` as one Prediction, in the caller's order."""
    answers = [item.answer for item in sent]
    timings = [answer.timing for answer in answers]
    outputs: _Outputs = [None for _ in range(plan.rows.total)]
    states = outputs.copy() if plan.return_state else None
    errors = list(plan.rows.errors)
    for answer in answers:
        _place(outputs, answer.index, output_rows(answer, plan.info))
        errors += answer.errors
        if states is not None and answer.state is not None:
            _place(states, answer.index, list(answer.state))
    return Prediction(
        outputs=outputs,
        errors=sorted(errors, key=lambda error: error.row),
        states=states,
        model=plan.info.name,
        version=plan.info.version,
        output_name=plan.info.output_name,
        devices=tuple(dict.fromkeys(answer.device for answer in answers)),
        engine=answers[0].engine if answers else "",
        request_id=plan.request_id,
        timing=Timing(
            total_s=total_s,
            decode_s=sum(timing.decode_s for timing in timings),
            queue_s=sum(timing.queue_s for timing in timings),
            upload_s=sum(timing.upload_s for timing in timings),
            compute_s=sum(timing.compute_s for timing in timings),
            download_s=sum(timing.download_s for timing in timings),
            encode_s=sum(timing.encode_s for timing in timings),
            calls=len(answers),
            attempts=sum(item.attempts for item in sent),
        ),
    )


def output_rows(answer: Answer, info: ModelInfo) -> list[npt.NDArray[Any]]:
    """Return one view a scored row: [C], or [T, C]."""
    if not info.output_per_timestep:
        return list(answer.output)
    starts = starts_of(answer.lengths).tolist()
    ends = np.cumsum(answer.lengths).tolist()
    return [answer.output[a:b] for a, b in zip(starts, ends, strict=True)]


def _place(into: _Outputs, index: Indices, views: Sequence[npt.NDArray[Any]]) -> None:
    if not len(index):
        return
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        into[first : last + 1] = views
        return
    for row, view in zip(index.tolist(), views, strict=True):
        into[row] = view


def row_sizes(rows: RowSet, info: ModelInfo, options: Options) -> Indices:
    """Return the bytes of each row, [K], in the message where it takes more: request or reply."""
    reply = reply_bytes(rows, info, return_state=options.return_state)
    return np.maximum(request_bytes(rows), reply)
