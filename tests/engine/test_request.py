"""A request's parts joined to one answer, whatever order they end in."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.collate import collate, split
from qrnn_serve.engine.request import BatchFacts, Outcome, Request
from qrnn_serve.engine.types import StageTimes
from support.scorers import FEATURE_SCHEMA, TIMESTEP_SCHEMA, sum_rows, whole_number_rows

LOOP = asyncio.new_event_loop()
FACTS = BatchFacts(
    started_s=12.0,
    seconds=2.0,
    times=StageTimes(upload_s=0.25, compute_s=0.5, download_s=1.0),
    predicted_s=0.4,
    rows=4,
    timesteps=9,
    padded_timesteps=0,
    device="cpu",
    engine="native",
)


def cut_at(part, rows):
    """The part cut before each of the rows."""
    parts = []
    for row in rows:
        before, part = part.cut(row)
        parts.append(before)
    return [*parts, part]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_are_joined_in_the_order_of_the_rows(data):
    """Parts that end in any order, some in errors, make one answer that names each row once."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    cuts = data.draw(st.sets(st.integers(1, len(lengths)))) - {len(lengths)}
    request = Request(
        whole_number_rows(lengths, with_state=True), LOOP.create_future(), submitted_s=10.0
    )
    parts = cut_at(request.whole(), sorted(cuts))
    broken = data.draw(st.sets(st.sampled_from(range(len(parts)))))
    outcomes = [
        Outcome(
            part=part,
            result=ReplicaError(f"part {number}")
            if number in broken
            else sum_rows(TIMESTEP_SCHEMA, collate([part])),
        )
        for number, part in enumerate(parts)
    ]

    order = data.draw(st.permutations(outcomes))
    answers = [
        request.add([outcome], replace(FACTS, device=f"cuda:{number % 2}", started_s=20.0 - number))
        for number, outcome in enumerate(order)
    ]

    *before, answer = answers
    assert before == [None] * (len(parts) - 1)
    good = [o for number, o in enumerate(outcomes) if number not in broken]
    bad = [row for n in sorted(broken) for row in range(parts[n].first, parts[n].last)]
    assert [failure.row for failure in answer.failures] == bad
    np.testing.assert_array_equal(answer.rows, sorted(set(range(len(lengths))) - set(bad)))
    if good:
        expected = np.concatenate([outcome.result.output for outcome in good])
        np.testing.assert_array_equal(answer.scored.output, expected)
        states = np.concatenate([outcome.result.state for outcome in good])
        np.testing.assert_array_equal(answer.scored.state, states)
    else:
        assert answer.scored is None
    assert answer.timing.queue_s == 20.0 - (len(parts) - 1) - 10.0
    timing = answer.timing
    stages_s = np.array([timing.upload_s, timing.compute_s, timing.download_s])
    np.testing.assert_array_equal(stages_s, np.array([0.25, 0.5, 1.0]) * len(parts))
    assert answer.device == ("cuda:0,cuda:1" if len(parts) > 1 else "cuda:0")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("schema", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["last", "timestep"])
def test_pieces_of_a_row_are_joined(schema, data):
    """A row scored in pieces is one row of the answer, or one failure whatever its others gave."""
    length = data.draw(st.integers(2, 12))
    request = Request(whole_number_rows([3, length, 2]), LOOP.create_future(), submitted_s=0.0)
    before, part = request.whole().cut(1)
    part, after = part.cut(2)
    broken = data.draw(st.none() | st.integers(0, 2))
    outcomes = scored_parts(schema, [before, after])
    state, number, whole = None, 0, False
    while not whole:
        piece, rest = replace(part, state=state), None
        if number < 2 and part.timesteps > 1:
            piece, rest = piece.cut_in_time(data.draw(st.integers(1, part.timesteps - 1)))
        (outcome,) = scored_parts(schema, [piece])
        state, part, whole = outcome.result.state, rest, rest is None
        if broken == number:
            outcome, whole = Outcome(part=piece, result=ReplicaError("x")), True
        outcomes.append(outcome)
        number += 1

    # Pieces come one after the other, anywhere among the other rows.
    order = data.draw(st.permutations([o.part.first for o in outcomes]))
    in_order = {row: iter([o for o in outcomes if o.part.first == row]) for row in order}
    answers = [request.add([next(in_order[row])], FACTS) for row in order]

    assert sum(answer is not None for answer in answers) == 1
    answer = next(answer for answer in answers if answer is not None)
    failed = isinstance(outcomes[-1].result, ReplicaError)
    expected = [o.result for o in scored_parts(schema, request_rows(request))]
    expected = [expected[row] for row in ([0, 2] if failed else [0, 1, 2])]
    assert [failure.row for failure in answer.failures] == [1] * failed
    np.testing.assert_array_equal(answer.rows, [0, 2] if failed else [0, 1, 2])
    np.testing.assert_array_equal(
        answer.scored.output, np.concatenate([e.output for e in expected])
    )
    np.testing.assert_array_equal(answer.scored.state, np.concatenate([e.state for e in expected]))


def scored_parts(schema, parts):
    return split(sum_rows(schema, collate(parts)), parts, schema)


def request_rows(request):
    return cut_at(request.whole(), range(1, request.rows.rows))


def test_bytes_of_parts_sum_to_those_of_the_request():
    """However a request is cut, the queue counts its bytes exactly once."""
    request = Request(whole_number_rows([3, 1, 7, 2]), LOOP.create_future(), submitted_s=0.0)

    assert sum(part.nbytes for part in cut_at(request.whole(), [1, 3])) == request.whole().nbytes


def test_row_answered_twice_is_found_out():
    """Two answers for a row are a bug that is reported, not a reply."""
    request = Request(whole_number_rows([3]), LOOP.create_future(), submitted_s=0.0)
    outcome = Outcome(part=request.whole(), result=ReplicaError("x"))
    request.add([outcome], FACTS)

    with pytest.raises(RuntimeError, match="twice"):
        request.add([outcome], FACTS)
