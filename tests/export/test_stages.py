"""--stages: where a model is cut, and that the chain gives the whole model's numbers."""

from __future__ import annotations

import json
import shutil
from itertools import combinations, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from qrnn_export import ExportOptions, ParityError, export, verify
from qrnn_export.cases import POINTS
from qrnn_export.cli import main
from qrnn_export.proof import prove
from qrnn_export.stages import balanced, cut
from qrnn_serve import save
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.proof_file import file_sha256, proof_path, read_proof
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.parts import joined, part
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


@pytest.fixture(scope="module")
def verifiable(tmp_path_factory):
    """A checkpoint, and its two stages in two formats."""
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("verifiable")
    save(make_model(LANGUAGE), folder / "model.pt")
    export(folder / "model.pt", options=ExportOptions(stages=2))
    return folder


@pytest.fixture
def damaged(verifiable, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(verifiable, tmp_path / "copy")


def test_a_chain_is_verified_as_any_artefact(verifiable):
    """With its own weights, with the checkpoint and real rows: every format, all cases."""
    chain = verifiable / "model.stages.json"
    rows = pa.table({"tokens": [[1, 2, 3], [10]]})
    pq.write_table(rows, verifiable / "rows.parquet")

    alone = verify(chain)
    against = verify(chain, verifiable / "model.pt", verifiable / "rows.parquet", column="tokens")

    assert {m.way for m in alone.measurements} == {"chain of torchscript", "chain of onnx"}
    assert len(alone.measurements) == 2 * len(POINTS)
    assert len(against.measurements) == 2 * (len(POINTS) + 1)
    assert not alone.failures()
    assert not against.failures()


def test_the_command_verifies_a_chain(verifiable):
    """A table of the chain and status 0; another checkpoint is status 1."""
    torch.manual_seed(8)
    save(make_model(LANGUAGE), verifiable / "other.pt")
    chain = str(verifiable / "model.stages.json")

    proven = CliRunner().invoke(main, ["verify", chain, "--against", str(verifiable / "model.pt")])
    other = CliRunner().invoke(main, ["verify", chain, "--against", str(verifiable / "other.pt")])

    assert proven.exit_code == 0, proven.output
    assert "chain of onnx" in proven.output
    assert other.exit_code == 1
    assert "other.pt does not hold the weights that" in other.output


def test_parts_joined_are_the_model_again():
    """Every kind that can be cut: the same configuration, the same tensors."""
    for name in CUTTABLE:
        model = make_model(MODELS[name])
        parts = [part(model, k, k + 1) for k in range(len(model.config.qrnn.layers))]

        whole = joined(parts)

        assert whole.config == model.config
        assert whole.state_dict().keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            assert torch.equal(whole.state_dict()[key], tensor), key


def test_stages_of_two_models_are_not_joined():
    """Widths that do not meet."""
    models = [make_model(MODELS[name]) for name in ("stack windows", "ids, every pooling, head")]

    with pytest.raises(ArtefactError, match="not parts of one model"):
        joined([part(models[0], 0, 1), part(models[1], 1, 2)])


def edited(chain, change):
    """Change the file, and let its proof fit it again, as somebody would to be believed."""
    content = json.loads(chain.read_text())
    change(content)
    chain.write_text(json.dumps(content))
    proof = json.loads(proof_path(chain).read_text())
    proof_path(chain).write_text(
        json.dumps({**proof, "artefact_sha256": file_sha256(chain)}, sort_keys=True)
    )


def swap_stages(content):
    content["artefacts"]["onnx"].reverse()


def rename_file(content):
    content["artefacts"]["onnx"][0]["file"] = "../model.onnx"


def shift_layers(content):
    content["stages"][1]["layers"][0] += 1


def drop_stage(content):
    content["artefacts"]["onnx"].pop()


def drop_all(content):
    content["artefacts"] = {}


def change_hash(content):
    content["artefacts"]["onnx"][0]["sha256"] = "0" * 64


def forget_proof(content):
    content["proof_sha256"] = None


def raise_version(content):
    content["format_version"] = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_stages, "hold other weights"),
        (rename_file, "expected 2 names of files in the same folder"),
        (shift_layers, "layers of the stages: expected"),
        (drop_stage, "expected 2 names of files in the same folder"),
        (drop_all, "names no artefacts"),
        (change_hash, "names files that its proof is not about"),
        (forget_proof, "is the proof of another export"),
        (raise_version, "format 2 of stages, this release reads 1"),
    ],
)
def test_a_changed_chain_is_refused(damaged, change, message):
    """What is wrong, by name; never a chain of other stages."""
    chain = damaged / "model.stages.json"
    edited(chain, change)

    with pytest.raises(ArtefactError, match=message):
        verify(chain)


def test_a_chain_that_was_cut_off_or_lacks_a_stage_is_refused(damaged):
    """Each file is missed by its name."""
    chain = damaged / "model.stages.json"
    content = chain.read_text()

    chain.write_text(content[:100])
    with pytest.raises(ArtefactError, match=r"stages\.json: damaged, or not the file"):
        verify(chain)
    chain.write_text(content)
    (damaged / "model.stage2of2.onnx").unlink()
    with pytest.raises(ArtefactError, match=r"needs model\.stage2of2\.onnx beside it"):
        verify(chain)
    chain.unlink()
    with pytest.raises(ArtefactError, match=r"needs model\.stages\.json"):
        verify(chain)


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
