"""The recurrence in torch's own operators against the definition, scripted as it is exported."""

from __future__ import annotations

import itertools

import pytest
import torch

from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.kernels import portable, reference
from support.closeness import max_abs
from support.pool_cases import DEVICES, SEQUENCES, assert_near, forget_inputs, packed


@pytest.fixture(scope="module")
def scripted():
    return torch.jit.script(portable.forget_mult)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_every_size_is_the_reference(sequences, reverse, dtype, device, scripted):
    """No rows, empty rows, odd and even sizes, both directions."""
    given = forget_inputs(sequences, dtype)
    wide = [tensor.double() for tensor in given]
    want = reference.forget_mult(*wide, sequences.offsets("cpu"), reverse)

    on_device = [tensor.to(device) for tensor in given]
    got = scripted(*on_device, sequences.offsets(device, torch.int32), reverse)

    assert got.dtype == dtype
    assert_near(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_any_size_may_come_first(sequences):
    """TorchScript compiles for the sizes of the first calls, on a GPU with operators fused."""
    scripted = torch.jit.script(portable.forget_mult)
    given = forget_inputs(sequences, torch.float32)
    wide = [tensor.double() for tensor in given]
    want = reference.forget_mult(*wide, sequences.offsets("cpu"))

    on_gpu = [tensor.cuda() for tensor in given]
    for _ in range(4):
        assert_near(scripted(*on_gpu, sequences.offsets("cuda"), False), want)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_long_memory_builds_up_no_error(spread, scripted):
    """With f near 0.002 over 10,000 timesteps, constant gates and values included."""
    channels = torch.linspace(-2, 2, 40)
    noise = torch.randn(10_000, 1, 40) * spread
    f = (0.002 + 0.0004 * torch.tanh(channels + noise)).expand(10_000, 1, 40)
    x = torch.tanh(channels.flip(0) + noise).expand(10_000, 1, 40)
    h0 = torch.ones(1, 40)

    got = scripted(f, x, h0, None, False)

    assert_near(got, reference.forget_mult(f.double(), x.double(), h0.double()))


def test_gates_of_exactly_0_and_1_keep_and_replace_exactly(scripted):
    """Not a digit of the state is lost at f = 0, nor is one left over at f = 1."""
    f = torch.randint(0, 2, (1000, 3, 5)).float()
    x, h0 = torch.randn(1000, 3, 5), torch.randn(3, 5)

    assert torch.equal(scripted(f, x, h0, None, False), reference.forget_mult(f, x, h0))
    # Between gates of 1, others must not let anything through either.
    mixed = torch.where(torch.rand_like(f) < 0.1, 1.0, torch.rand_like(f))
    state = scripted(mixed, x, h0, None, False)
    assert torch.equal(state[mixed == 1], x[mixed == 1])
    huge = torch.full_like(h0, 1e30)
    mixed[0] = 1
    forgotten = scripted(mixed, x, huge, None, False)
    assert torch.equal(forgotten, scripted(mixed, x, h0, None, False))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reverse", [False, True])
def test_bad_values_stay_in_their_sequence(bad, reverse, scripted):
    """In the gates, the values or the state of one sequence; the others do not change by a bit."""
    sequences = packed(3, 0, 6, 1, 9, hidden=4)
    f, x, h0 = forget_inputs(sequences, torch.float32)
    offsets = sequences.offsets("cpu")
    want = scripted(f, x, h0, offsets, reverse)
    f[3:9:2], x[4:9:3], h0[2] = bad, bad, bad
    h0[1] = bad  # of the sequence that is empty

    got = scripted(f, x, h0, offsets, reverse)

    assert not got[3:9].isfinite().all()
    assert torch.equal(got[:3], want[:3])
    assert torch.equal(got[9:], want[9:])


def test_a_sequence_does_not_depend_on_its_neighbours(scripted):
    """Packed and alone differ by rounding only, wherever in the line the sequence lies."""
    sequences = packed(*range(1, 40), hidden=8)
    f, x, h0 = forget_inputs(sequences, torch.float32)
    offsets = sequences.offsets("cpu")
    together = scripted(f, x, h0, offsets, False)

    for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
        alone = scripted(f[start:stop, None], x[start:stop, None], h0[row : row + 1], None, False)
        assert max_abs(together[start:stop], alone[:, 0]) <= SAME_ROWS_FLOAT32_MAX_ABS
