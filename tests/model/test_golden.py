"""Every vector of the original salesforce and fastai code is reproduced, gradients included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from support.closeness import max_abs
from support.devices import DEVICES

GOLDEN = Path(__file__).parents[1] / "golden"
ENTRIES = {entry["file"]: entry for entry in json.loads((GOLDEN / "index.json").read_text())}
DTYPES = [
    pytest.param(torch.float64, GOLDEN_FLOAT64_MAX_ABS, id="float64"),
    pytest.param(torch.float32, FLOAT32_MAX_ABS, id="float32"),
]
WHOLE = sorted(name for name in ENTRIES if name.startswith(("sf_", "fa_")) and "stream" not in name)


def build(entry):
    """The module as the entry's constructor arguments say."""
    if entry["kind"] == "torchqrnn.QRNN":
        if "layers" in entry:
            return QRNN(None, None, layers=[QRNNLayer(**layer) for layer in entry["layers"]])
        names = ("window", "output_gate", "zoneout", "dropout", "save_prev_x")
        options = {name: entry[name] for name in names if name in entry}
    else:
        layers = entry["num_layers"]
        options = {
            "batch_first": entry.get("batch_first", True),
            "output_gate": entry.get("output_gate", True),
            "zoneout": entry.get("zoneout", 0.0),
            "window": entry.get("window", [2] + [1] * (layers - 1)),
            "bidirectional": entry.get("bidirectional", False),
            "bidirectional_rule": "stacks",
            "zoneout_rule": "fastai",
        }
    return QRNN(entry["input_size"], entry["hidden_size"], entry["num_layers"], **options)


def load(name, dtype, device):
    """The module with the vector's weights, and its other arrays as tensors."""
    arrays = np.load(GOLDEN / name)
    tensors = {key: torch.from_numpy(arrays[key]).to(device, dtype) for key in arrays.files}
    module = build(ENTRIES[name]).to(device, dtype)
    weights = {k.removeprefix("state."): t for k, t in tensors.items() if k.startswith("state.")}
    module.load_state_dict(weights)
    return module, tensors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("name", WHOLE)
def test_outputs_and_states_are_those_of_the_original(name, dtype, tolerance, device):
    """Output and final state of every whole-sequence vector."""
    module, tensors = load(name, dtype, device)
    module.eval()

    output, state = module(tensors["x"], tensors.get("h0"))

    assert max_abs(output, tensors["out"]) <= tolerance
    assert max_abs(state, tensors["h_n"]) <= tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("name", ["sf_grad.npz", "sf_grad_window2.npz"])
def test_gradients_are_those_of_the_original(name, with_lengths, dtype, tolerance, device):
    """Gradients of input and weights in training mode, dense and packed."""
    module, tensors = load(name, dtype, device)
    x = tensors["x"].requires_grad_()
    lengths = [x.shape[0]] * x.shape[1] if with_lengths else None

    output, _ = module(x, lengths=lengths)
    (output * tensors["grad_out"]).sum().backward()

    assert max_abs(x.grad, tensors["grad_x"]) <= tolerance
    for key, parameter in module.named_parameters():
        assert max_abs(parameter.grad, tensors[f"grad.{key}"]) <= tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("form", ["save_prev_x", "explicit state"])
def test_streaming_is_that_of_the_original(form, dtype, tolerance, device):
    """Three chunks; hidden state and previous input carried in the module or by the caller."""
    module, tensors = load("sf_stream_window2.npz", dtype, device)
    module.eval()
    chunk = ENTRIES["sf_stream_window2.npz"]["T"]
    state = module.initial_state(2) if form == "explicit state" else None

    for number in range(3):
        span = slice(number * chunk, (number + 1) * chunk)
        output, state = module(tensors["x"][span], state)

        cells = torch.cat(state.cells) if form == "explicit state" else state
        assert max_abs(output, tensors["out"][span]) <= tolerance
        assert max_abs(cells, tensors["h_n"][number]) <= tolerance


def test_every_vector_is_used():
    """A vector added to the index is tested here or named as another package's."""
    elsewhere = {name for name in ENTRIES if name.startswith("forget_mult")}

    assert {*WHOLE, "sf_stream_window2.npz"} | elsewhere == set(ENTRIES)
