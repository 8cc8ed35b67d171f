"""Mixed precision: products in the autocast dtype, state in float32; and half-precision models."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve import QRNN, SequenceModel
from qrnn_serve.core.tolerances import HALF_RELATIVE_NORM
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.closeness import relative_norm
from support.devices import DEVICES
from support.stacks import STACKS, pad, random_rows

AUTOCAST = [
    pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="cuda-bfloat16"),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu, id="cuda-float16"),
]


def rounding_bound(dtype, products):
    """Each matrix product rounds its input, its weight and its result."""
    return 3 * products * HALF_RELATIVE_NORM[str(dtype).removeprefix("torch.")]


def rounded(module, dtype):
    """A float64 copy whose weights are the module's, rounded as autocast rounds them."""
    copy = QRNN.from_config(module.config, dtype=torch.float64).eval()
    copy.load_state_dict({k: t.cpu().to(dtype).double() for k, t in module.state_dict().items()})
    return copy


@pytest.mark.parametrize(("device", "dtype"), AUTOCAST)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_autocast_is_near_the_float64_result_of_the_same_rounded_numbers(
    with_lengths, device, dtype
):
    """One layer: output in the autocast dtype, state in float32, both within the half tolerance."""
    config = QRNNConfig(input_size=16, layers=(LayerConfig(hidden_size=24, window=2),))
    module = QRNN.from_config(config, device=device).eval()
    lengths = [40, 7, 1] if with_lengths else None
    x = pad(random_rows([40, 40, 40], 16, torch.float32)).to(device)
    start = module.initial_state(3)
    wide = rounded(module, dtype)
    expected, expected_state = wide(
        x.cpu().to(dtype).double(), wide.initial_state(3), lengths=lengths
    )

    with torch.autocast(device, dtype):
        output, state = module(x, start, lengths=lengths)

    assert output.dtype == dtype
    assert state.cells[0].dtype == state.inputs[0].dtype == torch.float32
    name = str(dtype).removeprefix("torch.")
    assert relative_norm(output, expected) <= HALF_RELATIVE_NORM[name]
    assert relative_norm(state.cells[0], expected_state.cells[0]) <= HALF_RELATIVE_NORM[name]


@pytest.mark.parametrize(("device", "dtype"), AUTOCAST)
@pytest.mark.parametrize("name", STACKS)
def test_training_under_autocast_gives_float32_gradients_near_the_full_ones(name, device, dtype):
    """Every kind of stack trains under autocast, behind a layer that gives it half precision."""
    config = STACKS[name]
    module = QRNN.from_config(config, device=device).eval()
    embed = torch.nn.Linear(config.input_size, config.input_size, device=device)
    x = torch.randn(6, 3, config.input_size, device=device)

    gradients = []
    for enabled in (False, True):
        module.zero_grad()
        with torch.autocast(device, dtype, enabled=enabled):
            output, state = module(embed(x), lengths=[6, 0, 3])
            loss = output.float().square().sum() + sum(cells.sum() for cells in state)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])

    for full, mixed in zip(*gradients, strict=True):
        assert mixed.dtype == torch.float32
        assert relative_norm(mixed, full) <= rounding_bound(dtype, 1 + len(config.layers))


@pytest.mark.parametrize(("device", "dtype"), AUTOCAST)
def test_regularised_training_runs_under_autocast(device, dtype):
    """Zoneout, weight drop and dropout keep dtypes apart as evaluation does."""
    module = QRNN(4, 6, 2, window=2, zoneout=0.2, weight_drop=0.2, dropout=0.2).to(device)

    with torch.autocast(device, dtype):
        output, state = module(torch.randn(5, 2, 4, device=device))
    (output.float().sum() + state.sum()).backward()

    assert output.dtype == dtype
    assert state.dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.any() for p in module.parameters())


@pytest.mark.gpu
def test_gradient_scaler_steps_with_float16():
    """GradScaler and float16: finite gradients, and the weights move."""
    module = QRNN(4, 6, 2, window=2, device="cuda")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

    with torch.autocast("cuda", torch.float16):
        loss = module(torch.randn(5, 2, 4, device="cuda"))[0].float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

    assert all((a != b).any() for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_module_is_near_float64(dtype, device):
    """Weights, input, output and state all in half precision, float32 inside the recurrence."""
    config = QRNNConfig(input_size=16, layers=(LayerConfig(hidden_size=24, window=2),))
    module = QRNN.from_config(config).to(device, dtype).eval()
    x = torch.randn(60, 3, 16).to(device, dtype)
    expected, _ = rounded(module, dtype)(x.cpu().double())

    output, state = module(x)

    assert output.dtype == state.dtype == dtype
    name = str(dtype).removeprefix("torch.")
    assert relative_norm(output, expected) <= HALF_RELATIVE_NORM[name]


def test_whole_model_runs_under_autocast():
    """Embedding, pooling and head under autocast; the state stays as the artefacts carry it."""
    config = SequenceModelConfig(
        qrnn=STACKS["windows"], vocabulary_size=9, pooling="last_max_mean", head_size=4
    )
    model = SequenceModel(config).eval()
    ids, lengths = torch.randint(0, 9, (3, 6)), torch.tensor([6, 0, 2])
    full, full_state = model(ids, lengths)

    with torch.autocast("cpu", torch.bfloat16):
        output, state = model(ids, lengths, torch.zeros(3, model.state_size))

    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    bound = rounding_bound(torch.bfloat16, 1 + len(config.qrnn.layers))
    assert relative_norm(output, full) <= bound
    assert relative_norm(state, full_state) <= bound
