"""--stages: where a model is cut, and that the chain gives the whole model's numbers."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qrnn_export import ExportOptions, ParityError, export
from qrnn_export.proof import prove
from qrnn_export.stages import balanced, cut
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.proof_file import file_sha256, read_proof
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.parts import part
from support.closeness import max_abs
from support.exported import MODELS, make_model, random_batch, session

CUTTABLE = ("stack windows", "stack joined", "ids, every pooling, head", "stack no_bias")
LANGUAGE = SequenceModelConfig(
    qrnn=QRNNConfig(
        input_size=5,
        layers=(
            LayerConfig(hidden_size=7, window=2),
            LayerConfig(hidden_size=6),
            LayerConfig(hidden_size=5),
        ),
    ),
    vocabulary_size=11,
    head_size=11,
)
weights = st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(1, 1000)), min_size=2, max_size=7)


@given(layers=weights, data=st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(layers, data):
    """Against every possible cut; each layer is in exactly one stage."""
    seconds, sizes = zip(*layers, strict=True)
    count = data.draw(st.integers(2, len(layers)))

    def heaviest(edges):
        return max(max(sum(w[a:b]) / sum(w) for w in (seconds, sizes)) for a, b in pairwise(edges))

    edges = balanced(seconds, sizes, count)

    assert (edges[0], edges[-1], len(edges)) == (0, len(layers), count + 1)
    assert all(a < b for a, b in pairwise(edges))
    inner = combinations(range(1, len(layers)), count - 1)
    best = min(heaviest([0, *cuts, len(layers)]) for cuts in inner)
    assert heaviest(edges) == pytest.approx(best)


@pytest.mark.parametrize("name", CUTTABLE)
def test_layers_one_after_another_are_the_model(name):
    """Float64: hidden values of each part into the next, each with its columns of the state."""
    torch.manual_seed(1611)
    model = make_model(MODELS[name], torch.float64)
    count = len(model.config.qrnn.layers)
    parts = [part(model, layer, layer + 1) for layer in range(count)]
    batch = random_batch(model, [7, 0, 3, 1], 7, with_state=True)
    states = torch.split(batch.state, [p.state_size for p in parts], dim=1)

    with torch.inference_mode():
        want = model(batch.input, batch.lengths, batch.state)
        hidden, after = batch.input, []
        for one, state in zip(parts, states, strict=True):
            hidden, new = one(hidden, batch.lengths, state)
            after.append(new)

    assert max_abs(hidden, want[0]) <= GOLDEN_FLOAT64_MAX_ABS
    assert max_abs(torch.cat(after, dim=1), want[1]) <= GOLDEN_FLOAT64_MAX_ABS
    assert parts[0].config.takes_ids == model.config.takes_ids
    assert parts[-1].config.output_name == model.config.output_name
    sizes = [sum(w.numel() for w in p.state_dict().values()) for p in parts]
    assert sum(sizes) == sum(w.numel() for w in model.state_dict().values())


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A language model in two stages, in ONNX, and the model."""
    torch.manual_seed(1611)
    model = make_model(LANGUAGE)
    folder = tmp_path_factory.mktemp("stages")
    return model, export(model, folder, ExportOptions(formats=("onnx",), stages=2))


def test_written_stages_chain_to_the_model_by_their_manifest_alone(stages):
    """As anybody would: read the file, run what it names in its order, carry its columns."""
    model, report = stages
    chain = json.loads(report.chain.read_text())
    batch = random_batch(model, [9, 2, 5], 9, with_state=True)
    feed, states = batch.feed(), []
    hidden, state = feed["input"], feed["state"]

    for stage, file in zip(chain["stages"], chain["artefacts"]["onnx"], strict=True):
        path = report.chain.with_name(file["file"])
        assert file_sha256(path) == file["sha256"]
        given_ = {
            "input": hidden,
            "lengths": feed["lengths"],
            "state": state[:, slice(*stage["state"])],
        }
        hidden, new = session(path, library=True).run(None, given_)
        states.append(new)

    want = model(batch.input, batch.lengths, batch.state)
    assert max_abs(hidden, want[0]) <= FLOAT32_MAX_ABS
    assert max_abs(np.concatenate(states, axis=1), want[1]) <= FLOAT32_MAX_ABS
    assert chain["stages"][0]["layers"][0] == 0
    assert chain["stages"][-1]["layers"][1] == 3


def test_each_stage_and_the_chain_are_proven(stages):
    """Every file has its proof; the chain's is about all of them."""
    _, report = stages
    names = {a.path.name for a in report.artefacts}

    assert names == {"model.stage1of2.onnx", "model.stage2of2.onnx"}
    assert {m.artefact for m in report.proof.measurements} == {*names, "model.stages.json"}
    assert {m.way for m in report.proof.measurements} == {
        "custom op",
        "function body",
        "chain of onnx",
    }
    for path in (report.chain, *(a.path for a in report.artefacts)):
        read_proof(path)
    assert names <= read_proof(report.chain).beside_sha256.keys()


def test_a_chain_of_another_model_is_not_proven(stages, tmp_path):
    """The chain is measured, not only its parts."""
    _, report = stages
    torch.manual_seed(2)

    with pytest.raises(ParityError, match=r"model\.stages\.json, chain of onnx") as caught:
        prove(make_model(LANGUAGE), [report.chain], tmp_path)
    assert len(caught.value.proof.failures()) == len(caught.value.proof.measurements)


def test_stages_that_exist_are_not_replaced(stages):
    """Unless told so: the message names the files."""
    model, report = stages

    with pytest.raises(ConfigError, match=r"model\.stage1of2\.onnx.*exists already"):
        export(model, report.chain.parent, ExportOptions(formats=("onnx",), stages=2))


def test_auto_takes_two_stages_for_a_small_model():
    """One for each GiB of weights, at least two; each with its share of the layers."""
    model = make_model(LANGUAGE)
    made = cut(model, "auto")

    assert len(made) == 2
    assert [(s.first, s.stop) for s in made] in ([(0, 1), (1, 3)], [(0, 2), (2, 3)])
    assert all(s.seconds > 0 for s in made)


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("stack stacks", 2, "two directions of this model run through all layers"),
        ("stack one", "auto", "has 1 layer, which do not make 2 stages"),
        ("stack windows", 4, "has 3 layers, which do not make 4 stages"),
    ],
)
def test_models_that_cannot_be_cut(name, count, message, tmp_path):
    """What they are, and what to do; nothing is written."""
    with pytest.raises(ConfigError, match=message):
        export(make_model(MODELS[name]), tmp_path / "out", ExportOptions(stages=count))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 1}, "--stages: expected auto or at least 2, got 1"),
        ({"stages": 2, "formats": ("pt2", "aot")}, "--stages with --aot"),
    ],
)
def test_stages_that_make_no_sense(options, message):
    """Said before a file is read."""
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**options)
