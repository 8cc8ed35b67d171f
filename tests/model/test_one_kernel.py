"""A layer uses one kernel only where the rule says so, and the numbers do not depend on it."""

from __future__ import annotations

import copy

import pytest
import torch

from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.core.tolerances import HALF_RELATIVE_NORM
from qrnn_serve.kernels import cuda_layer
from qrnn_serve.model.window import window_carried, window_columns

TOLERANCE = HALF_RELATIVE_NORM["bfloat16"]

hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != cuda_layer.ARCHITECTURE,
        reason="needs a GPU of compute capability 9.0",
    ),
]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lags", [0, 1, 3])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 1, 1], [0, 0, 0], [4, 0, 2, 1, 9]], ids=str)
def test_window_carried_is_the_second_result_of_window_columns(lengths, lags, reverse):
    """Also for sequences shorter than the window."""
    packed = len(lengths) > 3
    values = torch.randn(sum(lengths), 2) if packed else torch.randn(lengths[0], 3, 2)
    offsets = torch.tensor([0, *lengths]).cumsum(0) if packed else None
    previous = torch.randn(len(lengths), lags, 2)

    arguments = (values, offsets, previous, lags + 1, reverse)

    carried = window_carried(*arguments)

    assert torch.equal(carried, window_columns(*arguments)[1])


def test_kernels_of_a_layer_on_the_cpu():
    """The layer says which kernels it uses, and why."""
    layer = QRNNLayer(8, 4)
    call = (torch.zeros(3, 2, 8), None, torch.zeros(2, 4))

    assert "the layer is in training" in str(layer.kernels(*call))
    assert "CUDA devices only, not for cpu" in str(layer.eval().kernels(*call))
    layer.linear.register_forward_hook(lambda module, given, output: output)
    assert "has hooks" in str(layer.kernels(*call))
    layer = QRNNLayer(8, 4, output_gate=False).eval()
    assert "with an output gate" in str(layer.kernels(*call))


def _relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=hopper)])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("uneven", [False, True], ids=["dense", "uneven"])
def test_a_half_precision_stack_matches_float64(device, uneven, window):
    """Outputs and carried state in both directions; on a Hopper GPU each layer is one kernel."""
    stack = QRNN(160, 128, num_layers=1, window=window, bidirectional=True).eval()
    stack = stack.to(device, torch.bfloat16)
    x = torch.randn(512, 64, 160, device=device).bfloat16()
    lengths = torch.randint(1, 513, (64,)) if uneven else None
    cell = torch.zeros(64, 128, device=device).bfloat16()
    wide = copy.deepcopy(stack).double()

    with torch.inference_mode():
        choice = stack.layers[0].kernels(x, None, cell)
        output, state = stack(x, stack.initial_state(64), lengths)
        expected, expected_state = wide(x.double(), wide.initial_state(64), lengths)

    assert (choice.plan is not None) == (device == "cuda"), str(choice)
    assert _relative(output, expected) <= TOLERANCE
    assert _relative(state.cells[0], expected_state.cells[0]) <= TOLERANCE
    assert torch.equal(state.inputs[0].double(), expected_state.inputs[0])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=hopper)])
def test_gradients_take_two_kernels(device):
    """Evaluation with gradients, and unknown lengths, do not use the kernel without a gradient."""
    layer = QRNNLayer(64, 64).to(device, torch.bfloat16).eval()
    x = torch.randn(512, 256, 64, device=device).bfloat16()
    cell = torch.zeros(256, 64, device=device).bfloat16()

    layer(x)[0].float().sum().backward()

    assert layer.linear.weight.grad is not None
    assert "no gradient" in str(layer.kernels(x, None, cell))
    with torch.inference_mode():
        offsets = torch.arange(257, device=device) * 512
        assert "is not known" in str(layer.kernels(x.flatten(0, 1), offsets, cell))
        assert layer.kernels(x, None, cell).plan is not None
