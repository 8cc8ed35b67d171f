"""How a batch is cut into pieces, and how many are chosen from times."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrnn_serve.scorers.pieces import PieceTimes, cut_pieces

lengths_of_rows = st.lists(st.integers(1, 3000), min_size=1, max_size=40)


def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@given(lengths=lengths_of_rows, count=st.integers(1, 64), in_time=st.booleans())
def test_pieces_hold_every_timestep_once_in_order(lengths, count, in_time):
    """Each timestep of each row is in one piece, each row ends in one, and offsets say where."""
    offsets = offsets_of(lengths)

    pieces = cut_pieces(offsets, count, in_time=in_time)

    assert [pieces[0].start, pieces[-1].stop] == [0, offsets[-1]]
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    assert len(pieces) <= count
    assert sum(piece.ended_rows for piece in pieces) == len(lengths)
    held = np.zeros(len(lengths), np.int64)
    for piece in pieces:
        parts = np.diff(piece.offsets)
        assert len(parts) == piece.stop_row - piece.first_row
        assert parts.min() > 0
        assert parts.max() == piece.longest
        assert piece.offsets[-1] == piece.stop - piece.start
        held[piece.first_row : piece.stop_row] += parts
        ended = held[piece.first_row : piece.stop_row] == lengths[piece.first_row : piece.stop_row]
        assert ended[: piece.ended_rows].all()
        assert not ended[piece.ended_rows :].any()
    assert held.tolist() == lengths


@given(lengths=lengths_of_rows, count=st.integers(1, 64))
def test_whole_rows_stay_whole(lengths, count):
    """Without cuts in time every border is one between rows."""
    offsets = offsets_of(lengths)

    pieces = cut_pieces(offsets, count, in_time=False)

    assert {piece.stop for piece in pieces} <= set(offsets.tolist())


@given(timesteps=st.integers(1, 100_000), count=st.integers(1, 64))
def test_one_row_is_cut_at_multiples_of_64(timesteps, count):
    """Into pieces of nearly one size."""
    pieces = cut_pieces(offsets_of([timesteps]), count, in_time=True)

    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size % 64 == 0 for size in sizes[:-1])
    assert max(sizes) <= timesteps / count + 64


def test_rows_are_rather_kept_whole_than_cut():
    """A border between rows near the ideal place is taken; a long row is cut."""
    pieces = cut_pieces(offsets_of([900, 1100, 4000]), 3, in_time=True)

    assert [piece.stop for piece in pieces] == [2000, 3984, 6000]


def test_no_timestep_is_one_piece():
    """An empty batch, and one with empty rows alone."""
    for lengths in ([], [0, 0]):
        [piece] = cut_pieces(offsets_of(lengths), 5, in_time=True)
        assert (piece.start, piece.stop, piece.longest) == (0, 0, 0)
        assert piece.stop_row == piece.ended_rows == len(lengths)


def times(fixed, each, **more):
    """Stages with a fixed cost of a piece and one of a timestep."""
    sizes = np.array([64, 256, 1024, 4096])
    return PieceTimes(
        sizes=sizes,
        seconds=np.array([f + e * sizes for f, e in zip(fixed, each, strict=True)]),
        **more,
    )


def test_cheap_pieces_are_many_and_dear_ones_few():
    """The more a piece costs of itself, the fewer there are; 1 where more would not pay."""
    counts = [times([f, f], [1e-6, 1e-6]).best_count(32768, 0) for f in (0.0, 1e-4, 1e-3, 1e-2, 1)]

    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 128
    assert 4 <= counts[2] <= 8
    assert counts[-1] == 1


def test_predicted_seconds_are_those_of_a_pipeline():
    """First piece through all stages, then the slowest stage sets the pace."""
    stages = times([1e-3, 2e-3], [1e-6, 3e-6])

    [whole, four] = stages.predicted(8192, 0, np.array([1, 4]))

    one, two = 1e-3 + 2048e-6, 2e-3 + 3 * 2048e-6
    assert four == pytest.approx(one + two + 3 * two)
    # Beyond the largest size that was measured too.
    assert whole == pytest.approx(1e-3 + 8192e-6 + 2e-3 + 3 * 8192e-6)


def test_one_thread_that_starts_all_work_bounds_the_pieces():
    """On GPUs the host needs time for each piece."""
    free, bound = (times([1e-5, 1e-5], [1e-7, 1e-7], launch_s=s) for s in (0.0, 1e-3))

    assert bound.best_count(32768, 0) < free.best_count(32768, 0)


def test_stages_that_hinder_each_other_do_not_overlap():
    """Measured together they take twice as long: nothing is gained by pieces."""
    assert times([0, 0], [1e-6, 1e-6], slowdown=2.2).best_count(32768, 0) == 1


def test_one_stage_and_uncuttable_rows_are_not_cut():
    """Pieces are never smaller than a row that stays whole."""
    assert times([0], [1e-6]).best_count(32768, 0) == 1
    assert times([0, 0], [1e-6, 1e-6]).best_count(32768, 32768) == 1
    assert times([0, 0], [1e-6, 1e-6]).best_count(32768, 8192) == 4
