"""QRNN as a drop-in: constructor, shapes, names, both bidirectional rules, and errors that help."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.core.errors import ConfigError, DTypeError, InputError
from qrnn_serve.core.tolerances import (
    FLOAT32_MAX_ABS,
    GOLDEN_FLOAT64_MAX_ABS,
    SAME_ROWS_FLOAT32_MAX_ABS,
)
from qrnn_serve.model.config import LayerConfig, QRNNConfig
from support.closeness import max_abs
from support.devices import DEVICES
from support.stacks import STACKS, pad, random_rows


@pytest.mark.parametrize("name", STACKS)
def test_config_describes_the_stack_completely(name):
    """from_config and .config are inverse, and the weights of one fit the other."""
    module = QRNN.from_config(STACKS[name])
    again = QRNN.from_config(module.config)

    assert module.config == STACKS[name]
    again.load_state_dict(module.state_dict())
    x = torch.randn(4, 2, module.input_size)
    assert torch.equal(again.eval()(x)[0], module.eval()(x)[0])


def test_state_dict_has_the_original_names():
    """Forward layers as in the salesforce class, backward ones as in fastai."""
    module = QRNN(3, 4, 2, bidirectional=True, window=2)

    assert {name: list(t.shape) for name, t in module.state_dict().items()} == {
        "layers.0.linear.weight": [12, 6],
        "layers.0.linear.bias": [12],
        "layers.1.linear.weight": [12, 16],
        "layers.1.linear.bias": [12],
        "layers_bwd.0.linear.weight": [12, 6],
        "layers_bwd.0.linear.bias": [12],
        "layers_bwd.1.linear.weight": [12, 16],
        "layers_bwd.1.linear.bias": [12],
    }
    assert list(QRNN(3, 4, bias=False).state_dict()) == ["layers.0.linear.weight"]


def test_arguments_are_those_of_lstm_and_of_the_original():
    """Positional order of nn.LSTM; widths, windows, gates and zoneout may be lists by layer."""
    module = QRNN(5, 6, 3, False, True, 0.1, True)
    listed = QRNN(5, [6, 7], window=[2, 1], output_gate=[True, False], zoneout=[0.0, 0.5])

    assert module.config == QRNNConfig(
        input_size=5,
        layers=(LayerConfig(hidden_size=6),) * 3,
        bidirectional="per_layer",
        dropout=0.1,
        bias=False,
    )
    assert module.batch_first
    assert listed.config.layers == (
        LayerConfig(hidden_size=6, window=2),
        LayerConfig(hidden_size=7, output_gate=False, zoneout=0.5),
    )
    module.flatten_parameters()


def test_ready_made_layers_are_used_as_they_are():
    """The original's `layers` argument: the same objects, in order, with their own settings."""
    layers = [QRNNLayer(3, 4, window=2, zoneout=0.1), QRNNLayer(4, 5, output_gate=False)]

    module = QRNN(None, None, layers=layers, dropout=0.2)

    assert list(module.layers) == layers
    assert module.config == QRNNConfig(
        input_size=3,
        layers=(
            LayerConfig(hidden_size=4, window=2, zoneout=0.1),
            LayerConfig(hidden_size=5, output_gate=False),
        ),
        dropout=0.2,
    )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, [4, 5], 3), {}, "hidden_size.*3 layers, got 2"),
        ((3, 4, 2), {"window": [1]}, "window.*2 layers, got 1"),
        ((3, 4, 0), {}, "num_layers"),
        ((None, None), {}, "input_size and hidden_size"),
        ((3, 4), {"dropout": 2.0}, "dropout"),
        ((3, 4), {"bidirectional": True, "bidirectional_rule": "sum"}, "bidirectional_rule.*sum"),
        ((3, 4), {"zoneout_rule": "paper"}, "zoneout_rule.*paper"),
        ((None, None), {"layers": []}, "layers: expected at least one"),
        ((7, None), {"layers": [QRNNLayer(3, 4)]}, "input_size: got 7.*3"),
        ((None, 9), {"layers": [QRNNLayer(3, 4)]}, "hidden_size: got 9"),
        ((None, None), {"layers": [QRNNLayer(3, 4), QRNNLayer(3, 4)]}, r"layers\[1\].*gets 4"),
        ((None, None), {"layers": [QRNNLayer(3, reverse=True)]}, "bidirectional=True"),
        ((None, None), {"layers": [QRNNLayer(3)], "window": 2}, "window: ready-made"),
        (
            (None, None),
            {"layers": [QRNNLayer(3), QRNNLayer(3, bias=False)]},
            r"layers\[1\].*zoneout_rule, weight_drop and bias",
        ),
    ],
)
def test_contradictions_in_the_arguments_are_named(arguments, options, message):
    """No setting is guessed or ignored."""
    with pytest.raises(ConfigError, match=message):
        QRNN(*arguments, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STACKS)
