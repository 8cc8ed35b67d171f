"""Cases and comparisons shared by the tests of the pool kernels."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qrnn_serve.core.tolerances import (
    FLOAT32_MAX_ABS,
    GOLDEN_FLOAT64_MAX_ABS,
    HALF_RELATIVE_NORM,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sequences:
    """Lengths of the sequences of one call; dense when `packed` is false, then all are equal."""

    lengths: tuple[int, ...]
    hidden: int
    packed: bool

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def shape(self, gates: int = 1) -> tuple[int, ...]:
        """Of a tensor with `gates` * hidden channels."""
        width = gates * self.hidden
        if self.packed:
            return sum(self.lengths), width
        return (self.lengths[0] if self.lengths else 3), self.batch, width

    def offsets(self, device: str, dtype: torch.dtype = torch.int64) -> Tensor | None:
        """Packed offsets, or None when dense."""
        if not self.packed:
            return None
        bounds = [0]
        for length in self.lengths:
            bounds.append(bounds[-1] + length)
        return torch.tensor(bounds, dtype=dtype, device=device)


def dense(timesteps: int, batch: int, hidden: int) -> Sequences:
    """`batch` sequences of `timesteps` each."""
    return Sequences((timesteps,) * batch, hidden, packed=False)


def packed(*lengths: int, hidden: int) -> Sequences:
    """Sequences of these lengths laid end to end."""
    return Sequences(lengths, hidden, packed=True)


# Sizes where kernels have edges: no rows, one, two, long, a vector or warp and one more or less.
SEQUENCES = [
    pytest.param(dense(1, 1, 1), id="dense-1x1x1"),
    pytest.param(dense(2, 2, 31), id="dense-2x2x31"),
    pytest.param(dense(0, 2, 5), id="dense-0x2x5"),
    pytest.param(dense(3, 0, 5), id="dense-3x0x5"),
    pytest.param(dense(9, 3, 33), id="dense-9x3x33"),
    pytest.param(dense(130, 2, 17), id="dense-130x2x17"),
    pytest.param(dense(5, 1, 513), id="dense-5x1x513"),
    pytest.param(dense(17, 40, 64), id="dense-17x40x64"),
    pytest.param(packed(4, hidden=3), id="packed-4x3"),
    pytest.param(packed(hidden=3), id="packed-none"),
    pytest.param(packed(0, 0, hidden=3), id="packed-empty"),
    pytest.param(packed(3, 0, 1, 8, 0, hidden=32), id="packed-3,0,1,8,0x32"),
    pytest.param(packed(0, 100, 7, 2, hidden=511), id="packed-0,100,7,2x511"),
    pytest.param(packed(*range(1, 40), hidden=65), id="packed-1..39x65"),
]


def assert_near(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Compare with a float64 reference by the numbers contract of the dtype of `got`."""
    assert got.shape == expected.shape, what
    assert expected.dtype == torch.float64
    if not got.numel():
        return
    difference = got.detach().cpu().double() - expected.detach()
    scale = expected.abs().max().clamp(min=1.0).item()
    if got.dtype not in HALF_DTYPES:
        allowed = GOLDEN_FLOAT64_MAX_ABS if got.dtype == torch.float64 else FLOAT32_MAX_ABS
        assert difference.abs().max().item() <= allowed * scale, what
        return
    norm = expected.norm().item()
    allowed = HALF_RELATIVE_NORM[str(got.dtype).removeprefix("torch.")]
    if got.numel() < 64:
        # A handful of values may all be half a step of the dtype off, which the norm over many is
        # not.
        allowed = max(allowed, torch.finfo(got.dtype).eps / 2)
    assert difference.norm().item() <= allowed * norm + 1e-7, what


def pool_inputs(
    sequences: Sequences, dtype: torch.dtype, output_gate: bool
) -> tuple[Tensor, Tensor]:
    """Random pre-activations and cell state on the CPU."""
    gates = torch.randn(sequences.shape(3 if output_gate else 2), dtype=torch.float64) * 2
    return gates.to(dtype), torch.randn(sequences.batch, sequences.hidden).to(dtype)


def forget_inputs(sequences: Sequences, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random forget gate, new values and state on the CPU."""
    f = torch.rand(sequences.shape()).to(dtype)
    return (
        f,
        torch.randn(sequences.shape()).to(dtype),
        torch.randn(sequences.batch, sequences.hidden).to(dtype),
    )
