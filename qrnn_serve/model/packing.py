"""Between padded batches, PackedSequence and rows laid end to end (packed); the check of lengths.

Packed is `values` [N, ...], N the sum of the lengths, with `offsets` [B + 1]: row b is
values[offsets[b]:offsets[b + 1]].
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from qrnn_serve.core.errors import DTypeError, InputError
from qrnn_serve.model.scripting import dtype_name, values_can_be_read


def check_lengths(lengths: Tensor, batch: int, timesteps: int) -> Tensor:
    """Check the lengths of a padded batch on the host. Can be scripted.

    Args:
        lengths: [B] integers, each from 0 to T. [1, B] is taken too, so that DataParallel(dim=1)
            can split them with the batch. On a GPU, reading them waits for the stream.
        batch: B of the input.
        timesteps: T of the input.

    Returns:
        [B] int64 on the CPU.

    Raises:
        DTypeError: They are not integers.
        InputError: Another number of them, or one below 0 or above T.
    """
    if torch.is_floating_point(lengths) or lengths.dtype == torch.bool:
        raise DTypeError("lengths: expected integers, got a floating or bool tensor")
    if lengths.dim() == 2 and lengths.size(0) == 1:
        lengths = lengths[0]
    if lengths.dim() != 1 or lengths.size(0) != batch:
        raise InputError(
            f"lengths: expected one per sequence, [{batch}], got shape {list(lengths.shape)}"
        )
    on_host = lengths.detach().to("cpu", torch.int64)
    if batch > 0:
        low, high = int(on_host.min()), int(on_host.max())
        if low < 0:
            raise InputError(f"lengths: expected 0 or more timesteps, got {low}")
        if high > timesteps:
            raise InputError(
                f"lengths: got {high}, but the input has {timesteps} timesteps; is its time axis "
                "where the module expects it (batch_first)?"
            )
    return on_host


def check_offsets(offsets: Tensor, values: Tensor) -> None:
    """Check [B + 1] offsets against packed values [N, ...]. Can be scripted.

    Raises:
        InputError: A rank or device does not fit, or offsets in CPU memory do not rise from 0 to N.
        DTypeError: They are not int64.
    """
    if offsets.dtype != torch.int64:
        raise DTypeError(f"offsets: expected int64, got {dtype_name(offsets.dtype)}")
    if offsets.dim() != 1 or offsets.size(0) < 1:
        raise InputError(f"offsets: expected shape [batch + 1], got {list(offsets.shape)}")
    if offsets.device != values.device:
        raise InputError(f"offsets: on {offsets.device}, but the input is on {values.device}")
    if values_can_be_read(offsets):
        rising = bool((offsets[1:] >= offsets[:-1]).all())
        if int(offsets[0]) != 0 or int(offsets[-1]) != values.size(0) or not rising:
            raise InputError(
                f"offsets: expected to rise from 0 to the input's {values.size(0)} timesteps, got "
                f"{int(offsets[0])} to {int(offsets[-1])}, rising all the way: {rising}"
            )


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """[B] lengths to [B + 1] int64 offsets, on the same device. Can be scripted."""
    return torch.cat([lengths.new_zeros([1]), lengths.cumsum(0)]).to(torch.int64)


def row_of_timestep(offsets: Tensor, total: int) -> Tensor:
    """[N] int64: which row each packed timestep belongs to. Can be scripted.

    `total` is N. It is passed so that a GPU need not be asked for it.
    """
    lengths = offsets[1:] - offsets[:-1]
    rows = torch.arange(lengths.size(0), device=offsets.device)
    return torch.repeat_interleave(rows, lengths, output_size=total)


def padded_index(offsets: Tensor, total: int, row_stride: int, time_stride: int) -> Tensor:
    """[N] int64: where each packed timestep lies in the flattened padded batch. Can be scripted.

    Strides are 1 and B for a time-major batch [T, B], T and 1 for a batch-major one (row, time).
    """
    rows = row_of_timestep(offsets, total)
    steps = torch.arange(total, device=offsets.device) - offsets[:-1].index_select(0, rows)
    return rows * row_stride + steps * time_stride


def pack_padded(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Take the rows out of a padded batch. Can be scripted.

    Args:
        input: [T, B, ...], or [B, T, ...] with `batch_first`. Padded timesteps are not read.
        lengths: As `check_lengths` takes them.
        batch_first: The batch axis comes before the time axis.

    Returns:
        values [N, ...], offsets [B + 1] and, for `unpack_padded`, index [N].

    Raises:
        DTypeError: The lengths are not integers.
        InputError: The lengths do not fit the input.
    """
    batch, timesteps = input.size(1), input.size(0)
    row_stride, time_stride = 1, batch
    if batch_first:
        batch, timesteps = timesteps, batch
        row_stride, time_stride = timesteps, 1
    on_host = check_lengths(lengths, batch, timesteps)
    offsets = offsets_from_lengths(on_host).to(input.device)
    index = padded_index(offsets, int(on_host.sum()), row_stride, time_stride)
    return input.flatten(0, 1).index_select(0, index), offsets, index


