"""The vectors of the original implementations as models of this project."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from qrnn_export.importer import import_saved
from qrnn_export.options import ImportHints
from qrnn_serve.model.state import state_layout

GOLDEN = Path(__file__).parents[1] / "golden"
ENTRIES = {entry["file"]: entry for entry in json.loads((GOLDEN / "index.json").read_text())}
NAMES = sorted(name for name in ENTRIES if name.startswith(("sf_", "fa_")))
STREAM = "sf_stream_window2.npz"
WHOLE_NAMES = [name for name in NAMES if name != STREAM]


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
    """The vector's model as the importer reads it, its batch-major input and output, its arrays."""
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
    """Where the cells stand in the state tensor, in the order of the original's h_n."""
    return [part for part in state_layout(model.config.qrnn) if part.kind == "cell"]


def initial_state(model, arrays, rows, dtype):
    """The vector's h0 as a state tensor [B, S], or None."""
    if "h0" not in arrays.files:
        return None
    state = torch.zeros(rows, model.state_size, dtype=dtype)
    for part, cell in zip(cell_columns(model), arrays["h0"], strict=True):
        state[:, part.start : part.stop] = torch.from_numpy(cell)
    return state
