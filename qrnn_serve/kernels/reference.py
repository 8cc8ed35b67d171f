"""The definition of the recurrences: readable loops that every kernel is tested against.

Quasi-Recurrent Neural Networks (Bradbury et al. 2016, arXiv 1611.01576), section 2, in the
orientation of the salesforce code, where the forget gate f multiplies the NEW value:

    forget_mult   h_t = f_t * x_t + (1 - f_t) * h_{t-1}
    fo_pool       z_t = tanh(Z_t)
                  f_t = sigmoid(F_t) * (1 - zoneout)
                  c_t = f_t * z_t + (1 - f_t) * c_{t-1}
                  h_t = sigmoid(O_t) * c_t        with an output gate (fo-pooling, equation 4)
                  h_t = c_t                       without one (f-pooling, equation 3)

The paper writes h_t = f_t * h_{t-1} + (1 - f_t) * z_t: its f is our 1 - f.

Letters: T timesteps, B sequences, H channels, G gates (3 with an output gate, else 2), N timesteps
    of all sequences laid end to end (packed), where sequence b holds rows offsets[b] to offsets[b +
    1] - 1.

Works in any floating dtype and is differentiable. float16 and bfloat16 are computed in float32 and
rounded once at the end, which is what the kernels do. Never made faster: it is the definition.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def forget_mult(
    f: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    offsets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Run h_t = f_t * x_t + (1 - f_t) * h_{t-1} over every sequence.

    Args:
        f: Forget gate, [T, B, H], or packed [N, H] with `offsets`.
        x: New values, as `f`.
        h0: State before the first timestep, [B, H]; None is zeros.
        offsets: [B + 1] int32 or int64, from 0 to N; None for dense input.
        reverse: Run each sequence from its last timestep to its first.

    Returns:
        h, shaped and typed as `f`.
    """
    f_wide, x_wide = _widen(f), _widen(x)
    batch = f.shape[1] if offsets is None else len(offsets) - 1
    initial = f_wide.new_zeros(batch, f.shape[-1]) if h0 is None else _widen(h0)
    if offsets is None:
        return _scan(f_wide, x_wide, initial, reverse).to(f.dtype)
    parts = [
        _scan(f_wide[start:stop, None], x_wide[start:stop, None], initial[b : b + 1], reverse)[:, 0]
        for b, (start, stop) in enumerate(_spans(offsets))
    ]
    return torch.cat([f_wide[:0], *parts]).to(f.dtype)


def fo_pool(
    gates: Tensor,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Run fo-pooling (or f-pooling) on pre-activations.

    Args:
        gates: Pre-activations in the order Z, F, O (or Z, F), [T, B, G*H], or packed [N, G*H].
        c0: Cell state before the first timestep, [B, H]; None is zeros.
        offsets: [B + 1] int32 or int64, from 0 to N; None for dense input.
        output_gate: True for G = 3, False for G = 2.
        reverse: Run each sequence from its last timestep to its first.
        zoneout: Share by which f is scaled down, 0 to 1 (the salesforce rule at evaluation).

    Returns:
        h, [T, B, H] or [N, H], and c, [B, H]: the cell state after the last timestep in running
        order, which is c0 for an empty sequence.
    """
    wide = _widen(gates)
    if output_gate:
        z, f, o = wide.chunk(3, dim=-1)
    else:
        z, f = wide.chunk(2, dim=-1)
        o = None
    f = torch.sigmoid(f) * (1.0 - zoneout)
    batch = gates.shape[1] if offsets is None else len(offsets) - 1
    initial = wide.new_zeros(batch, f.shape[-1]) if c0 is None else _widen(c0)
    cells = forget_mult(f, torch.tanh(z), initial, offsets, reverse)
    hidden = cells if o is None else torch.sigmoid(o) * cells
    return hidden.to(gates.dtype), _last(cells, initial, offsets, reverse).to(gates.dtype)


def _scan(f_TBH: Tensor, x_TBH: Tensor, state_BH: Tensor, reverse: bool) -> Tensor:
    # Unbound, not indexed: the gradient of an index is a whole tensor of zeros for each timestep.
    timesteps = list(zip(f_TBH.unbind(), x_TBH.unbind(), strict=True))
    states: list[Tensor] = []
    for f_BH, x_BH in reversed(timesteps) if reverse else timesteps:
        state_BH = f_BH * x_BH + (1 - f_BH) * state_BH
        states.append(state_BH)
    if not states:
        return f_TBH * x_TBH
    return torch.stack(states[::-1] if reverse else states)


def _last(cells: Tensor, initial: Tensor, offsets: Tensor | None, reverse: bool) -> Tensor:
    if offsets is None:
        return cells[0 if reverse else -1].clone() if len(cells) else initial.clone()
    rows = [
        (cells[start] if reverse else cells[stop - 1]) if stop > start else initial[b]
        for b, (start, stop) in enumerate(_spans(offsets))
    ]
    return torch.stack(rows) if rows else initial.clone()


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    bounds: list[int] = offsets.tolist()
    return list(itertools.pairwise(bounds))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