def unpack_padded(values: Tensor, index: Tensor, first: int, second: int) -> Tensor:
    """[N, C] back into a padded batch [first, second, C], exactly 0 at padding. Can be scripted."""
    padded = values.new_zeros([first * second, values.size(1)])
    return padded.index_copy(0, index, values).view([first, second, values.size(1)])


def packed_sequence_index(sequence: PackedSequence) -> tuple[Tensor, Tensor]:
    """Where each of our packed timesteps lies in a PackedSequence's data, and the lengths.

    Returns:
        index [N] and lengths [B], int64 on the CPU, rows in the original order of the batch.
    """
    sizes = sequence.batch_sizes
    batch = int(sizes[0])
    slots = torch.arange(batch)
    if sequence.unsorted_indices is not None:
        slots = sequence.unsorted_indices.cpu()
    lengths = (sizes.unsqueeze(1) > slots).sum(0)
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1])
    rows = row_of_timestep(offsets, total)
    steps = torch.arange(total) - offsets[rows]
    return (sizes.cumsum(0) - sizes)[steps] + slots[rows], lengths


class Arranged(NamedTuple):
    """The input of a module call in the form that the layers compute on.

    Attributes:
        values: Dense [T, B, I], or packed [N, I].
        offsets: [B + 1] int64 when packed, else None.
        batch: B.
        restore: Puts an output of that form into the form of the caller's input.
        longest: A bound on the timesteps of a row.
    """

    values: Tensor
    offsets: Tensor | None
    batch: int
    restore: Callable[[Tensor], Tensor | PackedSequence]
    longest: int


def arrange(
    input: Tensor | PackedSequence,
    lengths: Tensor | Sequence[int] | None,
    batch_first: bool,
) -> Arranged:
    """Bring whatever a module was called with into the form that the layers compute on.

    Args:
        input: [T, B, I], [B, T, I] with `batch_first`, [T, I] for one unbatched sequence, or a
            PackedSequence. Its rank has been checked.
        lengths: Timesteps of each row, or None when all rows have T. The padded timesteps are not
            read: they may hold anything.
        batch_first: The batch axis comes before the time axis.

    Raises:
        InputError: The lengths do not fit, or are given where they make no sense.
    """
    if isinstance(input, PackedSequence):
        if lengths is not None:
            raise InputError("lengths: a PackedSequence brings its own; leave lengths out")
        return _arrange_packed_sequence(input)
    if input.dim() == 2:
        if lengths is not None:
            raise InputError("lengths: one unbatched sequence [T, I] has no padding; leave it out")
        unbatched = input.unsqueeze(1)
        return Arranged(unbatched, None, 1, lambda output: output.squeeze(1), input.shape[0])
    if lengths is not None:
        values, offsets, index = pack_padded(input, torch.as_tensor(lengths), batch_first)
        first, second = input.shape[:2]
        return Arranged(
            values,
            offsets,
            len(offsets) - 1,
            lambda output: unpack_padded(output, index, first, second),
            second if batch_first else first,
        )
    if batch_first:
        dense = input.transpose(0, 1)
        return Arranged(
            dense, None, input.shape[0], lambda output: output.transpose(0, 1), input.shape[1]
        )
    return Arranged(input, None, input.shape[1], lambda output: output, input.shape[0])


def _arrange_packed_sequence(input: PackedSequence) -> Arranged:
    index, lengths = packed_sequence_index(input)
    index = index.to(input.data.device)
    offsets = offsets_from_lengths(lengths).to(input.data.device)

    def restore(output: Tensor) -> PackedSequence:
        data = output.new_zeros(output.shape).index_copy(0, index, output)
        return PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)

    longest = len(input.batch_sizes)
    return Arranged(input.data.index_select(0, index), offsets, len(lengths), restore, longest)


def last_cells(cells: Tensor, offsets: Tensor | None, initial: Tensor, reverse: bool) -> Tensor:
    """The cell values after the last timestep in running order. Can be scripted.

    Args:
        cells: [T, B, H], or packed [N, H] with `offsets`.
        offsets: [B + 1], or None.
        initial: [B, H], what an empty sequence keeps.
        reverse: The running order is from the last timestep to the first.

    Returns:
        [B, H].
    """
    if cells.size(0) == 0:
        return initial
    if offsets is None:
        return cells[0] if reverse else cells[-1]
    starts, stops = offsets[:-1], offsets[1:]
    index = starts if reverse else stops - 1
    # An empty sequence may start at N; its row is replaced below.
    index = index.clamp(min=0, max=cells.size(0) - 1)
    return torch.where((stops > starts).unsqueeze(1), cells.index_select(0, index), initial)
