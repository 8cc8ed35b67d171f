"""From one vector a timestep to one vector a row, on packed rows. Every function can be scripted.

A row's result depends on its own timesteps only: a mean divides by the row's own length, and an
empty row gives zeros.

Letters: N timesteps of all rows laid end to end, B rows, C channels.
"""

import torch
from torch import Tensor

from qrnn_serve.model.packing import row_of_timestep


def pool_packed(values: Tensor, offsets: Tensor, pooling: str, directions: int) -> Tensor:
    """Pool each row over time.

    Args:
        values: [N, C]; with two directions, the forward half of the channels comes first.
        offsets: [B + 1] int64, from 0 to N, on the same device.
        pooling: "last", "mean", "max" or "last_max_mean".
        directions: 1 or 2.

    Returns:
        [B, C], or [B, 3 * C] for "last_max_mean", in the dtype of `values`.
    """
    if pooling == "last":
        return _last(values, offsets, directions)
    rows = row_of_timestep(offsets, values.size(0))
    if pooling == "mean":
        return _mean(values, offsets, rows)
    if pooling == "max":
        return _max(values, offsets, rows)
    last = _last(values, offsets, directions)
    return torch.cat([last, _max(values, offsets, rows), _mean(values, offsets, rows)], dim=1)


def _last(values: Tensor, offsets: Tensor, directions: int) -> Tensor:
    """Each direction's final timestep: the backward one ends at the row's first."""
    if values.size(0) == 0:
        return values.new_zeros([offsets.size(0) - 1, values.size(1)])
    starts, stops = offsets[:-1], offsets[1:]
    # Clamped for empty rows, which are replaced below.
    final = values.index_select(0, (stops - 1).clamp(min=0))
    if directions == 2:
        half = values.size(1) // 2
        first = values[:, half:].index_select(0, starts.clamp(max=values.size(0) - 1))
        final = torch.cat([final[:, :half], first], dim=1)
    return final.masked_fill((stops == starts).unsqueeze(1), 0.0)


def _mean(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    # float64: adding 10,000 equal float32 values one by one is off by 1e-4.
    wide = values.to(torch.float64)
    if values.is_cuda:
        # index_add adds in an order that differs from run to run on a GPU.
        total = torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
    else:
        total = wide.new_zeros([offsets.size(0) - 1, wide.size(1)]).index_add(0, rows, wide)
    lengths = (offsets[1:] - offsets[:-1]).clamp(min=1)
    return (total / lengths.unsqueeze(1)).to(values.dtype)


def _max(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    low = values.new_full([offsets.size(0) - 1, values.size(1)], -float("inf"))
    high = low.scatter_reduce(0, rows.unsqueeze(1).expand_as(values), values, "amax")
    return high.masked_fill((offsets[1:] == offsets[:-1]).unsqueeze(1), 0.0)
