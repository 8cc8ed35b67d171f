"""What benchmarks/scale.py sends and counts, without a server."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

import scale
from scale_cases import VOCABULARY, cases


def test_calls_are_the_same_in_every_run():
    """Rows of the lengths that the case names, ids of the vocabulary, by seed."""
    for case in cases("small"):
        rows, again, others = case.batch(3), case.batch(3), case.batch(4)

        low, high = case.lengths
        assert len(rows) == case.rows
        assert all(low <= len(row) <= high for row in rows)
        assert all(row.min() >= 0 and row.max() < VOCABULARY for row in rows)
        for row, same in zip(rows, again, strict=True):
            np.testing.assert_array_equal(row, same)
        assert any(not np.array_equal(a, b) for a, b in zip(rows, others, strict=True))


def test_small_and_full_tables_have_the_same_cases():
    """A CPU tries the logic of what GPUs measure."""
    small, full = cases("small"), cases("full")

    assert [c.name for c in small] == [c.name for c in full]
    assert [c.placement for c in small] == [c.placement for c in full]


def test_processes_of_a_server_are_counted_together():
    """A child's processor time and memory are its server's."""
    code = "sum(range(20_000_000)); print('done', flush=True); input()"
    before_s = scale._cpu_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"done\n"
        family = scale._family(os.getpid())
        used_s = scale._cpu_seconds(os.getpid()) - before_s
        child.communicate(b"\n")

    assert family[0] == os.getpid()
    assert child.pid in family
    assert used_s > 0.1
