"""What is measured: shapes, minimum memory traffic, targets, and the paper's figures. No torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """Timesteps T, sequences B, channels H."""

    timesteps: int
    batch: int
    hidden: int

    def __str__(self) -> str:
        return "x".join(str(size) for size in self)


POOL_SHAPES = (
    Shape(512, 256, 1024),
    Shape(2048, 64, 2560),
    Shape(512, 64, 1024),
    Shape(8192, 8, 1024),
    Shape(32768, 1, 1024),
    Shape(512, 8, 320),
)
DTYPES = ("float32", "float16", "bfloat16")
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

FLOOR_ELEMENTS = {
    "fo_pool": 4,  # Z, F, O in; h out
    "fo_pool_backward": 7,  # Z, F, O and the gradient of h in; three gradients out
    "forget_mult": 3,  # f, x in; h out
    "forget_mult_backward": 5,  # f, x and the gradient of h in; gradients of f and x out
}
"""Elements a timestep and channel that must cross the memory bus: inputs once, outputs once."""

SAVED_STATE_ELEMENTS = {"fo_pool_backward": 8, "forget_mult_backward": 6}
"""The same for a backward that reads the states which the forward saved, one more element.

A backward that computes the states again reads Z and F (f and x) twice, unless the whole sequence
stays on the chip: 9 and 7 elements.
"""

GRID_BATCHES = (8, 16, 32, 64, 128, 256)
GRID_TIMESTEPS = (32, 64, 128, 256, 512)
GRID_HIDDEN = 320
PAPER_SPEEDUPS = {
    8: (5.5, 8.8, 11.0, 12.4, 16.9),
    16: (5.5, 6.7, 7.8, 8.3, 10.8),
    32: (4.2, 4.5, 4.9, 4.9, 6.4),
    64: (3.0, 3.0, 3.0, 3.0, 3.7),
    128: (2.1, 1.9, 2.0, 2.0, 2.4),
    256: (1.4, 1.4, 1.3, 1.3, 1.3),
}
"""Figure 4 of the paper, one QRNN layer over cuDNN's LSTM: by batch size, then GRID_TIMESTEPS."""

PAPER_FACTORS = {"float32": 3.0, "bfloat16": 8.0}
"""How many times the paper's speed-up is the target."""

SMALL_LAYER = Shape(32, 8, 320)
SMALL_POOL = Shape(512, 8, 320)
SMALL_FACTOR = 2.0
"""At most this many times an empty two-kernel graph."""

FUSED_SHAPES = (
    Shape(512, 256, 320),
    Shape(512, 256, 256),
    Shape(2048, 64, 320),
    Shape(512, 64, 320),
    Shape(512, 32, 320),
    Shape(512, 24, 320),
    Shape(512, 8, 320),
    Shape(128, 256, 320),
    Shape(64, 256, 320),
    Shape(32, 256, 320),
)
FUSED_TARGET = 1.1
"""Times faster than two kernels that one must be where a layer uses it."""

BESIDE_PRODUCT_TARGET = 3.0
"""Times faster than the original in everything beside the matrix product."""
LAUNCH_BOUND_TARGET = 2.0
"""Times faster than the original's whole layer where the product is under half of its time."""


@dataclass(frozen=True)
class Case:
    """One cell of a table; fields that a table does not use keep their defaults."""

    shape: Shape
    dtype: str
    op: str = ""
    packed: bool = False
    reverse: bool = False
    training: bool = False
    windows: tuple[int, ...] = (1,)

    def label(self) -> str:
        """A short name of the cell."""
        parts = [self.op, str(self.shape), self.dtype]
        parts += ["packed"] if self.packed else []
        parts += ["reverse"] if self.reverse else []
        parts += ["forward+backward"] if self.training else []
        parts += [] if self.windows == (1,) else ["window " + ",".join(map(str, self.windows))]
        return " ".join(part for part in parts if part)

    def traffic_bytes(self, elements: int) -> int:
        """Bytes moved when each timestep and channel moves `elements` elements."""
        timesteps, batch, hidden = self.shape
        return timesteps * batch * hidden * elements * ITEM_BYTES[self.dtype]


def pool_target(shape: Shape, dtype: str) -> float | None:
    """The share of copy bandwidth to reach at a shape of the pool table, where there is one."""
    single = dtype == "float32"
    if shape in POOL_SHAPES[:2]:
        return 0.95 if single else 0.85
    if shape in POOL_SHAPES[3:5]:
        return 0.70 if single else 0.60
    return None


