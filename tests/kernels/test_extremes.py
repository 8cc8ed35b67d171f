"""Very long sequences, very many, and rows very far apart, against the float64 reference."""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from qrnn_serve.kernels import fo_pool, forget_mult, reference
from support.pool_cases import DEVICES, DTYPES, assert_near, dense, packed, pool_inputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hundred_thousand_timesteps(dtype, device):
    """In one sequence beside short ones, forward and backward."""
    layout = packed(100_000, 3, 0, 1, hidden=8)
    gates, c0 = pool_inputs(layout, dtype, True)
    offsets = layout.offsets("cpu")
    want_h, want_c, want_grad = _pooled(gates, c0, offsets)

    leaf = gates.to(device).requires_grad_()
    h, c = fo_pool(leaf, c0.to(device), offsets.to(device))
    (grad,) = torch.autograd.grad(h.sum(), leaf)

    assert_near(h, want_h, "h")
    assert_near(c, want_c, "c")
    assert_near(grad, want_grad, "grad_gates")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_seventy_thousand_dense_sequences(dtype, device):
    """More than any grid dimension but the first takes, forward and backward."""
    layout = dense(2, 70_000, 3)
    gates, c0 = pool_inputs(layout, dtype, True)
    seeds = torch.randn(layout.shape()).to(dtype), torch.randn(c0.shape).to(dtype)
    wide = [t.double().requires_grad_() for t in (gates, c0)]
    expected = reference.fo_pool(*wide)
    expected_grads = torch.autograd.grad(expected, wide, [seed.double() for seed in seeds])

    leaves = [t.to(device).requires_grad_() for t in (gates, c0)]
    got = fo_pool(*leaves)
    grads = torch.autograd.grad(got, leaves, [seed.to(device) for seed in seeds])

    for value, want in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert_near(value, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_seventy_thousand_packed_sequences(dtype, device):
    """Of up to three timesteps, empty ones among them, forward and backward."""
    lengths = torch.randint(0, 4, (70_000,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    gates = torch.randn(int(offsets[-1]), 3).to(dtype)
    c0 = torch.randn(70_000, 1).to(dtype)
    wide = [t.double().requires_grad_() for t in (gates, c0)]
    expected = _pooled_in_dense_steps(*wide, offsets, lengths)
    seeds = torch.randn(len(gates), 1).to(dtype), torch.randn(c0.shape).to(dtype)
    expected_grads = torch.autograd.grad(expected, wide, [seed.double() for seed in seeds])

    leaves = [t.to(device).requires_grad_() for t in (gates, c0)]
    got = fo_pool(*leaves, offsets.to(device))
    grads = torch.autograd.grad(got, leaves, [seed.to(device) for seed in seeds])

    for value, want in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert_near(value, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_beyond_two_to_the_31_elements_on_a_cpu(dtype):
    """Timesteps and sequences 2^31 elements apart: addresses do not wrap."""
    timesteps, hidden, apart = 3, 37, 2**31 + 64
    itemsize = torch.empty((), dtype=dtype).element_size()
    file = os.memfd_create("rows")  # pages of it that nobody touches take no memory
    os.truncate(file, (timesteps * apart + 3 * hidden) * itemsize)
    line = torch.frombuffer(mmap.mmap(file, 0), dtype=dtype)
    os.close(file)
    few = torch.randn(timesteps, 2, 3 * hidden).to(dtype)
    seed = torch.randn(timesteps, 2, hidden).to(dtype)
    by_time = line.as_strided(few.shape, (apart, 3 * hidden, 1))
    by_sequence = line.as_strided((2, timesteps, 3 * hidden), (apart, 3 * hidden, 1))
    for far in (by_time, by_sequence.transpose(0, 1)):
        far.copy_(few)
        f, x = far[..., :hidden].detach(), far[..., hidden : 2 * hidden].detach()
        got, want = [], []
        for to, gates in ((got, far.detach()), (want, few.clone())):
            leaf = gates.requires_grad_()
            h, c = fo_pool(leaf)
            to += [h, c, *torch.autograd.grad(h, leaf, seed)]
        got.append(forget_mult(f, x))
        want.append(forget_mult(f.contiguous(), x.contiguous()))

        for value, expected in zip(got, want, strict=True):
            assert torch.equal(value, expected)
        assert_near(got[0], reference.fo_pool(few.double())[0])


def test_the_first_calls_of_a_process_come_from_many_threads():
    """The library is loaded once and its threads are started once, whoever comes first."""
    program = """
import threading, torch
from qrnn_serve.kernels import fo_pool
torch.set_num_threads(3)
gates = torch.arange(60.0 * 8 * 900).sin().view(60, 8, 900)
gate, results = threading.Barrier(8), []
def work():
    gate.wait()
    results.append(fo_pool(gates)[0])
workers = [threading.Thread(target=work) for _ in range(8)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert len(results) == 8
assert all(torch.equal(result, fo_pool(gates)[0]) for result in results)
"""

    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def _pooled_in_dense_steps(gates, c0, offsets, lengths):
    """h and c of packed fo-pooling: a dense step of the reference over the rows that are left."""
    state, rows, parts = c0, [], []
    for t in range(int(lengths.max())):
        alive = (lengths > t).nonzero()[:, 0]
        rows.append(offsets[alive] + t)
        step_h, step_c = reference.fo_pool(gates[rows[-1]][None], state[alive])
        state = state.index_put((alive,), step_c)
        parts.append(step_h[0])
    h = torch.zeros(len(gates), c0.shape[1], dtype=c0.dtype)
    return h.index_put((torch.cat(rows),), torch.cat(parts)), state


def _pooled(gates, c0, offsets):
    """h, c and the gradient of h.sum() by the gates of packed fo-pooling, in closed form.

    Autograd takes minutes over a graph of 100,000 timesteps. With a_t the gradient of the loss by
    c_t: a_t = o_t + (1 - f_{t+1}) a_{t+1}.
    """
    z, f, o = np.split(gates.double().numpy(), 3, axis=1)
    z, f, o = np.tanh(z), 1 / (1 + np.exp(-f)), 1 / (1 + np.exp(-o))
    before, cells, a = (np.zeros_like(z) for _ in range(3))
    ends = c0.double().numpy().copy()
    for b, (first, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        for t in range(first, stop):
            before[t] = ends[b]
            ends[b] = cells[t] = f[t] * z[t] + (1 - f[t]) * before[t]
        adjoint = np.zeros_like(ends[b])
        for t in reversed(range(first, stop)):
            a[t] = adjoint + o[t]
            adjoint = (1 - f[t]) * a[t]
    grads = (a * f * (1 - z**2), a * (z - before) * f * (1 - f), cells * o * (1 - o))
    results = (o * cells, ends, np.concatenate(grads, axis=1))
    return tuple(map(torch.from_numpy, results))
