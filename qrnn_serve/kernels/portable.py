"""The recurrence in torch's own operators, for TorchScript files that load without our library.

A step h -> h + (new - gate * h) joined with the one after it is again such a step, so a tree joins
neighbours, and their joins, up to the whole line of timesteps, and on its way back hands each
timestep the state before it: 2 log2(N) rounds of a few operators each, and work in proportion to N.

The step is written with the share `gate` that is given up, not with the share 1 - gate that is
kept: rounded to float32, 1 - f loses digits of a small f that count again at every timestep. Errors
are in proportion to the largest state of the row.

Letters: T timesteps, B sequences, H channels, N timesteps of all sequences laid end to end.
"""

import torch
from torch import Tensor


def forget_mult(f: Tensor, x: Tensor, h0: Tensor, offsets: Tensor | None, reverse: bool) -> Tensor:
    """h_t = f_t * x_t + (1 - f_t) * h_{t-1}; see `reference.forget_mult`. Can be scripted.

    Args:
        f: Forget gate, [T, B, H], or packed [N, H] with `offsets`; float32 or float64.
        x: New values, as `f`.
        h0: State before the first timestep, [B, H].
        offsets: [B + 1] int32 or int64, from 0 to N; None for dense input.
        reverse: Run each sequence from its last timestep to its first.

    Returns:
        h, shaped and typed as `f`. NaN and infinities stay in their own sequence; within one, those
        of the reference may be NaN here.
    """
    steps = f.size(0)
    # Here and below: TorchScript's compiler fuses operators on a GPU, and fails on empty tensors.
    if f.numel() == 0:
        return f * x
    if reverse:
        f, x = f.flip(0), x.flip(0)
    # In dense input all sequences begin at once: they are the columns of a single one.
    starts = torch.zeros([1], dtype=torch.int64, device=f.device)
    occupied = torch.ones([1], dtype=torch.bool, device=f.device)
    before = h0.unsqueeze(0)
    if offsets is not None:
        starts = steps - offsets[1:] if reverse else offsets[:-1]
        # An empty sequence may start at N; it adds nothing where it is put instead.
        starts = starts.clamp(max=steps - 1)
        occupied = offsets[1:] > offsets[:-1]
        before = h0
    begins = torch.zeros([steps], dtype=torch.int32, device=f.device)
    begins = begins.index_add(0, starts, occupied.to(torch.int32)) > 0
    column = [-1] + [1] * (f.dim() - 1)
    kept = torch.addcmul(before, f.index_select(0, starts), before, value=-1.0)
    kept = torch.where(occupied.view(column), kept, torch.zeros_like(kept))
    states = _tree_scan(f, (f * x).index_add(0, starts, kept), begins.view(column))
    return states.flip(0) if reverse else states


def _tree_scan(gate: Tensor, new: Tensor, begins: Tensor) -> Tensor:
    """The states after each step of a line of sequences.

    Args:
        gate: [N, ...].
        new: [N, ...]; where a sequence begins, the state itself.
        begins: bool [N, 1, ...], True where what comes before is another sequence.
    """
    gates, news, marks = [gate], [new], [begins]
    while news[-1].size(0) > 1:
        pairs = news[-1].size(0) // 2 * 2
        gate, new, begins = gates[-1][:pairs], news[-1][:pairs], marks[-1][:pairs]
        # With new = gate, a step maps the share given up before it to that after it.
        gates.append(_step(gate[::2], gate[1::2], gate[1::2]))
        news.append(torch.where(begins[1::2], new[1::2], _step(new[::2], gate[1::2], new[1::2])))
        marks.append(begins[::2] | begins[1::2])
    states = news[-1]
    for level in range(len(news) - 2, -1, -1):
        gate, new, begins = gates[level], news[level], marks[level]
        merged = torch.empty_like(new)
        merged[:1] = new[:1]
        merged[1::2] = states
        if new.size(0) > 2:
            states = states[: (new.size(0) - 1) // 2]
            merged[2::2] = torch.where(
                begins[2::2], new[2::2], _step(states, gate[2::2], new[2::2])
            )
        states = merged
    return states


def _step(state: Tensor, gate: Tensor, new: Tensor) -> Tensor:
    # In this order a gate of exactly 1 leaves exactly `new`, and a gate of 0 exactly the state.
    return new + torch.addcmul(state, gate, state, value=-1.0)
