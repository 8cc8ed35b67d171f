"""The window of a QRNN layer: the inputs of the timesteps before, laid beside each timestep's own.

A window of k is a masked convolution of width k over time (Bradbury et al. 2016, section 2.1),
written as one matrix product: the columns of a timestep are its own input, then the input 1 step
back, 2 back, ... "Back" is in running order, so for the reverse direction it is the timestep after.
What lies before the first timestep comes from `previous`, never from a neighbouring sequence or
from padding.

Letters: T timesteps, B sequences, I inputs, N timesteps of all sequences laid end to end, k window.
Every function here can be scripted.
"""

import torch
from torch import Tensor

from qrnn_serve.kernels import cuda_window
from qrnn_serve.kernels.straight import goes_straight


def window_columns(
    values: Tensor, offsets: Tensor | None, previous: Tensor, window: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Lay the window of each timestep side by side.

    Args:
        values: Inputs, [T, B, I], or packed [N, I] with `offsets`.
        offsets: [B + 1] int32 or int64, from 0 to N, on the device of `values`; None for dense.
        previous: The k - 1 inputs before the first timestep, oldest first, [B, k - 1, I]; [B, 0] is
            zeros.
        window: k.
        reverse: Run each sequence from its last timestep to its first.

    Returns:
        The columns, [T, B, k * I] or [N, k * I], and the k - 1 inputs that the timestep after the
        last would need, [B, k - 1, I]. A sequence shorter than that keeps the newest of `previous`.
    """
    if window == 1:
        return values, previous
    given = previous.size(1) > 0
    previous = previous.to(values.dtype)
    # TorchScript leaves out the branch only when the condition stands alone.
    if not torch.jit.is_scripting():  # noqa: SIM102  # pyright: ignore[reportPrivateImportUsage]
        if values.is_cuda and goes_straight(values, offsets, previous):
            before = previous if given else None
            return cuda_window.window_columns(values, offsets, before, window - 1, reverse)
    if not given:
        previous = values.new_zeros([previous.size(0), window - 1, values.size(-1)])
    if offsets is None:
        return _dense_columns(values, previous, reverse)
    offsets = offsets.to(torch.int64)
    columns = _packed_columns(values, offsets, previous, reverse)
    return columns, _packed_carried(values, offsets, previous, reverse)


def window_carried(
    values: Tensor, offsets: Tensor | None, previous: Tensor, window: int, reverse: bool
) -> Tensor:
    """The second result of `window_columns` alone, [B, k - 1, I]."""
    lags = window - 1
    if lags == 0:
        return previous
    if offsets is None and values.size(0) >= lags:
        newest = values[:lags].flip(0) if reverse else values[values.size(0) - lags :]
        # A copy: the caller may write into the inputs, as for a CUDA graph.
        return newest.transpose(0, 1).clone()
    previous = previous.to(values.dtype)
    if previous.size(1) == 0:
        previous = values.new_zeros([previous.size(0), lags, values.size(-1)])
    if offsets is not None:
        return _packed_carried(values, offsets.to(torch.int64), previous, reverse)
    newest = (values.flip(0) if reverse else values).transpose(0, 1)
    return torch.cat([previous, newest], dim=1)[:, -lags:]


def _dense_columns(
    values_TBI: Tensor, previous_BKI: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    timesteps = values_TBI.size(0)
    lags = previous_BKI.size(1)
    before = previous_BKI.transpose(0, 1)
    if reverse:
        line = torch.cat([values_TBI, before.flip(0)])
        columns = [line[lag : lag + timesteps] for lag in range(lags + 1)]
        carried = line[:lags].flip(0)
    else:
        line = torch.cat([before, values_TBI])
        columns = [line[lags - lag : lags - lag + timesteps] for lag in range(lags + 1)]
        carried = line[timesteps:]
    return torch.cat(columns, dim=2), carried.transpose(0, 1)


def _packed_columns(
    values_NI: Tensor, offsets: Tensor, previous_BKI: Tensor, reverse: bool
) -> Tensor:
    total = values_NI.size(0)
    lags = previous_BKI.size(1)
    starts = offsets[:-1].unsqueeze(1)
    stops = offsets[1:].unsqueeze(1)
    columns = [values_NI]
    for lag in range(1, lags + 1):
        # One row more than N: a sequence shorter than the lag has no such timestep, and what was
        # meant for it is written there.
        gap = values_NI.new_zeros([lag + 1 if reverse else lag, values_NI.size(1)])
        steps = torch.arange(lag, device=values_NI.device)
        if reverse:
            shifted = torch.cat([values_NI, gap]).narrow(0, lag, total + 1)
            border = stops - 1 - steps
        else:
            shifted = torch.cat([gap, values_NI]).narrow(0, 0, total + 1)
            border = starts + steps
        index = torch.where(steps < stops - starts, border, total)
        fill = previous_BKI[:, lags - lag :]
        shifted = shifted.index_copy(0, index.flatten(), fill.flatten(0, 1))
        columns.append(shifted.narrow(0, 0, total))
    return torch.cat(columns, dim=1)


def _packed_carried(
    values_NI: Tensor, offsets: Tensor, previous_BKI: Tensor, reverse: bool
) -> Tensor:
    if values_NI.size(0) == 0:
        return previous_BKI
    lags = previous_BKI.size(1)
    starts = offsets[:-1].unsqueeze(1)
    stops = offsets[1:].unsqueeze(1)
    slots = torch.arange(lags, device=values_NI.device)
    # Running position of each carried input; negative ones lie before the first timestep.
    steps = stops - starts - lags + slots
    inside = steps >= 0
    position = stops - 1 - steps if reverse else starts + steps
    position = torch.where(inside, position, 0)
    fresh = values_NI.index_select(0, position.flatten()).view(previous_BKI.shape)
    older_slot = (steps + lags).clamp(max=lags - 1).unsqueeze(2).expand(previous_BKI.shape)
    older = previous_BKI.gather(1, older_slot)
    return torch.where(inside.unsqueeze(2), fresh, older)


def as_window(flat: Tensor, input_size: int) -> Tensor:
    """[B, (window - 1) * I] to [B, window - 1, I]; nothing stays as it is."""
    if flat.size(1) == 0:
        return flat
    return flat.unflatten(1, [flat.size(1) // input_size, input_size])


def as_row(windowed: Tensor) -> Tensor:
    """The inverse of `as_window`."""
    return windowed if windowed.dim() == 2 else windowed.flatten(1)
