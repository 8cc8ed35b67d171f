"""Gate order and orientation, zoneout, weight drop and dropout of the layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.core.errors import ConfigError, InputError
from qrnn_serve.core.tolerances import GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.kernels import reference
from support.closeness import max_abs
from support.devices import DEVICES

RULES = ["salesforce", "fastai"]


def logit(p):
    return math.log(p / (1 - p))


def constant_layer(z, f, o=None, **options):
    """A layer of one channel whose gates are constants, whatever its input."""
    layer = QRNNLayer(1, 1, output_gate=o is not None, **options).double().eval()
    with torch.no_grad():
        layer.linear.weight.zero_()
        gates = [math.atanh(z), logit(f)] + ([] if o is None else [logit(o)])
        layer.linear.bias.copy_(torch.tensor(gates, dtype=torch.float64))
    return layer


def test_the_forget_gate_multiplies_the_new_value():
    """C08: rows Z, F, O, and h = f * x + (1 - f) * h_prev: 0.45 then 0.4625, not the paper's."""
    layer = constant_layer(z=0.5, f=0.5)
    start = torch.full((1, 1), 0.4, dtype=torch.float64)

    output, cell = layer(torch.zeros(2, 1, 1, dtype=torch.float64), start)
    low, _ = constant_layer(z=0.5, f=0.25)(torch.zeros(1, 1, 1, dtype=torch.float64), start)
    gated, gated_cell = constant_layer(z=0.5, f=0.25, o=0.2)(
        torch.zeros(1, 1, 1, dtype=torch.float64), start
    )

    assert output.flatten().tolist() == pytest.approx([0.45, 0.475], abs=GOLDEN_FLOAT64_MAX_ABS)
    assert cell.item() == pytest.approx(0.475, abs=GOLDEN_FLOAT64_MAX_ABS)
    assert low.item() == pytest.approx(0.25 * 0.5 + 0.75 * 0.4, abs=GOLDEN_FLOAT64_MAX_ABS)
    assert gated.item() == pytest.approx(0.2 * 0.425, abs=GOLDEN_FLOAT64_MAX_ABS)
    assert gated_cell.item() == pytest.approx(0.425, abs=GOLDEN_FLOAT64_MAX_ABS)


@pytest.mark.parametrize(
    ("rule", "zoneout", "effective"),
    [
        ("salesforce", 0.0, 0.8),
        ("salesforce", 0.25, 0.6),
        ("salesforce", 1.0, 0.0),
        ("fastai", 0.0, 0.8),
        ("fastai", 0.25, 0.8),
        ("fastai", 1.0, 0.8),
    ],
)
def test_zoneout_when_evaluating_follows_its_rule_once(rule, zoneout, effective):
    """C09: with p 0.25, f 0.8 becomes 0.6 (never 0.45) under one rule and stays under the other."""
    layer = constant_layer(z=0.5, f=0.8, zoneout=zoneout, zoneout_rule=rule)
    x = torch.zeros(1, 1, 1, dtype=torch.float64)
    start = torch.full((1, 1), 0.4, dtype=torch.float64)

    for _ in range(2):
        output, _ = layer(x, start)

        assert output.item() == pytest.approx(
            effective * 0.5 + (1 - effective) * 0.4, abs=GOLDEN_FLOAT64_MAX_ABS
        )
    assert x.item() == 0.0
    assert start.item() == 0.4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("zoneout", [0.0, 0.25, 1.0])