def test_one_row_keeps_its_batch_axis(name, device):
    """C44: the rank never depends on size, and B = 1 equals the matching row of B = 2."""
    module = QRNN.from_config(STACKS[name], device=device).eval()
    x = torch.randn(3, 2, module.input_size, device=device)

    both, both_state = module(x)
    one, state = module(x[:, :1])

    assert one.shape == (3, 1, module.config.output_size)
    assert max_abs(one, both[:, :1]) <= SAME_ROWS_FLOAT32_MAX_ABS
    for cells, both_cells in zip(state, both_state, strict=True):
        got, wanted = (t if t.dim() == 3 else t.unsqueeze(0) for t in (cells, both_cells))
        assert got.shape[1] == 1
        assert max_abs(got, wanted[:, :1]) <= SAME_ROWS_FLOAT32_MAX_ABS


def test_smallest_model_keeps_its_axes():
    """C44: H = 1, B = 1, T = 1."""
    output, state = QRNN(1, 1)(torch.randn(1, 1, 1))

    assert output.shape == (1, 1, 1)
    assert state.shape == (1, 1, 1)


@pytest.mark.parametrize(("input_size", "sizes"), [(3, [5, 5]), (4, [6, 6, 4]), (10, [31, 33, 10])])
def test_widths_may_differ(input_size, sizes):
    """C46: input unlike hidden, unequal layers; the list of states names each layer's width."""
    module = QRNN(input_size, sizes)

    output, state = module(torch.randn(4, 2, input_size))

    assert output.shape == (4, 2, sizes[-1])
    shapes = [list(cells.shape) for cells in state]
    if len(set(sizes)) > 1:
        assert shapes == [[1, 2, size] for size in sizes]
    else:
        assert state.shape == (len(sizes), 2, sizes[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [None, [3, 5]])
@pytest.mark.parametrize("rule", ["per_layer", "stacks"])
def test_reversed_input_with_swapped_directions_swaps_the_outputs(rule, lengths, device):
    """C47: two layers with windows, both rules; a row is reversed within its own length.

    Exact but for the matrix product, which adds the swapped columns in another order.
    """
    options = {"bidirectional": True, "bidirectional_rule": rule, "window": [2, 3]}
    module = QRNN(3, 4, 2, **options, dtype=torch.float64, device=device).eval()
    swapped = QRNN(3, 4, 2, **options, dtype=torch.float64, device=device).eval()
    swapped.load_state_dict(swap_directions(module.state_dict(), rule))
    rows = [row.to(device) for row in random_rows(lengths or [5, 5], 3)]

    output, state = module(pad(rows), lengths=lengths)
    mirrored, mirrored_state = swapped(pad([row.flip(0) for row in rows]), lengths=lengths)

    for b, row in enumerate(rows):
        back = mirrored[: len(row), b].flip(0)
        back = torch.cat([back[:, 4:], back[:, :4]], dim=1)
        assert max_abs(back, output[: len(row), b]) <= GOLDEN_FLOAT64_MAX_ABS
    assert max_abs(mirrored_state[[1, 0, 3, 2]], state) <= GOLDEN_FLOAT64_MAX_ABS


def swap_directions(weights, rule):
    """Forward weights to backward layers and the other way round.

    Under the rule that joins after each layer, the second layer sees both directions, forward
    first: its columns are swapped too.
    """
    swapped = {}
    for name, tensor in weights.items():
        other = name.replace("layers.", "layers_bwd.")
        other = other if other != name else name.replace("layers_bwd.", "layers.")
        columns = tensor
        if rule == "per_layer" and name.endswith("1.linear.weight"):
            columns = tensor.view(len(tensor), -1, 2, 4).flip(2).reshape(tensor.shape)
        swapped[other] = columns
    return swapped


@pytest.mark.parametrize("name", STACKS)
def test_unbatched_input_is_one_row(name):
    """[T, I] gives [T, D * H] and a state without the batch axis, and takes such a state."""
    module = QRNN.from_config(STACKS[name], dtype=torch.float64).eval()
    x = torch.randn(5, module.input_size, dtype=torch.float64)
    expected, expected_state = module(x.unsqueeze(1))

    output, state = module(x)
    again, _ = module(x, state)
    expected_again, _ = module(x.unsqueeze(1), expected_state)

    assert torch.equal(output, expected.squeeze(1))
    assert torch.equal(again, expected_again.squeeze(1))
    for cells, expected_cells in zip(state, expected_state, strict=True):
        assert max_abs(cells, expected_cells.squeeze(-2)) == 0.0


@pytest.mark.parametrize("batch_first", [False, True])
def test_strided_input_is_read_as_it_is(batch_first):
    """A transposed or sliced view gives what its contiguous copy gives."""
    module = QRNN(3, 4, window=2, batch_first=batch_first).eval()
    wide = torch.randn(3, 9, 8).permute(2, 1, 0)[1:7:2, ::2]

    for lengths in (None, [1] * wide.shape[0 if batch_first else 1]):
        output, _ = module(wide, lengths=lengths)
        assert torch.equal(output, module(wide.contiguous(), lengths=lengths)[0])


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: torch.randn(4, 2, 5), {}, InputError, r"width 3.*\[time, batch, input\], got 5"),
        (
            lambda: torch.randn(3),
            {},
            InputError,
            r"expected \[time, batch, input\] or one sequence",
        ),
        (lambda: torch.randn(1, 4, 2, 3), {}, InputError, r"shape \[1, 4, 2, 3\]"),
        (lambda: torch.randn(4, 2, 3).double(), {}, DTypeError, "expected torch.float32.*float64"),
        (lambda: torch.zeros(4, 2, 3).long(), {}, DTypeError, "got torch.int64"),
        (
            lambda: torch.randn(4, 2, 3, device="meta"),
            {},
            InputError,
            "on meta and the module on cpu",
        ),
        (lambda: torch.randn(4, 2, 3), {"lengths": [4]}, InputError, r"\[2\], got shape \[1\]"),
        (
            lambda: torch.randn(4, 2, 3),
            {"lengths": [4, 5]},
            InputError,
            "got 5.*4 timesteps.*batch_first",
        ),
        (lambda: torch.randn(4, 2, 3), {"lengths": [4, -1]}, InputError, "0 or more.*-1"),
        (lambda: torch.randn(4, 2, 3), {"lengths": [4.0, 1.0]}, DTypeError, "expected integers"),
        (lambda: torch.randn(4, 3), {"lengths": [4]}, InputError, "unbatched.*leave it out"),
    ],
)
def test_wrong_input_is_named(make, options, error, message):
    """Wrong width, rank, dtype, device and lengths: what was expected and what came."""
    with pytest.raises(error, match=message):
        QRNN(3, 4)(make(), **options)


