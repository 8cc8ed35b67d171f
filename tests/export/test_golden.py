"""Vectors of the original implementations, through the importer and both artefacts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qrnn_export.proof import tolerance_of
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.closeness import max_abs
from support.golden import (
    ENTRIES,
    STREAM,
    WHOLE_NAMES,
    cell_columns,
    golden_model,
    initial_state,
)
from support.runners import runners


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", WHOLE_NAMES)
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
    model, x, out, arrays = golden_model(STREAM, torch.float32)
    chunk = ENTRIES[STREAM]["T"]

    for way, run in runners(model, tmp_path).items():
        state = None
        for number, cells in enumerate(arrays["h_n"]):
            span = slice(number * chunk, (number + 1) * chunk)
            output, state = run(x[:, span], state)

            assert max_abs(np.asarray(output), out[:, span]) <= FLOAT32_MAX_ABS, way
            for part, cell in zip(cell_columns(model), cells, strict=True):
                columns = np.asarray(state)[:, part.start : part.stop]
                assert max_abs(columns, cell) <= FLOAT32_MAX_ABS, way
