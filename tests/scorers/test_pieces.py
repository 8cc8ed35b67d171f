"""Rows that are longer than a batch: cut in time by the pool where the model allows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qrnn_serve import SequenceModel, save
from qrnn_serve.core.tolerances import (
    FLOAT32_MAX_ABS,
    HALF_RELATIVE_NORM,
    SAME_ROWS_FLOAT32_MAX_ABS,
)
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.pool import PoolConfig, ReplicaPool
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.scorers import load_scorer
from support.artefacts import CONFIGS, packed, random_rows, scores_by_hand

LENGTHS = [3, 500, 64, 65, 1, 200]


def scorer_of(config, folder, dtype=torch.float32):
    torch.manual_seed(4)
    model = SequenceModel(config).eval()
    with torch.no_grad():
        for parameter in model.qrnn.parameters():
            parameter.uniform_(-0.5, 0.5)
    model.to(dtype)
    save(model, folder / "model.pt")
    return model, load_scorer(folder / "model.pt", threads=1)


@pytest.mark.parametrize("pooling", ["none", "last"])
async def test_rows_in_pieces_score_as_the_reference(pooling, tmp_path):
    """Windows, cells and outputs go on over every cut: float64 loops, and the model uncut."""
    config = replace(CONFIGS["causal"], pooling=pooling, head_size=3)
    model, scorer = scorer_of(config, tmp_path)
    rows = random_rows(config, LENGTHS)
    whole = scorer.score(packed(rows))
    answer = await submitted(scorer, rows)

    expected = scores_by_hand(replace_pooling(model), rows)
    if pooling == "last":
        expected = expected[np.cumsum(LENGTHS) - 1]
    np.testing.assert_allclose(answer.scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
    for got, one in ((answer.scored.output, whole.output), (answer.scored.state, whole.state)):
        np.testing.assert_allclose(got, one, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS)


async def test_pieces_of_a_half_precision_model_carry_a_rounded_state(tmp_path):
    """A rounded state between pieces stays within the tolerance of the outputs."""
    config = CONFIGS["causal"]
    model, scorer = scorer_of(config, tmp_path, torch.float16)
    rows = [
        row.astype(np.float16).astype(scorer.schema.dtype) for row in random_rows(config, LENGTHS)
    ]
    answer = await submitted(scorer, rows)

    expected = scores_by_hand(model, rows)
    error = np.linalg.norm(answer.scored.output - expected) / np.linalg.norm(expected)
    assert error <= HALF_RELATIVE_NORM["float16"]


async def submitted(scorer, rows):
    """The answer of a pool whose batches hold 64 timesteps."""
    pool = ReplicaPool([lambda: scorer], PoolConfig(batch=BatchLimits(max_timesteps=64)))
    await pool.start()
    answer = await pool.submit(packed(rows))
    assert await pool.stop(timeout_s=10)
    return answer


def replace_pooling(model):
    """The same weights with one output a timestep, which the loops compute."""
    every = SequenceModel(replace(model.config, pooling="none"))
    every.load_state_dict(model.state_dict())
    return every.eval()


@pytest.mark.parametrize(
    ("config", "cuts"),
    [
        pytest.param(CONFIGS["causal"], True, id="timestep"),
        pytest.param(replace(CONFIGS["causal"], pooling="last"), True, id="last"),
        pytest.param(replace(CONFIGS["causal"], pooling="mean"), False, id="mean"),
        pytest.param(replace(CONFIGS["causal"], pooling="last_max_mean"), False, id="all"),
        pytest.param(CONFIGS["features"], False, id="both directions"),
    ],
)
async def test_schema_says_whether_rows_may_be_cut(config: SequenceModelConfig, cuts, tmp_path):
    """Pooling over time and a second direction need the whole row; its longest is then limited."""
    _, scorer = scorer_of(config, tmp_path)
    pool = ReplicaPool([lambda: scorer], PoolConfig(batch=BatchLimits(max_timesteps=64)))
    await pool.start()

    assert scorer.schema.cuts_in_time is cuts
    longest = PoolConfig().queue.max_timesteps if cuts else scorer.max_timesteps
    assert pool.max_row_timesteps == longest
    assert await pool.stop(timeout_s=10)
