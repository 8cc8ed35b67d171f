"""How a scan over time is shared by the blocks of a GPU, chosen by rule from sizes alone.

The kernels cut every sequence into tiles of TILE_TIMESTEPS from its first timestep, whatever the
plan, so a plan changes the time a call takes and never its numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qrnn_serve.kernels.checks import PoolSizes

# As in cuda_src/sequences.cuh.
CHUNK_TIMESTEPS = 8
CHUNKS = 8
TILE_TIMESTEPS = CHUNK_TIMESTEPS * CHUNKS
# More than one channel a thread needs rows that begin at multiples of one of these; the longer is
# faster.
ROW_BYTES = (16, 8)
WARP = 32
# One more warp carries the state.
THREADS_PER_BLOCK = WARP * (CHUNKS + 1)

_MOST_BLOCKS = 2**31 - 1
# Timesteps up to which handing the state from block to block costs more than it saves.
_SHORT_TIMESTEPS = 4 * TILE_TIMESTEPS
# Where there are no more blocks than a large GPU has processors, one takes a sequence of up to so
# many timesteps at once.
_AT_ONCE_TIMESTEPS = 2 * TILE_TIMESTEPS
_FEW_BLOCKS = 132
_SHORT_KERNELS = ("qrnn_forget_mult", "qrnn_fo_pool", "qrnn_f_pool")


@dataclass(frozen=True, slots=True)
class Plan:
    """How one kernel is launched.

    Attributes:
        kernel: Name of the kernel.
        channels: Neighbouring channels of a thread; more than one needs aligned tensors.
        single_tiles: Each block takes one tile and waits for the state from the blocks before it;
            else each takes whole sequences.
        channel_tiles: Blocks side by side that cover the channels.
        slots: Sequences, or tiles of sequences, that the blocks take.
        tiles: Slots for every tile of every sequence, however the work is shared.
        threads: Of a block.
    """

    kernel: str
    channels: int
    single_tiles: bool
    channel_tiles: int
    slots: int
    tiles: int
    threads: int = THREADS_PER_BLOCK

    @property
    def blocks(self) -> int:
        """Blocks to launch: one for every channel tile of every slot."""
        return self.slots * self.channel_tiles

    def __str__(self) -> str:
        share = "a tile" if self.single_tiles else "a sequence"
        return (
            f"{self.kernel}: {self.blocks} blocks of {share} x {WARP * self.channels} channels, "
            f"{self.channels} a thread"
        )


def magic(divisor: int) -> int:
    """The number by which the kernels divide; 0 for a divisor of 0 or 1."""
    return 0 if divisor < 2 else -(-(2**64) // divisor)


def widest_channels(dtype: torch.dtype) -> int:
    """Neighbouring channels that a thread takes where all rows are aligned as ROW_BYTES says."""
    return 1 if dtype == torch.float64 else 2


def tile_slots(sizes: PoolSizes, packed: bool) -> int:
    """Slots for every tile of every sequence, from sizes alone; takes symbolic sizes too."""
    timesteps, batch, _ = sizes
    if packed:
        # A sequence that starts at row s begins at slot s // TILE_TIMESTEPS + its number.
        return timesteps // TILE_TIMESTEPS + batch
    return -(-timesteps // TILE_TIMESTEPS) * batch


def starts_shape(sizes: PoolSizes, packed: bool) -> tuple[int, int, int]:
    """Shape of the states before all chunks, which a backward computes the others from."""
    return tile_slots(sizes, packed), CHUNKS, sizes.hidden


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which tensors of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=4096)
def plan_scan(
    kernel: str,
    sizes: PoolSizes,
    packed: bool,
    dtype: torch.dtype,
    channels: int,
) -> Plan:
    """Share one scan over a GPU.

    Args:
        kernel: A key of `cuda_compile.KERNEL_CODES`.
        sizes: T (or N), B and H.
        packed: The rows have offsets, and nobody knows the longest sequence.
        dtype: Of the tensors.
        channels: Neighbouring channels of a thread that the tensors allow.
    """
    timesteps, batch, hidden = sizes
    tiles = tile_slots(sizes, packed)
    if kernel in _SHORT_KERNELS and dtype != torch.float64:
        short = _plan_short(kernel, sizes, tiles)
        if short is not None:
            return short
    channel_tiles = -(-hidden // (WARP * channels))
    whole_sequences = (
        timesteps <= _SHORT_TIMESTEPS
        or batch == 0
        # The numbers of float64 do not fit into the words that blocks hand on.
        or dtype == torch.float64
        or tiles * channel_tiles > _MOST_BLOCKS
    )
    slots = batch if whole_sequences else tiles
    return Plan(kernel, channels, not whole_sequences, channel_tiles, slots, tiles)


def _plan_short(kernel: str, sizes: PoolSizes, tiles: int) -> Plan | None:
    timesteps, batch, hidden = sizes
    channel_tiles = -(-hidden // WARP)
    if timesteps > _AT_ONCE_TIMESTEPS or batch * channel_tiles > _FEW_BLOCKS:
        return None
    warps = max(1, -(-timesteps // CHUNK_TIMESTEPS))
    return Plan(f"{kernel}_short", 1, False, channel_tiles, batch, tiles, threads=WARP * warps)
