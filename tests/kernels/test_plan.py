"""How scans are shared over a GPU: rules that need no GPU."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

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
        assert chosen.kernel == "qrnn_fo_pool_short"
        assert not chosen.single_tiles
        assert chosen.blocks == 8 * 10
        assert chosen.threads == 4 * 32


def test_few_short_sequences_are_one_lean_launch():
    """A warp for each chunk and one channel a thread, while every block has a processor."""
    few = _plan(65, 13, 320, channels=2)
    assert (few.kernel, few.channels, few.blocks) == ("qrnn_fo_pool_short", 1, 130)
    assert few.threads == 9 * 32
    assert _plan(0, 2, 5).threads == 32
    for more in (_plan(129, 8, 320), _plan(32, 14, 320), _plan(32, 8, 320, dtype=torch.float64)):
        assert more.kernel == "qrnn_fo_pool"


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


C_PLAN = """
#include "cuda_plan.h"

extern "C" void plan(const int64_t* in, int64_t* out) {
    using namespace qrnn;
    const Plan p = plan_scan(in[0], in[1], in[2], in[3], in[4], (int)in[5], (int)in[6]);
    const int64_t all[] = {p.single_tiles, p.channel_tiles, p.slots, p.tiles,
                           p.blocks(),     p.threads,       p.at_once, p.channels};
    for (int i = 0; i < 8; ++i) out[i] = all[i];
}
extern "C" uint64_t magic(int64_t divisor) { return qrnn::magic(divisor); }
extern "C" int widest(int itemsize) { return qrnn::widest_channels(itemsize); }
extern "C" void constants(int64_t* out) {
    using namespace qrnn;
    const int64_t all[] = {kChunkTimesteps, kChunks, kTileTimesteps, kRowBytes[0], kWarp,
                           kThreadsPerBlock};
    for (int i = 0; i < 6; ++i) out[i] = all[i];
}
"""


@pytest.fixture(scope="module")
def c_plan(tmp_path_factory):
    """The rule of the C host, as a library of its own."""
    folder = tmp_path_factory.mktemp("c_plan")
    (folder / "plan.cpp").write_text(C_PLAN, encoding="utf-8")
    headers = Path(plan.__file__).parent / "csrc"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{headers}", "-o", "plan.so", "plan.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    library = ctypes.CDLL(str(folder / "plan.so"))
    library.magic.argtypes, library.magic.restype = [ctypes.c_int64], ctypes.c_uint64
    return library


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_the_c_host_plans_alike(c_plan, dtype, packed):
    """Hosts without Python launch what Python launches, on both sides of every border."""
    timesteps = (0, 1, 63, 64, 65, 128, 129, 255, 256, 257, 8192, 2**31, 2**40)
    found = (ctypes.c_int64 * 8)()
    for t, b, h, channels in itertools.product(
        timesteps, (1, 2, 33, 70_000), (1, 32, 33, 64, 65, 2500), (1, 2)
    ):
        given = (t, b, h, packed, t, dtype.itemsize, channels)

        c_plan.plan((ctypes.c_int64 * 7)(*given), found)

        want = plan_scan("qrnn_fo_pool", PoolSizes(t, b, h), packed, dtype, channels)
        assert tuple(found) == (
            want.single_tiles,
            want.channel_tiles,
            want.slots,
            want.tiles,
            want.blocks,
            want.threads,
            want.kernel == "qrnn_fo_pool_short",
            want.channels,
        ), given


def test_the_c_host_has_the_same_constants(c_plan):
    """Tiles, channels and the numbers that kernels divide by."""
    found = (ctypes.c_int64 * 6)()
    c_plan.constants(found)
    assert tuple(found) == (
        plan.CHUNK_TIMESTEPS,
        plan.CHUNKS,
        plan.TILE_TIMESTEPS,
        plan.ROW_BYTES[0],
        plan.WARP,
        plan.THREADS_PER_BLOCK,
    )
    for divisor in (0, 1, 2, 3, 7, 70_000, 2**31 - 1, 2**40 + 1):
        assert c_plan.magic(divisor) == plan.magic(divisor)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert c_plan.widest(dtype.itemsize) == plan.widest_channels(dtype)