def test_lengths_beside_a_packed_sequence_are_refused():
    """A PackedSequence brings its own lengths."""
    packed = nn.utils.rnn.pack_sequence([torch.randn(2, 3)])

    with pytest.raises(InputError, match="PackedSequence brings its own"):
        QRNN(3, 4)(packed, lengths=[2])


def test_use_cuda_is_reported_once_when_it_contradicts_the_device():
    """Old code that asks for the GPU kernel on a CPU module is told, once, and goes on."""
    x = torch.randn(4, 2, 3)
    told = [
        QRNN(3, 4, use_cuda=True),
        QRNNLayer(3, 4, use_cuda=True),
        QRNN(None, None, layers=[QRNNLayer(3, 4, use_cuda=True)]),
    ]

    for module in told:
        with pytest.warns(UserWarning, match="use_cuda=True.*the module is on cpu") as caught:
            module(x)
        assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in told:
            module(x)
        QRNN(3, 4, use_cuda=False)(x)
        QRNN(3, 4)(x)


def test_deepcopy_is_independent():
    """A copy computes the same and shares no weight."""
    module = QRNN.from_config(STACKS["joined"]).eval()
    copied = copy.deepcopy(module)
    x = torch.randn(4, 2, 3)

    assert torch.equal(copied(x)[0], module(x)[0])
    with torch.no_grad():
        copied.layers[0].linear.weight.add_(1)
    assert max_abs(copied(x)[0], module(x)[0]) > 0.01


def test_module_moves_between_dtypes():
    """.double() and .float() move weights and the fresh state with them."""
    module = QRNN.from_config(STACKS["windows"]).eval()
    x = torch.randn(4, 2, 3)
    single, _ = module(x)

    double, state = module.double()(x.double())

    assert state[0].dtype == torch.float64
    assert max_abs(single, double) <= FLOAT32_MAX_ABS
    assert module.initial_state(2).cells[0].dtype == torch.float64


def test_gradients_of_unused_timesteps_do_not_leak():
    """The output at t depends on inputs up to t only: the window looks back, not ahead."""
    module = QRNN(3, 4, 2, window=3, dtype=torch.float64)
    x = torch.randn(6, 1, 3, dtype=torch.float64, requires_grad=True)

    module(x)[0][3].sum().backward()

    assert torch.equal(x.grad[4:], torch.zeros(2, 1, 3, dtype=torch.float64))
    assert (x.grad[:4].abs().sum(dim=(1, 2)) > GOLDEN_FLOAT64_MAX_ABS).all()
