"""What is carried from call to call: kinds of state, chunks equal the whole, nothing is left."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.core.errors import ConfigError, DTypeError, InputError
from qrnn_serve.core.tolerances import GOLDEN_FLOAT64_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig
from qrnn_serve.model.state import QRNNState, join_state, split_state, state_layout, state_widths
from support.closeness import max_abs
from support.devices import DEVICES
from support.stacks import STACKS, pad, random_rows

ONE_WAY = [name for name, config in STACKS.items() if config.bidirectional == "no"]


def test_state_layout_names_every_column_in_order():
    """Layer by layer, forward then backward, cell then inputs; window 1 has no inputs slice."""
    config = QRNNConfig(
        input_size=3,
        layers=(LayerConfig(hidden_size=5, window=3), LayerConfig(hidden_size=2)),
        bidirectional="per_layer",
    )

    layout = [dataclasses.astuple(part) for part in state_layout(config)]

    assert layout == [
        (0, "forward", "cell", 0, 5),
        (0, "forward", "inputs", 5, 11),
        (0, "backward", "cell", 11, 16),
        (0, "backward", "inputs", 16, 22),
        (1, "forward", "cell", 22, 24),
        (1, "backward", "cell", 24, 26),
    ]


@pytest.mark.parametrize("name", STACKS)
def test_split_and_join_are_inverse(name):
    """The state tensor comes apart and together without change, and its widths fill the layout."""
    widths = state_widths(STACKS[name])
    state = torch.randn(3, sum(widths))

    assert torch.equal(join_state(*split_state(state, widths)), state)
    assert state_layout(STACKS[name])[-1].stop == sum(widths)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(ONE_WAY),
    cuts=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_chunks_with_state_equal_the_whole(name, cuts, seed):
    """However rows are cut, empty chunks too, outputs and final state are those of one call."""
    torch.manual_seed(seed)
    config = STACKS[name]
    module = QRNN.from_config(config, dtype=torch.float64).eval()
    rows = random_rows([sum(chunk[b] for chunk in cuts) for b in range(3)], config.input_size)
    whole, expected = module(pad(rows), module.initial_state(3), lengths=[len(row) for row in rows])

    state, done, outputs = module.initial_state(3), [0, 0, 0], [[], [], []]
    for chunk in cuts:
        parts = [row[at : at + length] for row, at, length in zip(rows, done, chunk, strict=True)]
        output, state = module(pad(parts), state, lengths=chunk)
        for b in range(3):
            outputs[b].append(output[: chunk[b], b])
        done = [at + length for at, length in zip(done, chunk, strict=True)]

    for b, row in enumerate(rows):
        assert max_abs(torch.cat(outputs[b]), whole[: len(row), b]) <= GOLDEN_FLOAT64_MAX_ABS
    for got, wanted in zip(
        [*state.cells, *state.inputs], [*expected.cells, *expected.inputs], strict=True
    ):
        assert max_abs(got, wanted) <= GOLDEN_FLOAT64_MAX_ABS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ONE_WAY)
def test_step_by_step_generation_equals_one_call(name, device):
    """C43: T = 1, B = 1 and 3, fed one timestep at a time, equals one call of T = 7 in float32."""
    config = STACKS[name]
    module = QRNN.from_config(config).to(device).eval()
    for batch in (1, 3):
        x = torch.randn(7, batch, config.input_size, device=device)
        whole, _ = module(x)

        state, steps = module.initial_state(batch), []
        for t in range(7):
            output, state = module(x[t : t + 1], state)
            assert output.shape == (1, batch, config.output_size)
            steps.append(output)

        assert max_abs(torch.cat(steps), whole) <= SAME_ROWS_FLOAT32_MAX_ABS


@pytest.mark.parametrize("name", STACKS)
def test_the_kind_of_state_that_went_in_comes_out(name):
    """None and tensor give a tensor (a list for unequal widths), list a list, QRNNState itself."""
    config = STACKS[name]
    module = QRNN.from_config(config, dtype=torch.float64).eval()
    x = torch.randn(5, 2, config.input_size, dtype=torch.float64)
    equal = len({layer.hidden_size for layer in config.layers}) == 1
    layers, directions = len(config.layers), config.num_directions

    _, from_none = module(x)
    _, from_list = module(x, [t.clone() for t in module.initial_state(2).cells])
    _, from_state = module(x, module.initial_state(2))

    assert isinstance(from_none, torch.Tensor if equal else list)
    assert type(from_list) is list
    assert isinstance(from_state, QRNNState)
    for number, layer in enumerate(config.layers):
        assert from_list[number].shape == (directions, 2, layer.hidden_size)
        assert torch.equal(from_list[number], from_state.cells[number])
    if equal:
        assert from_none.shape == (layers * directions, 2, config.layers[0].hidden_size)
        assert torch.equal(from_none, torch.cat(from_list))
        start = torch.randn_like(from_none)
        _, from_tensor = module(x, start)
        _, again = module(x, [*start.split(directions)])
        assert torch.equal(from_tensor, torch.cat(again))


def test_hidden_is_carried_through_every_row():
    """A hidden state moves the output of its own row only, also at padded batches."""
    module = QRNN.from_config(STACKS["no_bias"], dtype=torch.float64).eval()
    rows = random_rows([4, 2, 0], 3)
    start = torch.randn(2, 3, 6, dtype=torch.float64)
    output, state = module(pad(rows), start, lengths=[4, 2, 0])

    for b, row in enumerate(rows):
        alone, alone_state = module(row.unsqueeze(1), start[:, b : b + 1])
        assert max_abs(output[: len(row), b : b + 1], alone) <= GOLDEN_FLOAT64_MAX_ABS
        assert max_abs(state[:, b : b + 1], alone_state) <= GOLDEN_FLOAT64_MAX_ABS
    assert torch.equal(state[:, 2], start[:, 2])


def test_calls_without_memory_are_bit_identical_in_any_order():
    """C02: the default module keeps nothing: B after A equals B alone, bit for bit."""
    module = QRNN.from_config(STACKS["windows"]).eval()
    a, b = torch.randn(3, 1, 3), torch.randn(3, 1, 3)
    alone, alone_state = copy.deepcopy(module)(b)

    module(a)
    output, state = module(b)

    assert torch.equal(output, alone)
    assert all(torch.equal(x, y) for x, y in zip(state, alone_state, strict=True))


def test_save_prev_x_remembers_until_reset():
    """The compatibility memory continues a sequence, stays out of the state dict, and forgets."""
    module = QRNN(3, 4, window=3, save_prev_x=True, dtype=torch.float64).eval()
    plain = QRNN(3, 4, window=3, dtype=torch.float64).eval()
    plain.load_state_dict(module.state_dict())
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    whole, _ = plain(x)

    first, hidden = module(x[:1])
    second, _ = module(x[1:], hidden)

    assert max_abs(torch.cat([first, second]), whole) <= GOLDEN_FLOAT64_MAX_ABS
    assert set(module.state_dict()) == set(plain.state_dict())
    module.reset()
    assert torch.equal(module(x)[0], whole)


def test_memory_of_another_batch_size_is_an_error_that_names_both():
    """C02: a batch of another size never inherits a stranger's last inputs."""
    module = QRNN(3, 4, window=2, save_prev_x=True)
    module(torch.randn(3, 2, 3))

    with pytest.raises(InputError, match=r"batch size 2 .* has 5.*reset\(\)"):
        module(torch.randn(3, 5, 3))
    module.reset()
    module(torch.randn(3, 5, 3))


