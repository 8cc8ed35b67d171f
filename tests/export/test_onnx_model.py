"""The ONNX graph of a whole model: its numbers, its axes, what it refuses."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from qrnn_export import onnx_graph
from qrnn_export.onnx_model import IDS_CHECK, LENGTHS_CHECK, STATE_CHECK
from qrnn_export.onnx_pool import DOMAIN, OPSET_VERSION, POOL_OP
from qrnn_serve.core.tolerances import (
    FLOAT32_MAX_ABS,
    GOLDEN_FLOAT64_MAX_ABS,
    SAME_ROWS_FLOAT32_MAX_ABS,
)
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.closeness import max_abs
from support.exported import MODELS, make_model, random_batch, reference_model, session, write

GRID = [
    pytest.param([1], 1, False, id="T=1 B=1"),
    pytest.param([1, 1, 1], 1, True, id="T=1 B=3 state"),
    pytest.param([4, 9, 1], 9, True, id="T=9 uneven state"),
    pytest.param([3, 2], 6, False, id="longer than any row"),
    pytest.param([2, 0, 5], 5, True, id="a row without timesteps"),
]


@pytest.fixture(params=MODELS, scope="module")
def exported(request, tmp_path_factory):
    """A float64 model and its ONNX file."""
    model = reference_model(request.param)
    (path,) = write(model, tmp_path_factory.mktemp("model"), "onnx")
    return model, path


@pytest.mark.parametrize(("lengths", "timesteps", "with_state"), GRID)
@pytest.mark.parametrize("way", ["custom op", "function body", "onnx evaluator"])
def test_graph_gives_the_numbers_of_the_module(exported, way, lengths, timesteps, with_state):
    """Every kind of model in every evaluator, in float64, with NaN or wrong ids in the padding."""
    model, path = exported
    batch = random_batch(model, lengths, timesteps, with_state=with_state)
    want = model(batch.input, batch.lengths, batch.state)

    if way == "onnx evaluator":
        got = ReferenceEvaluator(str(path)).run(None, batch.feed())
    else:
        got = session(path, library=way == "custom op").run(None, batch.feed())

    for actual, wanted in zip(got, want, strict=True):
        assert max_abs(actual, wanted) <= GOLDEN_FLOAT64_MAX_ABS


@pytest.mark.parametrize("name", ["ids, every pooling, head", "stack windows"])
@pytest.mark.parametrize("library", [True, False], ids=["custom op", "function body"])
def test_float32_at_every_size(name, library, tmp_path):
    """T from 1 to 500 and B from 1 to 65 in one session, with and without a state."""
    model = make_model(MODELS[name])
    runner = session(write(model, tmp_path, "onnx")[0], library=library)
    for timesteps in (1, 2, 5, 7, 500):
        for rows in (1, 2, 3, 65):
            for with_state in (False, True):
                lengths = [timesteps - row % timesteps for row in range(rows)]
                batch = random_batch(model, lengths, timesteps, with_state=with_state)
                want = model(batch.input, batch.lengths, batch.state)

                got = runner.run(None, batch.feed())

                for actual, wanted in zip(got, want, strict=True):
                    assert max_abs(actual, wanted.detach()) <= FLOAT32_MAX_ABS


def test_every_axis_and_every_tensor_is_described(exported):
    """Inputs and outputs name batch and time; shape inference leaves no tensor without a shape."""
    model, path = exported
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    described = {v.name: v for v in (*inferred.graph.value_info, *inferred.graph.output)}

    values = ["batch", "time", *model.config.timestep_shape]
    outputs = ["batch", "time"] if model.pooling == "none" else ["batch"]
    assert {v.name: axes(v) for v in (*proto.graph.input, *proto.graph.output)} == {
        "input": values,
        "lengths": ["batch"],
        "state": ["state_batch", model.state_size],
        model.config.output_name: [*outputs, model.config.output_size],
        "state_out": ["batch", model.state_size],
    }
    for node in inferred.graph.node:
        for name in node.output:
            assert all(axes(described[name])), f"{name} has an axis without name and size"


def axes(value):
    shape = value.type.tensor_type.shape
    return [d.dim_param or d.dim_value for d in shape.dim]


def test_graph_has_one_pool_a_layer_and_its_versions(exported):
    """The recurrence is one node a layer and direction, in a versioned domain with a body."""
    model, path = exported
    proto = onnx.load(path)

    pools = [node for node in proto.graph.node if node.domain == DOMAIN]
    config = model.config.qrnn
    assert [n.op_type for n in pools] == [POOL_OP] * (len(config.layers) * config.num_directions)
    assert not [n for n in proto.graph.node if n.op_type in ("Scan", "Loop", "If")]
    assert {o.domain: o.version for o in proto.opset_import} == {"": OPSET_VERSION, DOMAIN: 1}
    assert [(f.domain, f.name) for f in proto.functions] == [(DOMAIN, POOL_OP)]


@pytest.mark.parametrize("library", [True, False], ids=["custom op", "function body"])
def test_one_step_at_a_time_is_one_call(library, tmp_path):
    """A sequence fed by single timesteps with the carried state gives the same outputs."""
    model = make_model(MODELS["stack windows"])
    runner = session(write(model, tmp_path, "onnx")[0], library=library)
    batch = random_batch(model, [7, 7, 7], 7, with_state=True)
    whole, last_state = runner.run(None, batch.feed())
    feed = batch.feed()

    state = feed["state"]
    for t in range(7):
        step = {"input": feed["input"][:, t : t + 1], "lengths": feed["lengths"] * 0 + 1}
        output, state = runner.run(None, {**step, "state": state})
        assert max_abs(output[:, 0], whole[:, t]) <= SAME_ROWS_FLOAT32_MAX_ABS

    assert max_abs(state, last_state) <= SAME_ROWS_FLOAT32_MAX_ABS


@pytest.mark.parametrize("library", [True, False], ids=["custom op", "function body"])
def test_state_of_zeros_is_no_state_and_one_row_is_for_all(library, tmp_path):
    """Leaving the state out, zeros, and one row of zeros are the same bits."""
    model = make_model(MODELS["stack joined"])
    runner = session(write(model, tmp_path, "onnx")[0], library=library)
    feed = random_batch(model, [3, 5], 5, with_state=False).feed()
    zeros = torch.zeros(2, model.state_size).numpy()

    answers = [
        runner.run(None, feed),
        runner.run(None, {**feed, "state": zeros}),
        runner.run(None, {**feed, "state": zeros[:1]}),
    ]

    for answer in answers[1:]:
        for actual, wanted in zip(answer, answers[0], strict=True):
            assert (actual == wanted).all()


@pytest.mark.parametrize("library", [True, False], ids=["custom op", "function body"])
@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"lengths": [6, 1]}, LENGTHS_CHECK),
        ({"lengths": [-1, 1]}, LENGTHS_CHECK),
        ({"state": 3}, STATE_CHECK),
        ({"input": -1}, IDS_CHECK),
        ({"input": 11}, IDS_CHECK),
    ],
)
def test_wrong_values_stop_the_run(change, check, library, tmp_path):
    """What the module refuses is refused by a node named after the rule, never answered."""
    model = make_model(MODELS["ids, every pooling, head"])
    runner = session(write(model, tmp_path, "onnx")[0], library=library)
    batch = random_batch(model, [5, 5], 5, with_state=False)
    feed = batch.feed()
    for name, value in change.items():
        if name == "lengths":
            feed[name][:] = value
        elif name == "input":
            feed[name][1, 2] = value
        else:
            feed[name] = torch.zeros(value, model.state_size).numpy()

    with pytest.raises(Exception, match=check):
        runner.run(None, feed)


def test_one_row_refuses_the_state_of_three(tmp_path):
    """A state with more rows than the batch is not broadcast into a larger answer."""
    model = make_model(MODELS["stack one"])
    runner = session(write(model, tmp_path, "onnx")[0], library=True)
    feed = random_batch(model, [5], 5, with_state=False).feed()
    feed["state"] = torch.zeros(3, model.state_size).numpy()

    with pytest.raises(Exception, match=STATE_CHECK):
        runner.run(None, feed)


def test_long_mean_of_equal_values_is_exact(tmp_path):
    """10,000 equal float32 values have the mean that they should."""
    model = make_model(MODELS["head without bias"])
    runner = session(write(model, tmp_path, "onnx")[0], library=True)
    row = torch.randn(1, 1, model.input_size).expand(1, 10_000, -1).contiguous()
    lengths = torch.tensor([10_000])
    want, _ = reference_like(model)(row.double(), lengths)

    got, _ = runner.run(None, {"input": row.numpy(), "lengths": lengths.numpy()})

    assert max_abs(got, want.detach()) <= FLOAT32_MAX_ABS


def reference_like(model):
    """The same model in float64."""
    double = make_model(model.config, torch.float64)
    double.load_state_dict({k: t.double() for k, t in model.state_dict().items()})
    return double


def test_weights_beside_the_model_are_those_inside(monkeypatch, tmp_path):
    """Written in blocks and tiles, each at the start of a page; nothing is left inside."""
    monkeypatch.setattr(onnx_graph, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(onnx_graph, "_TILE_COLUMNS", 7)
    stack = QRNNConfig(input_size=40, layers=(LayerConfig(hidden_size=33),))
    model = make_model(SequenceModelConfig(qrnn=stack, vocabulary_size=99, head_size=98))
    paths = [tmp_path / name for name in ("inside", "beside")]
    for path, limit in zip(paths, (2**31, 0), strict=True):
        path.mkdir()
        write(model, path, "onnx", external_data_bytes=limit)
    bare = onnx.load_model(paths[1] / "model.onnx", load_external_data=False)
    inside, beside = (onnx.load_model(path / "model.onnx").graph.initializer for path in paths)

    outside = [t for t in bare.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in outside]

    assert {t.name for t in outside} == {"embedding.weight", "layer0.forward.weight", "head.weight"}
    assert all(int(place["offset"]) % 4096 == 0 for place in places)
    assert not any(tensor.raw_data for tensor in outside)
    for got, want in zip(beside, inside, strict=True):
        assert got.name == want.name
        np.testing.assert_array_equal(numpy_helper.to_array(got), numpy_helper.to_array(want))
