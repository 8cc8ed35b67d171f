"""C53: gradients are right for every kind of layer and stack, dense and packed, T = 1 and 0 too."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.model.state import QRNNState
from support.devices import DEVICES
from support.stacks import STACKS, pad, random_rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_hidden", [False, True])
@pytest.mark.parametrize("output_gate", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("timesteps", [1, 2, 4])
def test_layer_gradcheck(timesteps, window, output_gate, with_hidden, device):
    """Finite differences agree for input, hidden state and weights."""
    layer = QRNNLayer(2, 3, window=window, output_gate=output_gate).to(device, torch.float64)
    x = torch.randn(timesteps, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    hidden = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, hidden, *weights):
        arguments = (x, hidden) if with_hidden else (x,)
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), arguments)

    assert torch.autograd.gradcheck(call, (x, hidden, *layer.parameters()))


@pytest.mark.parametrize("name", STACKS)
def test_stack_gradcheck_with_lengths_and_explicit_state(name):
    """Finite differences agree through packing, windows, both directions and the carried state."""
    config = STACKS[name]
    module = QRNN.from_config(config, dtype=torch.float64).eval()
    lengths = [3, 0, 1, 2]
    x = pad(random_rows(lengths, config.input_size)).clone().requires_grad_()
    start = module.initial_state(4)
    layers = len(config.layers)
    flat = [torch.randn_like(t).requires_grad_() for t in [*start.cells, *start.inputs]]

    def call(x, *flat):
        state = QRNNState(list(flat[:layers]), list(flat[layers:]))
        output, state = module(x, state, lengths=lengths)
        return (output, *state.cells, *state.inputs)

    # Random projections: a full Jacobian takes a minute of small calls.
    assert torch.autograd.gradcheck(call, (x, *flat), fast_mode=True)


@pytest.mark.parametrize("name", ["windows", "joined", "stacks"])
def test_no_timesteps_pass_the_state_and_its_gradient_through(name):
    """T = 0: empty output, the state comes back with gradient 1, and no rows is fine too."""
    config = STACKS[name]
    module = QRNN.from_config(config, dtype=torch.float64)
    start = QRNNState(
        [torch.randn_like(t).requires_grad_() for t in module.initial_state(2).cells],
        [torch.randn_like(t).requires_grad_() for t in module.initial_state(2).inputs],
    )
    x = torch.zeros(0, 2, config.input_size, dtype=torch.float64)

    output, state = module(x, start)
    sum(t.sum() for part in state for t in part).backward()
    nobody, _ = module(torch.zeros(4, 0, config.input_size, dtype=torch.float64))

    assert output.shape == (0, 2, config.output_size)
    assert nobody.shape == (4, 0, config.output_size)
    for got, given in zip(
        [*state.cells, *state.inputs], [*start.cells, *start.inputs], strict=True
    ):
        assert torch.equal(got, given)
        if given.numel():
            assert torch.equal(given.grad, torch.ones_like(given))


def test_training_lowers_the_loss():
    """A stack with every kind of regularisation learns to repeat its input of two steps before."""
    module = QRNN(
        4, 24, 2, window=[3, 1], zoneout=0.05, dropout=0.05, weight_drop=0.05, output_gate=True
    )
    head = torch.nn.Linear(24, 4)
    optimizer = torch.optim.Adam([*module.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(60):
        x = torch.randn(12, 16, 4)
        loss = (head(module(x)[0])[2:] - x[:-2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0] / 3
