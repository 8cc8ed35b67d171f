"""Placed models on GPUs: the numbers of the model on one, copies that lie, memory that ends."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.model.checkpoint import save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers import ScorerSpec, load_scorer, peer_copy
from qrnn_serve.scorers.placed import place
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from support.artefacts import CONFIGS, packed, random_model, random_rows, scores_by_hand
from support.placed import BATCHES, COUNTS, stages_over

pytestmark = pytest.mark.gpu
TWO_GPUS = pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.multi_gpu, id="two GPUs")
GROUPS = [pytest.param(("cuda:0", "cuda:0"), id="one GPU twice"), TWO_GPUS]


@pytest.fixture(params=["as needed", "always", "by the host"])
def copies(request, monkeypatch):
    """How values cross: two stages on one GPU copy none of themselves, but can be made to."""
    if request.param == "by the host":
        monkeypatch.setattr("qrnn_serve.scorers.placed.broken_pairs", set)
    if request.param != "as needed":
        monkeypatch.setattr("qrnn_serve.scorers.stages_cuda._is_same", lambda source, target: False)
    return request.param


@pytest.mark.parametrize("devices", GROUPS)
@pytest.mark.parametrize("name", CONFIGS)
def test_placed_scores_are_those_of_one_gpu_and_of_the_reference(name, devices, copies, tmp_path):
    """Every batch in every number of pieces, with and without state."""
    model = random_model(name)
    save(model, tmp_path / "model.pt")
    one = load_scorer(tmp_path / "model.pt", "cuda:0")
    scorer = place(model, stages_over(model, devices), threads=1)
    assert [s.copies_by_host for s in scorer.stages] == [False, copies == "by the host"]
    for lengths in BATCHES.values():
        rows = random_rows(CONFIGS[name], lengths)
        first = one.score(packed(rows))
        expected = scores_by_hand(model, rows)
        np.testing.assert_allclose(first.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
        again = one.score(packed(rows, first.state))
        for count in COUNTS:
            for state, want in ((None, first), (first.state, again)):
                got = scorer.score_in(packed(rows, state), count)
                for a, b in ((got.output, want.output), (got.state, want.state)):
                    np.testing.assert_allclose(a, b, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS)
                    if count == 1:
                        np.testing.assert_array_equal(a, b)
    scorer.close()
    one.close()


@pytest.mark.parametrize("devices", GROUPS)
def test_hand_over_waits_for_its_data(devices):
    """250 batches in a row on a four-layer model, whose every answer is the first one again.

    A copy that came too early or read memory that was given away would change one.
    """
    torch.manual_seed(0)
    layers = tuple(LayerConfig(hidden_size=256, window=2) for _ in range(4))
    model = SequenceModel(SequenceModelConfig(qrnn=QRNNConfig(input_size=64, layers=layers)))
    model.eval().requires_grad_(False)
    scorer = place(model, stages_over(model, devices), threads=1)
    random = np.random.default_rng(0)
    batches = [
        packed([random.standard_normal((t, 64)).astype(np.float32) for t in lengths])
        for lengths in ([700], [64] * 9, [3, 200, 1, 90, 400], [2000, 5])
    ]
    wanted = [[scorer.score_in(rows, count) for count in (2, 5, 9)] for rows in batches]
    for turn in range(250):
        rows, want = batches[turn % 4], wanted[turn % 4]
        number = int(random.integers(3))
        got = scorer.score_in(rows, (2, 5, 9)[number])
        np.testing.assert_array_equal(got.output, want[number].output)
        np.testing.assert_array_equal(got.state, want[number].state)
    for a, b in pairwise(wanted[0]):
        np.testing.assert_allclose(a.output, b.output, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS)
    scorer.close()


def test_out_of_memory_in_a_stage_passes():
    """A batch past the GPU's memory is a MemoryError; the next one is right again."""
    model = random_model("causal")
    scorer = place(model, stages_over(model, ("cuda:0", "cuda:0")), threads=1)
    rows = packed(random_rows(CONFIGS["causal"], [300, 20]))
    before = scorer.score_in(rows, 3)
    free_bytes, _ = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        with pytest.raises(MemoryError, match="out of memory"):
            scorer.score_in(packed([np.zeros((free_bytes // 100 // 64, 5), np.float32)]), 4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = scorer.score_in(rows, 3)

    np.testing.assert_array_equal(after.output, before.output)
    np.testing.assert_array_equal(after.state, before.state)
    scorer.close()


def test_in_a_process_on_a_gpu(tmp_path):
    """The plan goes to the process, the stages' facts come back."""
    model = random_model("causal")
    save(model, tmp_path / "model.pt")
    stages = tuple(stages_over(model, ("cuda:0", "cuda:0")))
    spec = ScorerSpec(path=str(tmp_path / "model.pt"), device="cuda:0", threads=1, stages=stages)
    rows = random_rows(CONFIGS["causal"], [300, 1, 40])
    scorer = ProcessScorer(worker_command(spec))
    try:
        scored = scorer.score(packed(rows))
        expected = scores_by_hand(model, rows)
        np.testing.assert_allclose(scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
        assert [stage.device for stage in scorer.stages] == ["cuda:0", "cuda:0"]
        assert all(stage.busy_s > 0 for stage in scorer.stages)
    finally:
        scorer.close()


@pytest.mark.multi_gpu
def test_peer_copies_of_this_host():
    """What the probe says of each pair is what a copy of the pattern says."""
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    pairs = {(a, b) for a in devices for b in devices if a != b}

    for source, target in pairs - peer_copy.broken_pairs(pairs):
        values = torch.randn(1 << 22)
        assert torch.equal(values.to(source).to(target).cpu(), values)