def test_zoneout_in_training_drops_that_share_of_gates(zoneout, rule):
    """Dropped gates keep the old state exactly; kept ones are f, or f / (1 - p) as in fastai."""
    layer = constant_layer(z=0.5, f=0.6, zoneout=zoneout, zoneout_rule=rule).train()
    start = torch.full((20_000, 1), 0.25, dtype=torch.float64)

    output, _ = layer(torch.zeros(1, 20_000, 1, dtype=torch.float64), start)

    f = 0.6 / (1 - zoneout) if rule == "fastai" and zoneout < 1 else 0.6
    dropped = output == 0.25
    kept = output[~dropped]
    assert max_abs(kept, torch.full_like(kept, f * 0.5 + (1 - f) * 0.25)) <= GOLDEN_FLOAT64_MAX_ABS
    # Four standard deviations of the share.
    assert abs(dropped.double().mean().item() - zoneout) <= 4 * math.sqrt(0.25 / 20_000)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("output_gate", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_zoneout_in_training_runs_the_recurrence_on_masked_gates(
    rule, packed, reverse, output_gate, device
):
    """With the mask drawn again from the same seed, the reference gives the same numbers."""
    layer = QRNNLayer(
        3, 4, zoneout=0.3, zoneout_rule=rule, reverse=reverse, output_gate=output_gate
    ).to(device, torch.float64)
    shape = (9, 3) if packed else (5, 2, 3)
    batch = 4 if packed else 2
    offsets = torch.tensor([0, 4, 4, 5, 9], device=device) if packed else None
    values = torch.randn(shape, dtype=torch.float64, device=device)
    cell = torch.randn(batch, 4, dtype=torch.float64, device=device, requires_grad=True)
    nothing = values.new_zeros(batch, 0, 3)

    torch.manual_seed(7)
    output, last, _ = layer.run(values, offsets, cell, nothing)
    torch.manual_seed(7)
    gates = layer.linear(values).split(4, dim=-1)
    mask = torch.empty_like(gates[1]).bernoulli_(0.7) / (0.7 if rule == "fastai" else 1.0)
    cells = reference.forget_mult(
        gates[1].sigmoid() * mask, gates[0].tanh(), cell, offsets, reverse
    )
    expected = gates[2].sigmoid() * cells if output_gate else cells
    ends = ([0, 0, 4, 5] if reverse else [3, 0, 4, 8]) if packed else (0 if reverse else -1)
    expected_last = cells[ends].clone()
    if packed:
        expected_last[1] = cell[1]

    assert max_abs(output, expected) <= GOLDEN_FLOAT64_MAX_ABS
    assert max_abs(last, expected_last) <= GOLDEN_FLOAT64_MAX_ABS
    inputs = [cell, *layer.parameters()]
    got = torch.autograd.grad(output.sum() + 2 * last.sum(), inputs)
    wanted = torch.autograd.grad(expected.sum() + 2 * expected_last.sum(), inputs)
    assert all(max_abs(a, b) <= GOLDEN_FLOAT64_MAX_ABS for a, b in zip(got, wanted, strict=True))


def test_weight_drop_in_training_drops_entries_of_the_weight_only():
    """The same seed gives the same dropped weight; its gradient is 0 where entries were dropped."""
    layer = QRNNLayer(6, 50, window=2, weight_drop=0.4).double()
    plain = QRNNLayer(6, 50, window=2).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 2, 6, dtype=torch.float64)

    torch.manual_seed(3)
    output, _ = layer(x)
    torch.manual_seed(3)
    with torch.no_grad():
        dropped = F.dropout(layer.linear.weight, 0.4, training=True)
        plain.linear.weight.copy_(dropped)
    output.sum().backward()

    assert torch.equal(output, plain(x)[0])
    zeros = dropped == 0
    assert (layer.linear.weight.grad[zeros] == 0).all()
    assert (layer.linear.weight.grad[~zeros] != 0).any()
    assert abs(zeros.double().mean().item() - 0.4) <= 4 * math.sqrt(0.24 / zeros.numel())


def test_weight_drop_leaves_no_trace_in_state_dict_or_evaluation():
    """C07: after training steps the state dict holds the true weight under its plain name."""
    module = QRNN(6, 5, weight_drop=0.5)
    before = module.layers[0].linear.weight.detach().clone()
    plain = QRNN(6, 5).eval()
    for _ in range(3):
        module(torch.randn(5, 2, 6))
    plain.load_state_dict(module.state_dict())
    x = torch.randn(5, 2, 6)

    assert sorted(module.state_dict()) == ["layers.0.linear.bias", "layers.0.linear.weight"]
    assert torch.equal(module.state_dict()["layers.0.linear.weight"], before)
    assert torch.equal(module.eval()(x)[0], plain(x)[0])


@pytest.mark.parametrize("rule", ["no", "per_layer", "stacks"])
def test_dropout_acts_between_layers_and_in_training_only(rule):
    """With the masks drawn again from the same seed, layer by layer gives the same output."""
    module = QRNN(
        3,
        4,
        2,
        dropout=0.5,
        bidirectional=rule != "no",
        bidirectional_rule="per_layer" if rule == "no" else rule,
        dtype=torch.float64,
    )
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    ahead, back = module.layers, module.layers_bwd

    torch.manual_seed(11)
    output, _ = module(x)
    torch.manual_seed(11)
    if rule == "per_layer":
        joined = F.dropout(torch.cat([ahead[0](x)[0], back[0](x)[0]], 2), 0.5)
        expected = torch.cat([ahead[1](joined)[0], back[1](joined)[0]], 2)
    else:
        expected = ahead[1](F.dropout(ahead[0](x)[0], 0.5))[0]
        if rule == "stacks":
            other = back[1](F.dropout(back[0](x)[0], 0.5))[0]
            expected = torch.cat([expected, other], 2)

    assert torch.equal(output, expected)
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window"),
        ({"zoneout": 1.5}, "zoneout"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"input_size": 0}, "input_size"),
        ({"weight_drop": 1.0}, "weight_drop"),
        ({"zoneout_rule": "other"}, "zoneout_rule.*other"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    """A layer refuses what it cannot be, by the name of the setting."""
    with pytest.raises(ConfigError, match=message):
        QRNNLayer(**{"input_size": 3, **options})


def test_hidden_size_defaults_to_the_input_size():
    """As in the salesforce class."""
    assert QRNNLayer(7).hidden_size == 7


def test_layer_takes_lengths_and_unbatched_input():
    """QRNNLayer masks rows itself, and takes one sequence [T, I] with hidden [H]."""
    layer = QRNNLayer(3, 4, window=2).double().eval()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    start = torch.randn(2, 4, dtype=torch.float64)

    output, cell = layer(x, start, lengths=[5, 2])
    alone, alone_cell = layer(x[:2, 1], start[1])

    assert max_abs(output[:2, 1], alone) <= GOLDEN_FLOAT64_MAX_ABS
    assert max_abs(cell[:, 1], alone_cell.reshape(1, 4)) <= GOLDEN_FLOAT64_MAX_ABS
    assert torch.equal(output[2:, 1], torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(InputError, match=r"\[2, 4\] or \[1, 2, 4\], got \[3, 4\]"):
        layer(x, torch.zeros(3, 4, dtype=torch.float64))
