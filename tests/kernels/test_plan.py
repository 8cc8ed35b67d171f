"""How scans are shared over a GPU: rules that need no GPU."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve.kernels import plan
from qrnn_serve.kernels.checks import PoolSizes
from qrnn_serve.kernels.plan import TILE_TIMESTEPS, plan_scan


def _plan(timesteps, batch, hidden, packed=False, dtype=torch.float32, channels=1):
    sizes = PoolSizes(timesteps, batch, hidden)
    return plan_scan("qrnn_fo_pool", sizes, packed, dtype, channels)


def test_short_sequences_are_not_cut():
    """What a few tiles hold needs no words between blocks, packed or not."""
    for packed in (False, True):
        chosen = _plan(32, 8, 320, packed)
        assert not chosen.single_tiles
        assert chosen.blocks == 8 * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("timesteps", "batch"), [(8192, 8), (32768, 1)])
def test_few_long_sequences_are_cut(timesteps, batch, dtype):
    """Long sequences in few rows fill the GPU by tiles."""
    chosen = _plan(timesteps, batch, 1024, dtype=dtype)

    assert chosen.single_tiles
    assert chosen.slots == timesteps // TILE_TIMESTEPS * batch


def test_packed_work_depends_on_rows_not_on_the_longest():
    """Packed blocks are counted from N and B alone, whatever the lengths are."""
    chosen = _plan(512 * 256, 256, 1024, packed=True)

    assert chosen.single_tiles
    assert chosen.slots == 512 * 256 // TILE_TIMESTEPS + 256


@pytest.mark.parametrize("packed", [False, True])
def test_float64_is_never_cut(packed):
    """The states of float64 do not fit into the words that blocks hand on, and the plan says so."""
    chosen = _plan(100_000, 1, 64, packed, torch.float64)

    assert not chosen.single_tiles
    assert "a sequence" in str(chosen)


def test_a_plan_reads_as_a_sentence():
    """Benchmarks and people see what a call does."""
    assert str(_plan(8192, 8, 1024)) == (
        "qrnn_fo_pool: 32768 blocks of a tile x 32 channels, 1 a thread"
    )


@pytest.mark.parametrize(("timesteps", "batch", "hidden"), [(0, 3, 5), (7, 0, 5), (7, 3, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_to_do_is_few_blocks(timesteps, batch, hidden, packed):
    """No sequences or no channels is no block; no timesteps still hands the state on."""
    assert _plan(timesteps, batch, hidden, packed).blocks == (batch if hidden else 0)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 32, 80, 255, 70_000, 2**31 - 1])
def test_magic_numbers_divide(divisor):
    """The high half of a product is the quotient, for every number a block index can be."""
    number = plan.magic(divisor)
    for n in (0, 1, divisor - 1, divisor, divisor + 1, 5 * divisor - 1, 2**31 - 1, 2**32 - 1):
        if n < 2**32:
            assert (n * number >> 64 if number else n) == n // divisor
    assert number < 2**64
