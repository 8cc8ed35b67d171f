"""Any window, in both directions, equals a plain float64 loop over timesteps."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve import QRNN
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig
from qrnn_serve.model.window import window_columns
from support.closeness import max_abs
from support.devices import DEVICES
from support.qrnn_loop import loop_stack, state_row, weights_of
from support.stacks import STACKS, pad, random_rows

LENGTHS = [7, 0, 1, 2, 12, 3]


def loop_batch(config, module, rows):
    """Outputs and states [B, S] of the loop, row by row."""
    weights = weights_of(module.cpu())
    results = [loop_stack(config, weights, row.double().numpy()) for row in rows]
    outputs = [torch.from_numpy(output) for output, _ in results]
    return outputs, torch.stack([state_row(config, after) for _, after in results])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, GOLDEN_FLOAT64_MAX_ABS), (torch.float32, FLOAT32_MAX_ABS)],
)
@pytest.mark.parametrize("name", STACKS)
def test_every_kind_of_stack_equals_the_loop(name, dtype, tolerance, device):
    """Output and whole state of uneven rows, empty ones and ones shorter than the window too."""
    config = STACKS[name]
    module = QRNN.from_config(config, dtype=dtype).eval()
    rows = random_rows(LENGTHS, config.input_size, dtype)
    expected, expected_state = loop_batch(config, module, rows)

    module.to(device)
    output, state = module(
        pad(rows).to(device), module.initial_state(len(rows)), lengths=torch.tensor(LENGTHS)
    )

    assert max_abs(output, pad(expected)) <= tolerance
    parts = [
        part[direction]
        for cells, inputs in zip(state.cells, state.inputs, strict=True)
        for direction in range(config.num_directions)
        for part in (cells, inputs)
    ]
    assert max_abs(torch.cat(parts, dim=1), expected_state) <= tolerance


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("timesteps", [0, 1, 2, 6])
def test_dense_and_packed_windows_are_the_same(timesteps, window, reverse):
    """Columns and carried inputs of both layouts, with previous inputs, also for short T."""
    values, previous = torch.randn(timesteps, 3, 2), torch.randn(3, window - 1, 2)

    dense, dense_carried = window_columns(values, None, previous, window, reverse)
    flat = values.transpose(0, 1).flatten(0, 1)
    offsets = torch.arange(4, dtype=torch.int32) * timesteps
    packed, packed_carried = window_columns(flat, offsets, previous, window, reverse)

    assert torch.equal(packed.view(3, timesteps, window * 2).transpose(0, 1), dense)
    assert torch.equal(packed_carried, dense_carried)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_columns_are_the_current_input_then_older_ones(window):
    """Column block j of timestep t is input t - j; for the reverse direction t + j."""
    values = torch.arange(1.0, 6.0).view(5, 1, 1)
    nothing = torch.zeros(1, window - 1, 1)

    ahead, _ = window_columns(values, None, nothing, window, False)
    back, _ = window_columns(values, None, nothing, window, True)

    for t in range(5):
        for lag in range(window):
            assert ahead[t, 0, lag] == (t - lag + 1 if t >= lag else 0)
            assert back[t, 0, lag] == (t + lag + 1 if t + lag < 5 else 0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("window", [2, 4])
def test_missing_inputs_are_exact_zeros_beside_nan(window, reverse):
    """What lies before the first timestep is 0, whatever the data and the neighbours hold."""
    values = torch.full((6, 2), float("nan"))
    offsets = torch.tensor([0, 1, 1, 6])
    nothing = torch.zeros(3, window - 1, 2)

    packed, _ = window_columns(values, offsets, nothing, window, reverse)
    dense, _ = window_columns(values.view(6, 1, 2), None, nothing[:1], window, reverse)

    assert torch.equal(packed[0, 2:], torch.zeros(2 * window - 2))
    first = -1 if reverse else 0
    assert torch.equal(packed[5 if reverse else 1, 2:], torch.zeros(2 * window - 2))
    assert torch.equal(dense[first, 0, 2:], torch.zeros(2 * window - 2))


def test_long_sequence_in_float32_stays_close_to_the_loop():
    """T 10,000 in float32 against the float64 loop, with forget gates near 0.002."""
    config = QRNNConfig(input_size=2, layers=(LayerConfig(hidden_size=3, window=2),))
    module = QRNN.from_config(config).eval()
    with torch.no_grad():
        module.layers[0].linear.bias[3:6] = -6.2
    rows = random_rows([10_000], 2, torch.float32)
    expected, _ = loop_batch(config, module, rows)

    output, _ = module(rows[0])

    assert max_abs(output, expected[0]) <= FLOAT32_MAX_ABS
