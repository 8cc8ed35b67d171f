"""The recurrence as a Triton scan: tiles of time and channels, the state carried between tiles."""

# ruff: noqa: ANN001, ANN202  (Triton reads annotations of its own)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


class Tile(NamedTuple):
    """What one step of the loop covers."""

    timesteps: int
    channels: int
    warps: int


TILES = (Tile(32, 64, 4), Tile(64, 32, 4), Tile(256, 8, 4))


def tile_scan(f: Tensor, x: Tensor, tile: Tile) -> Tensor:
    """The states of f and x, [T, B, H], contiguous, in the dtype of `f`; computed in float32."""
    timesteps, batch, hidden = f.shape
    h = torch.empty_like(f)
    programs = (batch, triton.cdiv(hidden, tile.channels))
    launch = _scan[programs]  # pyright: ignore[reportIndexIssue]  (what triton.jit returns has it)
    launch(f, x, h, timesteps, batch, hidden, *tile[:2], num_warps=tile.warps)
    return h


@triton.jit
def _join(decay_first, state_first, decay_second, state_second):
    return decay_first * decay_second, decay_second * state_first + state_second


@triton.jit
def _scan(
    f_pointer,
    x_pointer,
    h_pointer,
    timesteps,
    batch,
    hidden,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    step = tl.arange(0, TILE_T)
    carried = tl.zeros((TILE_C,), dtype=tl.float32)
    for first in range(0, timesteps, TILE_T):
        t = first + step
        at = (t.to(tl.int64)[:, None] * batch + row) * hidden + channel[None, :]
        inside = (t < timesteps)[:, None] & (channel < hidden)[None, :]
        f = tl.load(f_pointer + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_pointer + at, mask=inside, other=0.0).to(tl.float32)
        decay, state = tl.associative_scan((1.0 - f, f * x), 0, _join)
        h = decay * carried[None, :] + state
        tl.store(h_pointer + at, h.to(h_pointer.dtype.element_ty), mask=inside)
        carried = tl.sum(tl.where((step == TILE_T - 1)[:, None], h, 0.0), axis=0)
