"""Rows of uneven length as padded groups: nothing lost, padding bounded."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from qrnn_serve.scorers.grouping import group_by_length


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_groups_hold_every_timestep_once(lengths):
    """Each timestep of each row is at its place in one group, and padding is zero."""
    lengths = np.array(lengths, np.int64)
    values = np.arange(1, lengths.sum() + 1, dtype=np.float32)[:, None]
    starts = np.cumsum(lengths) - lengths

    groups = group_by_length(lengths)

    rows = np.concatenate([group.rows for group in groups])
    assert sorted(rows) == list(range(len(lengths)))
    for group in groups:
        dense = group.padded(values)
        for row, length, steps in zip(group.rows, group.lengths, dense, strict=True):
            expected = values[starts[row] : starts[row] + lengths[row]]
            assert length == lengths[row]
            np.testing.assert_array_equal(steps[:length], expected)
            assert not steps[length:].any()


def test_padding_stays_below_a_quarter_on_a_uniform_mix():
    """32 rows of 1 to 500 timesteps run in a few groups with under 25 % padding."""
    random = np.random.default_rng(0)
    for _ in range(50):
        lengths = random.integers(1, 501, 32)
        groups = group_by_length(lengths)
        padding = sum(group.padding for group in groups)
        assert padding / (padding + lengths.sum()) < 0.25
        assert len(groups) <= 12


def test_equal_lengths_are_one_group():
    """Rows of one length need no padding and run at once."""
    [group] = group_by_length(np.full(1000, 7, np.int64))

    assert group.padding == 0
    np.testing.assert_array_equal(group.rows, np.arange(1000))
