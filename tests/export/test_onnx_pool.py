"""ai.qrnn::FoPool: its body in standard operators, in ONNX Runtime and in the onnx evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from qrnn_export.onnx_pool import POOL_OP
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.kernels import reference
from support.closeness import max_abs
from support.exported import session
from support.pool_graphs import FO_POOL, H, pool_feed, pool_model

TOLERANCES = {np.float32: FLOAT32_MAX_ABS, np.float64: GOLDEN_FLOAT64_MAX_ABS}
SETTINGS = [
    pytest.param({"output_gate": gate, "reverse": reverse, "zoneout": zoneout}, id=name)
    for name, gate, reverse, zoneout in [
        ("fo", 1, 0, 0.0),
        ("f", 0, 0, 0.0),
        ("fo backward", 1, 1, 0.0),
        ("f backward, zoneout", 0, 1, 0.25),
        ("zoneout of 1", 1, 0, 1.0),
    ]
]


def expected(feed, settings):
    """The definition, row by row without padding."""
    hidden = np.zeros((*feed["gates"].shape[:2], H))
    cells = np.zeros(feed["c0"].shape)
    for row, length in enumerate(feed["lengths"]):
        gates = torch.from_numpy(feed["gates"][row, :length]).double().unsqueeze(1)
        state = torch.from_numpy(feed["c0"][row : row + 1]).double()
        h, c = reference.fo_pool(
            gates,
            state,
            output_gate=bool(settings["output_gate"]),
            reverse=bool(settings["reverse"]),
            zoneout=settings["zoneout"],
        )
        hidden[row, :length], cells[row] = h[:, 0].numpy(), c[0].numpy()
    return hidden, cells


BATCHES = [
    pytest.param([3, 7, 1, 0], 7, id="uneven"),
    pytest.param([1], 1, id="T=1 B=1"),
    pytest.param([2, 2], 5, id="all padded at the end"),
    pytest.param([0, 0], 0, id="no timestep"),
    pytest.param([], 3, id="no row"),
]
RUNNERS = {
    "custom op": lambda model: session(model.SerializeToString(), library=True),
    "function body": lambda model: session(model.SerializeToString(), library=False),
    "onnx evaluator": ReferenceEvaluator,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("lengths", "timesteps"), BATCHES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_pool_is_the_definition(runner, settings, lengths, timesteps, dtype):
    """Operator and body give the reference's numbers, whatever stands in the padding."""
    model = pool_model(settings, dtype)
    feed = pool_feed(lengths, timesteps, dtype, 3 if settings["output_gate"] else 2)

    hidden, cells = RUNNERS[runner](model).run(None, feed)

    want_hidden, want_cells = expected(feed, settings)
    assert hidden.dtype == dtype
    assert max_abs(hidden, want_hidden) <= TOLERANCES[dtype]
    assert max_abs(cells, want_cells) <= TOLERANCES[dtype]
    assert not hidden[np.arange(timesteps) >= feed["lengths"][:, None]].any()


def test_model_with_the_body_is_valid():
    """onnx accepts the node, its local function and the inferred shapes."""
    model = pool_model(FO_POOL)

    onnx.checker.check_model(model, full_check=True)

    assert [f.name for f in model.functions] == [POOL_OP]