def test_memory_holds_no_graph():
    """Training on chunks needs no retain_graph: the memory is cut from the graph."""
    module = QRNN(3, 4, 2, window=2, save_prev_x=True)
    for _ in range(2):
        output, _ = module(torch.randn(3, 2, 3))
        output.sum().backward()


def test_explicit_state_neither_reads_nor_writes_the_memory():
    """A QRNNState passed by the caller is the whole truth."""
    module = QRNN(3, 4, window=2, save_prev_x=True).eval()
    x = torch.randn(3, 2, 3)
    expected, _ = module(x, module.initial_state(2))
    module(torch.randn(3, 2, 3))
    remembered = module.layers[0].previous_inputs

    output, _ = module(x, module.initial_state(2))

    assert torch.equal(output, expected)
    assert module.layers[0].previous_inputs is remembered


def test_layer_keeps_and_forgets_as_the_original():
    """QRNNLayer alone: hidden [B, H] or [1, B, H], state [1, B, H] back, memory until reset."""
    layer = QRNNLayer(3, 4, window=2, save_prev_x=True).double().eval()
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    whole, whole_cell = layer(x)
    layer.reset()

    first, cell = layer(x[:4])
    second, last = layer(x[4:], cell)
    layer.reset()

    assert cell.shape == (1, 2, 4)
    assert max_abs(torch.cat([first, second]), whole) <= GOLDEN_FLOAT64_MAX_ABS
    assert max_abs(last, whole_cell) <= GOLDEN_FLOAT64_MAX_ABS
    layer(x[:4])
    assert torch.equal(layer(x[4:], cell[0])[0], second)


