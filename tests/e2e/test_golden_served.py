"""The vectors of the original implementations, from the client through a socket to every engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qrnn_client import AsyncClient
from qrnn_serve import save
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.scorers import load_scorer
from support.closeness import max_abs
from support.exported import write
from support.golden import ENTRIES, STREAM, WHOLE_NAMES, cell_columns, golden_model, initial_state
from support.servers import running_server

MODEL = "sums"


def scorer_of(model, engine, folder):
    """The model in an engine, from a file; proving so many artefacts would take minutes."""
    if engine == "native":
        save(model, folder / "model.pt")
        return load_scorer(folder / "model.pt")
    return load_scorer(write(model, folder, engine)[0], allow_unproven=True)


@pytest.mark.parametrize("engine", ["native", "torchscript", "onnx"])
@pytest.mark.parametrize("name", WHOLE_NAMES)
async def test_served_scores_are_those_of_the_original(name, engine, tmp_path):
    """Outputs and final cells of every vector, with the vector's initial state where it has one."""
    model, x, out, arrays = golden_model(name, torch.float32)
    state = initial_state(model, arrays, len(x), torch.float32)
    states = None if state is None else list(state.numpy())

    async with (
        running_server(scorer_of(model, engine, tmp_path)) as running,
        AsyncClient(running.target) as client,
    ):
        prediction = await client.predict(MODEL, list(x.numpy()), states=states, return_state=True)

    assert prediction.engine == engine
    assert max_abs(np.stack(prediction.outputs), out) <= FLOAT32_MAX_ABS
    for part, cell in zip(cell_columns(model), arrays["h_n"], strict=True):
        got = np.stack(prediction.states)[:, part.start : part.stop]
        assert max_abs(got, cell) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize("engine", ["native", "torchscript", "onnx"])
async def test_served_stream_is_that_of_the_original(engine, tmp_path):
    """Three calls with the state of the reply before are the original's three chunks."""
    model, x, out, arrays = golden_model(STREAM, torch.float32)
    chunk = ENTRIES[STREAM]["T"]
    states = None

    async with (
        running_server(scorer_of(model, engine, tmp_path)) as running,
        AsyncClient(running.target) as client,
    ):
        for number, cells in enumerate(arrays["h_n"]):
            span = slice(number * chunk, (number + 1) * chunk)
            prediction = await client.predict(
                MODEL, list(x[:, span].numpy()), states=states, return_state=True
            )
            states = prediction.states

            assert max_abs(np.stack(prediction.outputs), out[:, span]) <= FLOAT32_MAX_ABS
            for part, cell in zip(cell_columns(model), cells, strict=True):
                got = np.stack(states)[:, part.start : part.stop]
                assert max_abs(got, cell) <= FLOAT32_MAX_ABS