def paper_speedup(shape: Shape) -> float:
    """The paper's speed-up over cuDNN's LSTM at a cell of its grid."""
    return PAPER_SPEEDUPS[shape.batch][GRID_TIMESTEPS.index(shape.timesteps)]


def draw_lengths(batch: int, mean: int, seed: int) -> list[int]:
    """Lengths drawn uniformly from 1 to 2 * `mean`, moved a little so that they add up.

    Returns:
        `batch` lengths whose sum is `batch` * `mean`: a packed batch with the N of a dense one.
    """
    draw = random.Random(seed)  # noqa: S311  (shapes of a benchmark, not a secret)
    lengths = [draw.randint(1, 2 * mean) for _ in range(batch)]
    excess = sum(lengths) - batch * mean
    while excess:
        row = draw.randrange(batch)
        room = lengths[row] - 1 if excess > 0 else 2 * mean - lengths[row]
        moved = min(abs(excess), room, max(1, mean // 16))
        lengths[row] -= moved if excess > 0 else -moved
        excess -= moved if excess > 0 else -moved
    return lengths


def pool_cases(quick: bool) -> list[Case]:
    """fo_pool: every shape and dtype, dense and packed, forward and reverse."""
    return [
        Case(shape, dtype, "fo_pool", packed, reverse)
        for shape in _shapes(quick)
        for dtype in DTYPES
        for packed in (False, True)
        for reverse in (False, True)
    ]


def backward_cases(quick: bool) -> list[Case]:
    """The backward of fo_pool, and forget_mult in both directions of the gradient."""
    return [
        Case(shape, dtype, op, packed)
        for shape in _shapes(quick)
        for dtype in DTYPES
        for op in ("fo_pool_backward", "forget_mult", "forget_mult_backward")
        for packed in (False, True)
    ]


def lstm_cases(quick: bool) -> list[Case]:
    """The paper's grid of one 320-unit layer."""
    return [Case(shape, dtype) for dtype in ("float32", "bfloat16") for shape in _grid(quick)]


def salesforce_cases(quick: bool) -> list[Case]:
    """The paper's grid with window 1, part of it with window 2, and two language models' layers."""
    layers = [(shape, (1,)) for shape in _grid(quick)]
    layers += [
        (Shape(timesteps, batch, GRID_HIDDEN), (2,))
        for batch in ((8,) if quick else (8, 64, 256))
        for timesteps in ((32,) if quick else (32, 128, 512))
    ]
    layers += [(Shape(105, 20, 640), (2, 1))]
    layers += [(Shape(140, 60, 2500), windows) for windows in ((1,), (2,))]
    return [
        Case(shape, dtype, training=training, windows=windows)
        for dtype in ("float32", "bfloat16")
        for training in (False, True)
        for shape, windows in layers
    ]


def scan_cases(quick: bool) -> list[Case]:
    """forget_mult against other scans of its recurrence."""
    return [
        Case(shape, dtype, "forget_mult")
        for shape in _shapes(quick)
        for dtype in ("float32", "bfloat16")
    ]


def graph_cases(quick: bool) -> list[Case]:
    """Shapes so small that launching is what they cost; the same few with `quick`."""
    del quick
    layers = [Case(SMALL_LAYER, dtype, "layer") for dtype in ("float32", "bfloat16")]
    return layers + [Case(SMALL_POOL, dtype, "fo_pool") for dtype in DTYPES]


def fused_cases(quick: bool) -> list[Case]:
    """Layers whose product and pool can be one kernel; two of them with `quick`."""
    shapes = (FUSED_SHAPES[0], FUSED_SHAPES[6]) if quick else FUSED_SHAPES
    return [Case(shape, dtype) for dtype in ("bfloat16", "float16") for shape in shapes]


def _shapes(quick: bool) -> tuple[Shape, ...]:
    return (POOL_SHAPES[2], POOL_SHAPES[5]) if quick else POOL_SHAPES


def _grid(quick: bool) -> list[Shape]:
    batches = GRID_BATCHES[::5] if quick else GRID_BATCHES
    timesteps = GRID_TIMESTEPS[::4] if quick else GRID_TIMESTEPS
    return [Shape(steps, batch, GRID_HIDDEN) for batch in batches for steps in timesteps]