def test_memory_and_two_directions_contradict_each_other():
    """The backward direction has no earlier inputs to remember."""
    with pytest.raises(ConfigError, match=r"save_prev_x.*backward"):
        QRNN(3, 4, window=2, bidirectional=True, save_prev_x=True)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (
            torch.zeros(1, 2, 6),
            r"\[layers \* directions, batch, hidden\] = \[2, 2, 6\], got \[1, 2, 6\]",
        ),
        (torch.zeros(2, 3, 6), r"\[2, 2, 6\], got \[2, 3, 6\]"),
        (torch.zeros(2, 6), r"\[2, 2, 6\], got \[2, 6\]"),
        ([torch.zeros(1, 2, 6)], "2 layers, got 1.*nn.LSTM"),
        (
            [torch.zeros(1, 2, 6), torch.zeros(1, 2, 5)],
            r"hidden\[1\].*\[1, 2, 6\], got \[1, 2, 5\]",
        ),
        (
            QRNNState([torch.zeros(1, 2, 6)] * 2, [torch.zeros(1, 2, 3), torch.zeros(1, 2, 9)]),
            r"state inputs\[1\].*\[1, 2, 6\], got \[1, 2, 9\]",
        ),
    ],
)
def test_state_of_the_wrong_size_is_named(hidden, message):
    """Wrong batch, width, rank and number of tensors: the error gives both sizes."""
    module = QRNN.from_config(STACKS["no_bias"])

    with pytest.raises(InputError, match=message):
        module(torch.randn(4, 2, 3), hidden)


def test_one_tensor_for_unequal_widths_is_refused():
    """Layers of different width cannot share one state tensor; the error says what to pass."""
    module = QRNN.from_config(STACKS["windows"])

    with pytest.raises(InputError, match=r"widths \[5, 6, 4\].*list"):
        module(torch.randn(4, 2, 3), torch.zeros(3, 2, 5))


def test_state_of_another_dtype_is_refused():
    """A float64 state never silently meets a float32 module."""
    module = QRNN.from_config(STACKS["one"])

    with pytest.raises(DTypeError, match=r"hidden: expected torch.float32.*float64"):
        module(torch.randn(4, 2, 4), torch.zeros(1, 2, 4, dtype=torch.float64))


def test_state_can_be_cut_and_moved():
    """QRNNState.detach cuts the graph and .to moves every tensor."""
    module = QRNN.from_config(STACKS["windows"])
    _, state = module(torch.randn(4, 2, 3), module.initial_state(2))

    assert state.cells[0].requires_grad
    assert not any(t.requires_grad for part in state.detach() for t in part)
    assert all(t.device.type == "meta" for part in state.to("meta") for t in part)
