"""A row's numbers depend on nothing but the row: not on padding, its values, or its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from qrnn_serve import QRNN
from qrnn_serve.core.tolerances import GOLDEN_FLOAT64_MAX_ABS
from support.closeness import max_abs
from support.devices import DEVICES
from support.stacks import STACKS, pad, random_rows

LENGTHS = [3, 1, 6, 2]
FILLS = [0.0, 7.0, float("nan"), float("inf")]


def module_and_rows(name, device="cpu"):
    config = STACKS[name]
    module = QRNN.from_config(config, dtype=torch.float64, device=device).eval()
    return module, [row.to(device) for row in random_rows(LENGTHS, config.input_size)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", STACKS)
def test_every_row_equals_its_run_alone(name, fill, device):
    """C01: padded with 0, 7, NaN or inf, outputs and states are those of B = 1; padding is 0."""
    module, rows = module_and_rows(name, device)
    padded = pad(rows, timesteps=8, fill=fill)

    output, state = module(padded, lengths=LENGTHS)

    for b, row in enumerate(rows):
        alone, alone_state = module(row.unsqueeze(1))
        assert max_abs(output[: len(row), b : b + 1], alone) <= GOLDEN_FLOAT64_MAX_ABS
        assert torch.equal(output[len(row) :, b], torch.zeros_like(output[len(row) :, b]))
        for cells, alone_cells in zip(state, alone_state, strict=True):
            got = cells[b : b + 1] if cells.dim() == 2 else cells[:, b : b + 1]
            assert max_abs(got, alone_cells) <= GOLDEN_FLOAT64_MAX_ABS


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ["windows", "joined", "stacks"])
def test_padded_inputs_get_no_gradient(name, fill, training):
    """The gradient of padded inputs is exactly 0, that of the others finite, for any fill."""
    module, rows = module_and_rows(name)
    module.train(training)
    padded = pad(rows, timesteps=8, fill=fill).clone().requires_grad_()

    output, state = module(padded, lengths=torch.tensor(LENGTHS))
    (output.sum() + sum(cells.sum() for cells in state)).backward()

    for b, length in enumerate(LENGTHS):
        assert torch.equal(padded.grad[length:, b], torch.zeros_like(padded.grad[length:, b]))
        assert padded.grad[:length, b].isfinite().all()
        assert (padded.grad[:length, b] != 0).any()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["windows", "joined"])
def test_infinity_in_one_row_stays_there(name):
    """NaN and infinity in a row's own timesteps never reach another row."""
    module, rows = module_and_rows(name)
    clean, _ = module(pad(rows), lengths=LENGTHS)
    rows[2] = torch.full_like(rows[2], float("nan"))
    rows[2][0] = float("inf")

    output, _ = module(pad(rows), lengths=LENGTHS)

    for b in (0, 1, 3):
        assert torch.equal(output[:, b], clean[:, b])
    assert output[: LENGTHS[2], 2].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("name", ["windows", "joined"])
def test_packed_sequence_equals_padded_with_lengths(name, enforce_sorted, device):
    """PackedSequence in and out, sorted or not; states in the original order of the batch."""
    module, rows = module_and_rows(name, device)
    if enforce_sorted:
        rows.sort(key=len, reverse=True)
    lengths = [len(row) for row in rows]
    start = [torch.randn(cells.shape).to(cells) for cells in module.initial_state(4).cells]

    packed, state = module(pack_sequence(rows, enforce_sorted=enforce_sorted), start)
    expected, expected_state = module(pad(rows), start, lengths=lengths)

    unpacked, unpacked_lengths = pad_packed_sequence(packed)
    assert unpacked_lengths.tolist() == lengths
    assert torch.equal(unpacked, expected)
    assert all(torch.equal(a, b) for a, b in zip(state, expected_state, strict=True))


def test_packed_sequence_of_a_padded_batch_carries_gradients():
    """pack_padded_sequence, as written for nn.LSTM, gives the same gradients as lengths."""
    module, rows = module_and_rows("windows")
    first, second = (pad(rows).clone().requires_grad_() for _ in range(2))

    packed, _ = module(pack_padded_sequence(first, torch.tensor(LENGTHS), enforce_sorted=False))
    weight = torch.randn(sum(LENGTHS), module.config.output_size, dtype=torch.float64)
    (packed.data * weight).sum().backward()
    output, _ = module(pack_padded_sequence(second, torch.tensor(LENGTHS), enforce_sorted=False))
    dense, _ = module(second, lengths=LENGTHS)
    repacked = pack_padded_sequence(dense, torch.tensor(LENGTHS), enforce_sorted=False)

    assert torch.equal(output.data, repacked.data)
    (repacked.data * weight).sum().backward()
    assert max_abs(first.grad, second.grad) <= GOLDEN_FLOAT64_MAX_ABS


@pytest.mark.parametrize("name", ["one", "joined"])
def test_batch_first_moves_the_axes_and_nothing_else(name):
    """batch_first with and without lengths equals the time-major call; states keep their layout."""
    module, rows = module_and_rows(name)
    batch_major = QRNN.from_config(STACKS[name], batch_first=True, dtype=torch.float64).eval()
    batch_major.load_state_dict(module.state_dict())
    padded = pad(rows)

    for lengths in (None, LENGTHS):
        output, state = batch_major(padded.transpose(0, 1), lengths=lengths)
        expected, expected_state = module(padded, lengths=lengths)

        assert max_abs(output.transpose(0, 1), expected) <= GOLDEN_FLOAT64_MAX_ABS
        for cells, expected_cells in zip(state, expected_state, strict=True):
            assert max_abs(cells, expected_cells) <= GOLDEN_FLOAT64_MAX_ABS


def test_lengths_may_be_tensor_list_or_split_by_data_parallel():
    """A list, int32, [1, B] and a length-0 row all mean the same rows."""
    module, rows = module_and_rows("windows")
    padded = pad(rows)
    expected, _ = module(padded, lengths=LENGTHS)

    for lengths in (
        torch.tensor(LENGTHS, dtype=torch.int32),
        torch.tensor([LENGTHS]),
        tuple(LENGTHS),
    ):
        assert torch.equal(module(padded, lengths=lengths)[0], expected)
    empty, state = module(padded, lengths=[0, 0, 0, 0])
    assert torch.equal(empty, torch.zeros_like(empty))
    assert all(torch.equal(cells, torch.zeros_like(cells)) for cells in state)
