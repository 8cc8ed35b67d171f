"""Properties that hold for any sizes: carrying the state over a cut equals one run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.kernels import fo_pool, forget_mult
from support.pool_cases import DEVICES

SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("device", DEVICES)
@SETTINGS
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    hidden=st.integers(1, 70),
    cut=st.floats(0, 1),
    reverse=st.booleans(),
    output_gate=st.booleans(),
)
def test_split_sequences_with_carried_state_equal_one_run(
    lengths, hidden, cut, reverse, output_gate, device
):
    """fo_pool over the first part, then over the rest from its state, is fo_pool over the whole."""
    generator = torch.Generator().manual_seed(sum(lengths) * 71 + hidden)
    gates = torch.randn(sum(lengths), (3 if output_gate else 2) * hidden, generator=generator)
    c0 = torch.randn(len(lengths), hidden, generator=generator).to(device)
    gates = gates.to(device)
    sequences = list(gates.split(lengths))
    # In reverse, running order starts at the end: the first part is the tail.
    keep = [round(len(s) * cut) for s in sequences]
    heads = [s[:k] for s, k in zip(sequences, keep, strict=True)]
    tails = [s[k:] for s, k in zip(sequences, keep, strict=True)]

    whole_h, whole_c = fo_pool(gates, c0, _offsets(sequences), output_gate, reverse)
    first, second = (tails, heads) if reverse else (heads, tails)
    first_h, state = fo_pool(torch.cat(first), c0, _offsets(first), output_gate, reverse)
    second_h, last = fo_pool(torch.cat(second), state, _offsets(second), output_gate, reverse)

    head_h, tail_h = (second_h, first_h) if reverse else (first_h, second_h)
    joined = [
        torch.cat(pair)
        for pair in zip(
            head_h.split([len(s) for s in heads]),
            tail_h.split([len(s) for s in tails]),
            strict=True,
        )
    ]
    assert _largest(torch.cat(joined) - whole_h) <= SAME_ROWS_FLOAT32_MAX_ABS
    assert _largest(last - whole_c) <= SAME_ROWS_FLOAT32_MAX_ABS


@pytest.mark.parametrize("device", DEVICES)
@SETTINGS
@given(
    timesteps=st.integers(1, 40),
    batch=st.integers(1, 5),
    hidden=st.integers(1, 70),
    cut=st.integers(0, 40),
)
def test_split_forget_mult_equals_one_run(timesteps, batch, hidden, cut, device):
    """The last state of one part, given to the next as h0, continues it."""
    generator = torch.Generator().manual_seed(timesteps * 71 + hidden)
    cut = min(cut, timesteps)
    f = torch.rand(timesteps, batch, hidden, generator=generator).to(device)
    x = torch.randn(timesteps, batch, hidden, generator=generator).to(device)
    h0 = torch.randn(batch, hidden, generator=generator).to(device)

    whole = forget_mult(f, x, h0)
    head = forget_mult(f[:cut], x[:cut], h0)
    tail = forget_mult(f[cut:], x[cut:], head[-1] if cut else h0)

    assert _largest(torch.cat([head, tail]) - whole) <= SAME_ROWS_FLOAT32_MAX_ABS


def _offsets(sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = torch.tensor([0] + [len(s) for s in sequences])
    return lengths.cumsum(0).to(sequences[0].device)


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0
