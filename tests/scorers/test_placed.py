"""A model whose layers are on several devices gives the numbers of the model on one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.model.checkpoint import save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.precision import convert
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers import ScorerSpec, load_checked, load_scorer
from qrnn_serve.scorers.placed import place
from qrnn_serve.scorers.placement import Stage
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from support.artefacts import CONFIGS, packed, random_model, random_rows, scores_by_hand
from support.exported import MODELS, make_model
from support.placed import BATCHES, COUNTS, stages_over

CUTTABLE = [
    name
    for name, config in MODELS.items()
    if config.qrnn.bidirectional != "stacks" and len(config.qrnn.layers) > 1
]


def unplaced(model, rows):
    """Output and state of the model in one piece, rows as PackedRows."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(rows.lengths)]))
    state = None if rows.state is None else torch.from_numpy(rows.state)
    with torch.inference_mode():
        output, state = model.forward_packed(torch.from_numpy(rows.values.copy()), offsets, state)
    return output.numpy(), state.numpy()


def check_all(model, scorer, *, seed=3):
    """Every batch in every number of pieces, with and without state."""
    random = np.random.default_rng(seed)
    dtype = scorer.schema.dtype
    for lengths in BATCHES.values():
        values = [
            r.astype(dtype) if r.dtype.kind == "f" else r
            for r in random_rows(model.config, lengths)
        ]
        state = random.uniform(-1, 1, (len(lengths), scorer.schema.state_size)).astype(dtype)
        for rows in (packed(values), packed(values, state)):
            output, state_out = unplaced(model, rows)
            for count in COUNTS:
                scored = scorer.score_in(rows, count)
                for got, want in ((scored.output, output), (scored.state, state_out)):
                    assert got.dtype == want.dtype
                    np.testing.assert_allclose(got, want, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS)
                    if count == 1:
                        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_placed_scores_are_those_of_the_reference(name):
    """Against plain float64 loops, chosen pieces and forced ones."""
    model = random_model(name)
    scorer = place(model, stages_over(model, ["cpu"] * 2), threads=1)
    for lengths in BATCHES.values():
        rows = random_rows(CONFIGS[name], lengths)
        expected = scores_by_hand(model, rows)
        for scored in (scorer.score(packed(rows)), scorer.score_in(packed(rows), 5)):
            np.testing.assert_allclose(scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
    scorer.close()


@pytest.mark.parametrize("name", CUTTABLE)
def test_placed_is_as_unplaced(name):
    """Every pooling, direction, window and kind of input, in as many stages as there are layers."""
    model = make_model(MODELS[name]).requires_grad_(False)
    scorer = place(model, stages_over(model, ["cpu"] * len(model.config.qrnn.layers)), threads=1)

    check_all(model, scorer)
    scorer.close()


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "int8"])
def test_other_precisions_are_placed_alike(precision):
    """What passes between stages loses nothing: half types are exact in float32."""
    model = convert(random_model("causal"), precision)
    scorer = place(model, stages_over(model, ["cpu"] * 3), threads=1)
    rows = packed(random_rows(CONFIGS["causal"], [300, 5, 64]))

    scored = scorer.score_in(rows, 1)

    output, state = unplaced(model, rows)
    np.testing.assert_array_equal(scored.output, output)
    np.testing.assert_array_equal(scored.state, state)
    scorer.close()


def test_one_stage_is_the_model():
    """A plan of one stage needs no cut, so even independent stacks of two directions take it."""
    model = make_model(MODELS["last of two directions"]).requires_grad_(False)
    scorer = place(model, stages_over(model, ["cpu"]), threads=1)

    check_all(model, scorer)
    scorer.close()


def test_non_finite_values_stay_in_their_row():
    """A NaN in one row of a piece reaches no other row."""
    model = random_model("causal")
    scorer = place(model, stages_over(model, ["cpu"] * 2), threads=1)
    rows = random_rows(CONFIGS["causal"], [50, 200, 50])
    clean = scorer.score_in(packed(rows), 4)
    rows[1][10] = np.nan
    scored = scorer.score_in(packed(rows), 4)

    np.testing.assert_array_equal(scored.output[:50], clean.output[:50])
    np.testing.assert_array_equal(scored.output[250:], clean.output[250:])
    assert np.isnan(scored.output[60:250]).all()
    scorer.close()


