"""CPU implementation for the first days: the reference itself, until the C library lands."""

from __future__ import annotations

import torch

from qrnn_serve.kernels import checks, reference


def _values(op, offsets, timesteps):
    if offsets is not None:
        checks.check_offset_values(op, offsets, timesteps)


def forget_mult(f, x, h0=None, offsets=None, reverse=False):
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    _values("forget_mult", offsets, sizes.timesteps)
    return reference.forget_mult(f, x, h0, offsets, reverse).contiguous()


def fo_pool(gates, c0=None, offsets=None, output_gate=True, reverse=False, zoneout=0.0):
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    _values("fo_pool", offsets, sizes.timesteps)
    h, c = reference.fo_pool(gates, c0, offsets, output_gate, reverse, zoneout)
    return h.contiguous(), c.contiguous()


def forget_mult_backward(grad_h, f, x, h, h0, offsets, reverse):
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    h0 = f.new_zeros(sizes.batch, sizes.hidden) if h0 is None else h0
    wide = [t.double() for t in (grad_h, f, x, h0)]
    grad_f, grad_x, grad_h0 = _adjoint(*wide, offsets, reverse, None)
    return grad_f.to(f.dtype), grad_x.to(f.dtype), grad_h0.to(f.dtype)


def _adjoint(grad, f, x, h0, offsets, reverse, grad_last):
    h = reference.forget_mult(f, x, h0, offsets, reverse)
    grad_f, grad_x, grad_h0 = torch.zeros_like(f), torch.zeros_like(f), torch.zeros_like(h0)
    batch = len(h0)
    for b in range(batch):
        rows = range(len(f)) if offsets is None else range(int(offsets[b]), int(offsets[b + 1]))
        order = list(reversed(rows)) if reverse else list(rows)
        carry = torch.zeros_like(h0[b]) if grad_last is None else grad_last[b].clone()
        for i in reversed(range(len(order))):
            at = order[i] if offsets is not None else (order[i], b)
            before = h0[b]
            if i > 0:
                before = h[order[i - 1]] if offsets is not None else h[order[i - 1], b]
            carry = carry + grad[at]
            grad_x[at] = carry * f[at]
            grad_f[at] = carry * (x[at] - before)
            carry = carry * (1 - f[at])
        grad_h0[b] = carry
    return grad_f, grad_x, grad_h0


def fo_pool_backward(grad_h, grad_c, gates, c0, offsets, output_gate, reverse, zoneout):
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    c0 = gates.new_zeros(sizes.batch, sizes.hidden) if c0 is None else c0
    pieces = gates.double().chunk(3 if output_gate else 2, dim=-1)
    z, s = torch.tanh(pieces[0]), torch.sigmoid(pieces[1])
    f = s * (1 - zoneout)
    grad = torch.zeros_like(z) if grad_h is None else grad_h.double()
    parts = []
    if output_gate:
        o = torch.sigmoid(pieces[2])
        c = reference.forget_mult(f, z, c0.double(), offsets, reverse)
        parts = [grad * c * o * (1 - o)]
        grad = grad * o
    last = None if grad_c is None else grad_c.double()
    df, dz, dc0 = _adjoint(grad, f, z, c0.double(), offsets, reverse, last)
    grads = torch.cat([dz * (1 - z * z), df * f * (1 - s), *parts], dim=-1)
    return grads.to(gates.dtype), dc0.to(gates.dtype)
