"""Whether one kernel computes a whole layer, and in which shape: a rule over sizes alone.

The kernel (cuda_src/fused_layer.cu) keeps the weights of 64 channels in the shared memory of each
block, so it takes only layers with few inputs; and it walks a sequence in order, so it wins only
where there are enough sequences to fill the GPU. Times are estimated by a model that was fitted to
measurements on one H200 (docs/fused-layer.md has both).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

# As in cuda_src/layer_tiles.cuh.
CHANNELS_PER_BLOCK = 64
CHUNK_COLUMNS = 64
THREADS_PER_BLOCK = 384
_GATES = 3
_BYTES_PER_ROW = 128

# Of one block of sm_90.
_SHARED_BYTES = 232_448
_FEWEST_STAGES, _MOST_STAGES = 4, 8
# One kernel must be expected to take at most this share of the time of two.
_WORTHWHILE = 0.9


class LayerSizes(NamedTuple):
    """Sizes of one call.

    Attributes:
        timesteps: T of dense input, N of packed input.
        batch: Sequences B.
        hidden: Channels H.
        inputs: Width I of one timestep.
        window: Timesteps that the gates of one timestep see.
        longest: Timesteps of the longest sequence; 0 when packed lengths are not known.
        packed: Whether there are offsets.
    """

    timesteps: int
    batch: int
    hidden: int
    inputs: int
    window: int
    longest: int
    packed: bool

    @property
    def rows(self) -> int:
        """Timesteps of all sequences together."""
        return self.timesteps if self.packed else self.timesteps * self.batch

    @property
    def columns(self) -> int:
        """Columns of the weight."""
        return self.window * self.inputs


class LayerKey(NamedTuple):
    """The compilation of one variant of the kernel; see `cuda_compile.Compilation`.

    Attributes:
        dtype: torch.float16 or torch.bfloat16.
        tile: Timesteps of a tile.
        stages: Places for chunks of inputs in shared memory.
        chunks: Chunks of CHUNK_COLUMNS columns of the weight.
    """

    dtype: torch.dtype
    tile: int
    stages: int
    chunks: int

    @property
    def kernel(self) -> str:
        """As in Compilation."""
        return "qrnn_layer"

    @property
    def source(self) -> str:
        """As in Compilation."""
        return "fused_layer.cu"

    @property
    def architecture_suffix(self) -> str:
        """As in Compilation."""
        return "a"

    @property
    def defines(self) -> tuple[str, ...]:
        """As in Compilation."""
        return (
            f"-DQRNN_TILE={self.tile}",
            f"-DQRNN_STAGES={self.stages}",
            f"-DQRNN_CHUNKS={self.chunks}",
        )

    @property
    def shared_bytes(self) -> int:
        """As in Compilation."""
        return _SHARED_BYTES


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How one call is launched, and what it is expected to take.

    Attributes:
        key: The variant of the kernel.
        workers: Blocks that share one set of channels; each takes whole sequences.
        blocks: Blocks to launch.
        one_kernel_us: Estimated time of the kernel.
        two_kernels_us: Estimated time of the matrix product and `fo_pool`.
    """

    key: LayerKey
    workers: int
    blocks: int
    one_kernel_us: float
    two_kernels_us: float

    @property
    def pays(self) -> bool:
        """Whether one kernel is expected to be clearly faster than two."""
        return self.one_kernel_us <= _WORTHWHILE * self.two_kernels_us

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks of {CHANNELS_PER_BLOCK} channels x {self.key.tile} timesteps, "
            f"about {self.one_kernel_us:.0f} us against {self.two_kernels_us:.0f}"
        )


@functools.lru_cache(maxsize=4096)
def plan_layer(sizes: LayerSizes, dtype: torch.dtype, processors: int) -> LayerPlan | None:
    """The fastest way to run the kernel.

    Args:
        sizes: Of the call.
        dtype: torch.float16 or torch.bfloat16.
        processors: Multiprocessors of the GPU.

    Returns:
        The plan; None when the weights of a block's channels do not fit in its shared memory.
    """
    plans = [_plan(sizes, dtype, processors, tile) for tile in (128, 64)]
    return min(
        (plan for plan in plans if plan is not None),
        key=lambda plan: plan.one_kernel_us,
        default=None,
    )


def _plan(sizes: LayerSizes, dtype: torch.dtype, processors: int, tile: int) -> LayerPlan | None:
    chunks = -(-sizes.columns // CHUNK_COLUMNS)
    stages = _stages(tile, chunks)
    if stages < _FEWEST_STAGES:
        return None
    channel_sets = max(1, -(-sizes.hidden // CHANNELS_PER_BLOCK))
    workers = max(1, min(sizes.batch, processors // channel_sets))
    blocks = channel_sets * workers
    tiles = _tiles_of_busiest_block(sizes, tile, workers) * -(-blocks // processors)
    return LayerPlan(
        key=LayerKey(dtype, tile, stages, chunks),
        workers=workers,
        blocks=blocks,
        one_kernel_us=6.5 + tiles * _tile_us(tile, chunks),
        two_kernels_us=_product_us(sizes) + _pool_us(sizes),
    )


def _stages(tile: int, chunks: int) -> int:
    """As many as fit, beside the weights, a staging area of one tile and 2 KiB of small things."""
    weights = chunks * _GATES * CHANNELS_PER_BLOCK * _BYTES_PER_ROW
    left = _SHARED_BYTES - 1023 - 1536 - weights - tile * _BYTES_PER_ROW
    return min(_MOST_STAGES, left // (tile * _BYTES_PER_ROW))


def _tiles_of_busiest_block(sizes: LayerSizes, tile: int, workers: int) -> float:
    longest = -(-sizes.longest // tile)
    if not sizes.packed:
        return -(-sizes.batch // workers) * longest
    # Sequences are dealt as blocks come free, and each ends in a tile that is half full on average.
    each = -(-(sizes.rows / tile + sizes.batch / 2) // workers)
    return max(each + longest / 2, longest)


def _tile_us(tile: int, chunks: int) -> float:
    # Few chunks: activations and scan take longer than the products.
    return max(2.35, 0.2 + 0.62 * chunks) if tile == 128 else max(1.3, 0.4 * chunks)


def _product_us(sizes: LayerSizes) -> float:
    gates = _GATES * sizes.hidden
    operations = 2 * sizes.rows * sizes.columns * gates
    moved_bytes = 2 * sizes.rows * (sizes.columns + gates)
    return 3 + max(operations / 520e6, moved_bytes / 3.1e6)


def _pool_us(sizes: LayerSizes) -> float:
    moved_bytes = 2 * sizes.rows * sizes.hidden * (_GATES + 1)
    return 3 + moved_bytes / 3.3e6