def test_a_stage_that_fails_fails_the_batch_and_the_next_is_scored(monkeypatch):
    """Whatever stage: its error comes out, no thread waits for ever, and the scorer goes on."""
    model = random_model("causal")
    scorer = place(model, stages_over(model, ["cpu"] * 3), threads=1)
    rows = packed(random_rows(CONFIGS["causal"], [640]))
    expected = scorer.score_in(rows, 8)
    for number, stage in enumerate(scorer._stages._stages):
        calls = iter(range(100))
        whole = type(stage.model).forward_packed

        def fails(self, *arguments, broken=stage.model, calls=calls, whole=whole):
            if self is broken and next(calls) == 3:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return whole(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(SequenceModel, "forward_packed", fails)
            with pytest.raises(MemoryError, match=r"cpu\+cpu\+cpu"):
                scorer.score_in(rows, 8)
        again = scorer.score_in(rows, 8)
        np.testing.assert_array_equal(again.output, expected.output, f"stage {number}")
        np.testing.assert_array_equal(again.state, expected.state)
    scorer.close()


def test_stages_work_at_the_same_time():
    """The second stage takes a piece while the first works on the next one."""
    model = random_model("causal")
    scorer = place(model, stages_over(model, ["cpu"] * 2), threads=1)
    first, second = (stage.model for stage in scorer._stages._stages)
    second_began = threading.Event()
    whole_first, whole_second, calls = first.forward_packed, second.forward_packed, []

    def first_waits(*arguments):
        calls.append("first")
        # Its second piece goes on only when the other stage has begun with the first piece.
        assert len(calls) == 1 or second_began.wait(20)
        return whole_first(*arguments)

    def second_says(*arguments):
        second_began.set()
        return whole_second(*arguments)

    first.forward_packed, second.forward_packed = first_waits, second_says

    scorer.score_in(packed(random_rows(CONFIGS["causal"], [256])), 4)

    assert len(calls) == 4
    scorer.close()


def test_stages_say_what_they_hold_and_how_long_they_worked():
    """Devices, layers and bytes; seconds add up over batches."""
    model = random_model("causal")
    scorer = place(model, stages_over(model, ["cpu"] * 2), threads=1)
    before = scorer.stages
    scorer.score_in(packed(random_rows(CONFIGS["causal"], [500])), 4)

    assert [(s.device, s.layers, s.copies_by_host) for s in before] == [
        ("cpu", "0-0", False),
        ("cpu", "1-2", False),
    ]
    sizes = sum(w.numel() * w.element_size() for w in model.state_dict().values())
    assert sum(stage.weight_bytes for stage in before) == sizes
    assert all(a.busy_s > b.busy_s for a, b in zip(scorer.stages, before, strict=True))
    assert scorer.device == "cpu+cpu"
    scorer.close()
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score(packed(random_rows(CONFIGS["causal"], [5])))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("placed") / "causal.pt"
    save(random_model("causal"), path)
    return path


def spec_of(path, count=2):
    return ScorerSpec(
        path=str(path), threads=1, stages=stages_over(random_model("causal"), ["cpu"] * count)
    )


def test_in_a_process_it_is_the_same(checkpoint):
    """The plan goes to the process; its stages and their busy seconds come back."""
    rows = packed(random_rows(CONFIGS["causal"], [300, 1, 40]))
    here = load_checked(spec_of(checkpoint))
    there = ProcessScorer(worker_command(spec_of(checkpoint)))
    try:
        scored, expected = there.score(rows), here.score(rows)
        for got, want in ((scored.output, expected.output), (scored.state, expected.state)):
            np.testing.assert_allclose(got, want, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS)
        assert [s.layers for s in there.stages] == ["0-0", "1-2"]
        first = there.stages
        there.score(rows)
        assert all(a.busy_s > b.busy_s > 0 for a, b in zip(there.stages, first, strict=True))
        assert there.device == here.device == "cpu+cpu"
    finally:
        there.close()
        here.close()


@pytest.mark.parametrize("engine", ["torchscript", "onnx"])
def test_artefacts_are_placed_natively_or_refused(artefacts, engine):
    """A TorchScript file's weights are enough; an ONNX graph is not cut."""
    path, model = artefacts["causal"].paths[engine], artefacts["causal"].model
    stages = stages_over(model, ["cpu"] * 2)
    if engine == "onnx":
        with pytest.raises(ConfigError, match=r"native engine, which does not run .*\.onnx"):
            load_scorer(path, stages=stages, threads=1)
        return
    rows = packed(random_rows(CONFIGS["causal"], [30, 4]))
    scorer = load_scorer(path, stages=stages, threads=1)
    np.testing.assert_array_equal(scorer.score_in(rows, 1).output, unplaced(model, rows)[0])
    scorer.close()
    with pytest.raises(ConfigError, match="with engine 'torchscript'"):
        load_scorer(path, engine="torchscript", stages=stages, threads=1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([("cpu", 0, 0), ("cpu", 1, 1)], "has layers 0 to 2, the stages have 0 to 1"),
        ([("cpu", 0, 1), ("cpu", 1, 2)], r"stages\[1\]: expected layers from 2 on"),
        ([("cpu", 0, 0), ("cpu", 2, 2)], r"stages\[1\]: expected layers from 1 on"),
        ([("cpu", 0, 3)], "the stages have 0 to 3"),
        ([("cpu", 1, 0), ("cpu", 1, 2)], "at least one, got 1 to 0"),
        ([("cpu", 0, 1), ("cuda:0", 2, 2)], "all on CPUs or all on GPUs, got cpu, cuda:0"),
        ([], "expected at least one stage"),
    ],
)
def test_stages_that_are_not_the_models(stages, message):
    """What was expected and what came."""
    plan = [Stage(device=device, first=first, last=last) for device, first, last in stages]

    with pytest.raises(ConfigError, match=message):
        place(random_model("causal"), plan, threads=1)


def test_independent_directions_cannot_be_cut():
    """Their outputs are joined after the last layer only."""
    model = make_model(MODELS["last of two directions"])

    with pytest.raises(ConfigError, match="two directions of this model run through all layers"):
        place(model, stages_over(model, ["cpu"] * 2), threads=1)


def test_memory_is_counted_on_every_device():
    """Two stages on one device share it: their timesteps take the bytes of both."""
    layers = tuple(LayerConfig(hidden_size=64) for _ in range(4))
    model = SequenceModel(SequenceModelConfig(qrnn=QRNNConfig(input_size=64, layers=layers))).eval()
    scorers = [place(model, stages_over(model, ["cpu"] * count), threads=1) for count in (1, 4)]
    one, four = (scorer.max_timesteps for scorer in scorers)

    assert 3 * four < one < 5 * four
    for scorer in scorers:
        scorer.close()
