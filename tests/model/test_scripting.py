"""A scripted model is the eager model: same bits, any sizes, without our model code."""

import io

import pytest
import torch
from torch import nn

from qrnn_serve import QRNN, QRNNLayer, SequenceModel
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
        tail = config.timestep_shape
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


@pytest.mark.gpu
@pytest.mark.parametrize("first", SIZES)
def test_any_size_may_come_first(first):
    """TorchScript compiles for the sizes of the first calls, on a GPU with operators fused."""
    device = "cuda"
    for name in MODELS:
        config = MODELS[name]
        model = SequenceModel(config).eval().to(device)
        scripted = save_and_load(torch.jit.script(model), device)
        for batch, timesteps in (first, first, first, first, (3, 4)):
            rows = random_input(config, [timesteps] * batch) or random_input(config, [0])
            x = torch.stack(rows)[:batch].to(device)
            with torch.inference_mode():
                pairs = zip(scripted(x), model(x), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


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


class Tagger(nn.Module):
    """A user's module: a QRNN called as nn.LSTM would be."""

    def __init__(self, qrnn):
        super().__init__()
        self.qrnn = qrnn
        self.decoder = nn.Linear(qrnn.config.output_size, 2).double()

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, hidden = self.qrnn(x, hidden, lengths)
        return self.decoder(output), hidden


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("rule", ["no", "per_layer", "stacks"])
def test_a_users_module_around_a_stack_can_be_scripted(rule, batch_first):
    """C50: with and without hidden state and lengths, scripted equals eager bit for bit."""
    qrnn = QRNN(
        3,
        4,
        2,
        batch_first=batch_first,
        bidirectional=rule != "no",
        bidirectional_rule="per_layer" if rule == "no" else rule,
        window=[2, 3],
        dtype=torch.float64,
    )
    module = Tagger(qrnn).eval()
    scripted = save_and_load(torch.jit.script(module), "cpu")
    hidden = torch.randn(2 * qrnn.num_directions, 5, 4, dtype=torch.float64)
    lengths = torch.tensor([3, 0, 1, 6, 2])
    x = torch.randn((5, 6, 3) if batch_first else (6, 5, 3), dtype=torch.float64)

    for arguments in (
        (x, None, None),
        (x, hidden, None),
        (x, None, lengths),
        (x, hidden, lengths),
    ):
        pairs = zip(scripted(*arguments), module(*arguments), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_layer_alone_can_be_scripted():
    """C50: QRNNLayer with and without hidden state and lengths."""
    layer = QRNNLayer(3, 4, window=2).eval()
    scripted = torch.jit.script(layer)
    x, hidden, lengths = torch.randn(6, 2, 3), torch.randn(1, 2, 4), torch.tensor([6, 1])

    for arguments in ((x,), (x, hidden), (x, hidden[0]), (x, None, lengths)):
        pairs = zip(scripted(*arguments), layer(*arguments), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            QRNN(3, 4, window=2, save_prev_x=True),
            (torch.randn(2, 1, 3),),
            "save_prev_x.*keeps nothing",
        ),
        (QRNNLayer(3, 4, True, window=2), (torch.randn(2, 1, 3),), "save_prev_x.*keeps nothing"),
        (QRNN(3, [4, 5]), (torch.randn(2, 1, 3),), r"widths \[4, 5\]"),
        (QRNN(3, 4), (torch.randn(2, 3),), r"\[time, batch, 3\].*got shape \[2, 3\]"),
        (QRNNLayer(3, 4), (torch.randn(2, 3),), r"\[time, batch, 3\], got shape \[2, 3\]"),
        (
            QRNNLayer(3, 4),
            (torch.randn(2, 2, 3), torch.zeros(4, 2)),
            r"expected \[2, 4\], got \[4, 2\]",
        ),
        (
            QRNN(3, 4),
            (torch.randn(2, 1, 3), torch.zeros(1, 2, 4)),
            r"expected \[1, 1, 4\], got \[1, 2, 4\]",
        ),
    ],
)
def test_what_a_scripted_stack_cannot_do_is_said(module, arguments, message):
    """Memory between calls, unequal widths, unbatched input and wrong states, by name."""
    scripted = torch.jit.script(module)

    with pytest.raises(torch.jit.Error, match=message):
        scripted(*arguments)


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
