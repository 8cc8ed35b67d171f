"""A scripted model is the eager model: same bits, any sizes, without our model code."""

from __future__ import annotations

import io

import pytest
import torch

from qrnn_serve import SequenceModel
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.devices import DEVICES
from support.whole_models import MODELS, offsets_of, random_input

SIZES = [(3, 5), (1, 1), (2, 1), (1, 7), (4, 0), (0, 4)]


def save_and_load(scripted, device):
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer, map_location=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_scripted_equals_eager(name, device):
    """C50: many B and T, with and without lengths and state, padded and packed, bit for bit."""
    config = MODELS[name]
    model = SequenceModel(config).eval()
    scripted = save_and_load(torch.jit.script(model), device)
    model.to(device)
    for batch, timesteps in SIZES:
        rows = random_input(config, [timesteps] * batch)
        tail = () if config.takes_ids else (config.qrnn.input_size,)
        x = (
            torch.cat([*rows, random_input(config, [0])[0]])
            .view(batch, timesteps, *tail)
            .to(device)
        )
        lengths = torch.randint(0, timesteps + 1, (batch,))
        state = torch.randn(batch, model.state_size, device=device)
        offsets = offsets_of(rows).to(device)
        for arguments in ((x,), (x, lengths), (x, None, state), (x, lengths, state)):
            with torch.inference_mode():
                pairs = zip(scripted(*arguments), model(*arguments), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        packed = (x.flatten(0, 1), offsets, state)
        pairs = zip(scripted.forward_packed(*packed), model.forward_packed(*packed), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_one_scripted_module_takes_any_size_in_any_order():
    """C14: nothing is frozen by the sizes of the first call, and calls leave nothing behind."""
    config = MODELS["windows-none-features-head"]
    model = SequenceModel(config).eval()
    scripted = torch.jit.script(model)
    inputs = [torch.randn(b, t, 3) for b, t in ((2, 9), (5, 1), (1, 30), (2, 9))]

    first = [scripted(x) for x in inputs]
    second = [scripted(x) for x in reversed(inputs)][::-1]

    for x, one, two in zip(inputs, first, second, strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[0], model(x)[0])


def test_remembered_inputs_are_never_exported():
    """C02: what a layer remembered for its caller is in no scripted module."""
    model = SequenceModel(MODELS["windows-none-features-head"])
    for layer in model.qrnn.layers:
        layer.save_prev_x = True
    model.qrnn(torch.randn(3, 2, 3))
    assert model.qrnn.layers[0].previous_inputs is not None

    scripted = torch.jit.script(model.eval())

    assert not any(m._c.hasattr("previous_inputs") for m in scripted.modules())
    x = torch.randn(2, 3, 3)
    assert torch.equal(scripted(x)[0], model(x)[0])


def test_scripted_training_mode_regularises_too():
    """A scripted module in training mode drops what the eager one drops, from the same seed."""
    config = SequenceModelConfig(
        qrnn=QRNNConfig(
            input_size=3,
            layers=(LayerConfig(hidden_size=4, zoneout=0.3, window=2), LayerConfig(hidden_size=4)),
            dropout=0.4,
            weight_drop=0.3,
        )
    )
    model = SequenceModel(config)
    scripted = torch.jit.script(model)
    x = torch.randn(2, 6, 3)

    torch.manual_seed(4)
    expected, _ = model(x)
    torch.manual_seed(4)
    output, _ = scripted(x)

    assert torch.equal(output, expected)
    assert not torch.equal(scripted(x)[0], output)


LOAD = """
import sys
import torch
import qrnn_serve.kernels.ops

folder = sys.argv[1]
cases = torch.load(folder + "/cases.pt", weights_only=True)
for name, (arguments, expected) in cases.items():
    scripted = torch.jit.load(f"{folder}/{name}.ts.pt")
    for got, wanted in zip(scripted(*arguments), expected, strict=True):
        assert torch.equal(got, wanted), name
loaded = [m for m in sys.modules if m.startswith("qrnn_serve.model")]
assert not loaded, loaded
print(len(cases))
"""


def test_a_fresh_process_needs_the_operators_only(tmp_path, run_python_in_parallel):
    """C48: torch and the registered operators load and run the file without the model code."""
    cases = {}
    for name, config in MODELS.items():
        model = SequenceModel(config).eval()
        torch.jit.script(model).save(tmp_path / f"{name}.ts.pt")
        x = torch.stack(random_input(config, [6, 6]))
        arguments = (x, torch.tensor([6, 2]), torch.randn(2, model.state_size))
        with torch.no_grad():
            cases[name] = (arguments, model(*arguments))
    torch.save(cases, tmp_path / "cases.pt")

    run_python_in_parallel(LOAD, [[str(tmp_path)]])
