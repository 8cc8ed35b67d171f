"""A stand-in for the GPU: everything runs once on the CPU, and times are given by the test."""

from __future__ import annotations

import pytest
import torch

import kernel_peers
from kernel_timing import Measured, Timing, Work, short_error


class HostBench:
    """Runs each call once; a side's time is looked up by its name."""

    device = "cpu"

    def __init__(self):
        self.times_us = {}

    def sets_for(self, set_bytes):
        return 2

    def copy_work(self):
        return Work([lambda: None], graph=False)

    def measure(self, works):
        measured = Measured()
        for name, work in works.items():
            try:
                for call in work.calls:
                    call()
            except RuntimeError as error:
                measured.errors[name] = short_error(error)
            else:
                measured.times[name] = Timing.of([self.times_us.get(name, 10.0)], 1)
        return measured


@pytest.fixture
def bench():
    return HostBench()


@pytest.fixture
def channel_scan_on_cpu(monkeypatch):
    """The two CUDA kernels of the original as loops over time."""

    def forward(f, x):
        states = [torch.zeros_like(f[0])]
        for f_t, x_t in zip(f, x, strict=True):
            states.append(f_t * x_t + (1 - f_t) * states[-1])
        return torch.stack(states)

    def backward(grad_h, f, x, states):
        grad_f, grad_x, grad = torch.empty_like(f), torch.empty_like(x), torch.zeros_like(f[0])
        for t in reversed(range(len(f))):
            grad = grad + grad_h[t]
            grad_f[t], grad_x[t] = (x[t] - states[t]) * grad, f[t] * grad
            grad = (1 - f[t]) * grad
        return grad_f, grad_x

    monkeypatch.setattr(kernel_peers, "channel_scan", forward)
    monkeypatch.setattr(kernel_peers, "channel_scan_backward", backward)
