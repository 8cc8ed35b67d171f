"""Vectors of the original implementations, through the importer and both artefacts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qrnn_export.importer import import_saved
from qrnn_export.options import ImportHints
from qrnn_export.proof import tolerance_of
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.state import state_layout
from support.closeness import max_abs
from support.exported import session, write

GOLDEN = Path(__file__).parents[1] / "golden"
ENTRIES = {entry["file"]: entry for entry in json.loads((GOLDEN / "index.json").read_text())}
NAMES = sorted(name for name in ENTRIES if name.startswith(("sf_", "fa_")))


def hints_for(entry):
    """What the state dict does not hold, from the constructor arguments of the original."""
    fastai = entry["kind"] == "fastai.QRNN"
    if "layers" in entry:
        hidden = tuple(layer["hidden_size"] for layer in entry["layers"])
        window = tuple(layer["window"] for layer in entry["layers"])
    else:
        hidden = (entry["hidden_size"],) * entry["num_layers"]
        first = entry.get("window", 2 if fastai else 1)
        rest = entry.get("window", 1)
        window = (first,) + (rest,) * (entry["num_layers"] - 1)
    return ImportHints(
        hidden_size=hidden,
        window=window,
        zoneout=entry.get("zoneout", 0.0),
        zoneout_rule="fastai" if fastai else "salesforce",
        bidirectional="stacks" if entry.get("bidirectional") else None,
    )


def golden_model(name, dtype):
    """The vector's model as the importer reads it, and its arrays, batch-major."""
    entry, arrays = ENTRIES[name], np.load(GOLDEN / name)
    weights = {
        key.removeprefix("state."): torch.from_numpy(arrays[key]).to(dtype)
        for key in arrays.files
        if key.startswith("state.")
    }
    model = import_saved(weights, hints_for(entry)).model
    batch_major = entry["kind"] == "fastai.QRNN" and entry.get("batch_first", True)
    x, out = (arrays[k] if batch_major else arrays[k].swapaxes(0, 1) for k in ("x", "out"))
    return model, torch.from_numpy(x).to(dtype), out, arrays


def cell_columns(model):
    return [s for s in state_layout(model.config.qrnn) if s.kind == "cell"]


def initial_state(model, arrays, rows, dtype):
    if "h0" not in arrays.files:
        return None
    state = torch.zeros(rows, model.state_size, dtype=dtype)
    for part, cell in zip(cell_columns(model), arrays["h0"], strict=True):
        state[:, part.start : part.stop] = torch.from_numpy(cell)
    return state


def runners(model, directory):
    """All ways to run the artefacts of a model, as functions (input, state) -> arrays."""
    script, graph = write(model, directory, "torchscript", "onnx")
    scripted = torch.jit.load(script)

    def run_script(x, state):
        return scripted(x, None, state)

    def run_packed(x, state):
        offsets = torch.arange(len(x) + 1) * x.shape[1]
        output, state = scripted.forward_packed(x.flatten(0, 1), offsets, state)
        return output.unflatten(0, x.shape[:2]), state

    def run_graph(library):
        loaded = session(graph, library=library)

        def run(x, state):
            feed = {"input": x.numpy(), "lengths": np.full(len(x), x.shape[1], np.int64)}
            if state is not None:
                feed["state"] = np.asarray(state)
            return loaded.run(None, feed)

        return run

    return {
        "forward": run_script,
        "forward_packed": run_packed,
        "custom op": run_graph(True),
        "function body": run_graph(False),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [n for n in NAMES if "stream" not in n])
def test_artefacts_reproduce_the_original(name, dtype, tmp_path):
    """Outputs and final cells of every vector in every way of running an artefact."""
    model, x, out, arrays = golden_model(name, dtype)
    state = initial_state(model, arrays, len(x), dtype)
    tolerance = tolerance_of(model)
    assert dtype == torch.float64 or tolerance == FLOAT32_MAX_ABS

    for way, run in runners(model, tmp_path).items():
        output, state_out = (np.asarray(value) for value in run(x, state))

        assert max_abs(output, out) <= tolerance, way
        for part, cell in zip(cell_columns(model), arrays["h_n"], strict=True):
            assert max_abs(state_out[:, part.start : part.stop], cell) <= tolerance, way


def test_artefacts_reproduce_the_original_stream(tmp_path):
    """Three chunks with cell and previous input carried over in the state tensor."""
    name = "sf_stream_window2.npz"
    model, x, out, arrays = golden_model(name, torch.float32)
    chunk = ENTRIES[name]["T"]

    for way, run in runners(model, tmp_path).items():
        state = None
        for number, cells in enumerate(arrays["h_n"]):
            span = slice(number * chunk, (number + 1) * chunk)
            output, state = run(x[:, span], state)

            assert max_abs(np.asarray(output), out[:, span]) <= FLOAT32_MAX_ABS, way
            for part, cell in zip(cell_columns(model), cells, strict=True):
                columns = np.asarray(state)[:, part.start : part.stop]
                assert max_abs(columns, cell) <= FLOAT32_MAX_ABS, way
