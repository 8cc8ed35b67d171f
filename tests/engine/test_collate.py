"""Joining parts to a batch and splitting its results."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.collate import collate, halve, split
from qrnn_serve.engine.request import Request
from qrnn_serve.engine.types import ScoredRows
from support.scorers import FEATURE_SCHEMA, TIMESTEP_SCHEMA, sum_rows, whole_number_rows

LOOP = asyncio.new_event_loop()
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def whole_part(lengths, *, seed=0, with_state=False):
    rows = whole_number_rows(lengths, seed=seed, with_state=with_state)
    return Request(rows, LOOP.create_future(), submitted_s=0.0).whole()


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(LENGTHS, st.booleans()), min_size=1, max_size=5))
@pytest.mark.parametrize("schema", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["row", "timestep"])
def test_collate_and_split_give_each_request_its_own_scores(schema, requests):
    """Every request gets exactly the scores of its rows alone, with or without carried state."""
    parts = [
        whole_part(lengths, seed=seed, with_state=with_state)
        for seed, (lengths, with_state) in enumerate(requests)
    ]

    outcomes = split(sum_rows(schema, collate(parts)), parts, schema)

    assert [outcome.part for outcome in outcomes] == parts
    for outcome in outcomes:
        alone = sum_rows(schema, outcome.part.request.rows)
        np.testing.assert_array_equal(outcome.result.output, alone.output)
        np.testing.assert_array_equal(outcome.result.state, alone.state)


def test_collate_passes_a_lone_request_on_without_a_copy():
    """A batch of one request is the request's own memory."""
    part = whole_part([3, 1])

    assert np.shares_memory(collate([part]).values, part.request.rows.values)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(LENGTHS, min_size=1, max_size=5).filter(lambda r: sum(map(len, r)) > 1))
def test_halve_keeps_every_row_once_in_order(requests):
    """The halves of a batch are its rows in order, as even as rows allow."""
    parts = [whole_part(lengths) for lengths in requests]

    left, right = halve(parts)

    rows = [(p.request, r) for p in (*left, *right) for r in range(p.first, p.last)]
    assert rows == [(p.request, r) for p in parts for r in range(p.first, p.last)]
    difference = sum(p.rows for p in right) - sum(p.rows for p in left)
    assert difference in {0, 1}


@pytest.mark.parametrize("lost", ["output row", "output column", "state row"])
def test_split_refuses_a_batch_with_missing_results(lost):
    """A scorer that returns another count than it was asked for answers nobody."""
    parts = [whole_part([2]), whole_part([1, 1])]
    scored = sum_rows(FEATURE_SCHEMA, collate(parts))
    damaged = {
        "output row": replace(scored, output=scored.output[1:]),
        "output column": replace(scored, output=scored.output[:, :1]),
        "state row": ScoredRows(output=scored.output, state=scored.state[1:]),
    }[lost]

    with pytest.raises(ReplicaError, match="expected"):
        split(damaged, parts, FEATURE_SCHEMA)
