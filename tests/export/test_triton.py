"""The Triton model repository: configurations by Triton's own schema, and what its files score."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from qrnn_export import ExportOptions, ParityError, export, triton
from qrnn_export.triton_config import MAX_BATCH_ROWS
from qrnn_serve import onnx_ops_library
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.closeness import max_abs
from support.exported import MODELS, make_model, random_batch

NAMES = [
    "head at every timestep",
    "last of one direction",
    "ids, every pooling, head",
    "sums of ids, hidden layers, sigmoid",
]
STREAMED = {"head at every timestep", "last of one direction"}
DTYPES = {"TYPE_FP32": "float32", "TYPE_FP64": "float64", "TYPE_INT64": "int64"}


@pytest.fixture(scope="module", params=NAMES)
def repository(request, tmp_path_factory):
    """A model and its repository."""
    torch.manual_seed(1611)
    model = make_model(MODELS[request.param])
    folder = tmp_path_factory.mktemp("triton")
    options = ExportOptions(triton=folder / "models")
    export(model, folder, options)
    return request.param, model, folder / "models"


def configs(folder):
    """Each model's configuration, parsed by Triton's schema, in which unknown fields are errors."""
    return {
        path.parent.name: text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        for path in sorted(folder.glob("*/config.pbtxt"))
    }


def dtype_of(entry):
    return DTYPES[model_config_pb2.DataType.Name(entry.data_type)]


def model_shape(entry):
    """The shape without the batch axis that the backend hands to the file."""
    return list(entry.reshape.shape if entry.HasField("reshape") else entry.dims)


def states_of(config):
    return list(config.sequence_batching.state)


def runner(folder, config):
    """Runs the model's file with named tensors, as Triton's backend does."""
    outputs = [*config.output, *states_of(config)]
    names = [o.output_name if hasattr(o, "output_name") else o.name for o in outputs]
    if config.backend == "onnxruntime":
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        library = Path(config.model_operations.op_library_filename[0])
        assert library.parent == Path(triton.MOUNT) / config.name
        options.register_custom_ops_library(str(folder / config.name / library.name))
        path = folder / config.name / "1/model.onnx"
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        return lambda feed: dict(zip(names, session.run(names, feed), strict=True))
    module = torch.jit.load(folder / config.name / "1/model.pt")
    numbered = bool(states_of(config))
    order = [a.name for a in module.forward.schema.arguments][1:]

    def run(feed):
        places = {n: int(n.rpartition("__")[2]) if numbered else order.index(n) for n in feed}
        given = sorted(feed, key=places.__getitem__)
        results = module(*(torch.from_numpy(feed[n]) for n in given))
        at = {n: int(n.rpartition("__")[2]) if numbered else k for k, n in enumerate(names)}
        return {n: results[place].numpy() for n, place in at.items()}

    return run


def batch(config, requests):
    """What the backend makes of requests (input [b, T, ...], lengths [b, 1]): one tensor each."""
    feed = {}
    for position, entry in enumerate(config.input):
        parts = [request[position] for request in requests]
        for part in parts:
            assert part.dtype == dtype_of(entry)
            assert len(part.shape) == 1 + len(entry.dims)
            pairs = zip(part.shape[1:], entry.dims, strict=True)
            assert all(dim in (size, -1) for size, dim in pairs)
        assert len({part.shape[1:] for part in parts}) == 1
        feed[entry.name] = np.concatenate(parts)
        if entry.HasField("reshape"):
            feed[entry.name] = feed[entry.name].reshape(-1, *entry.reshape.shape)
    return feed


def test_every_configuration_is_triton_s(repository):
    """The public schema takes each file; its settings are those of the model's kind."""
    name, model, folder = repository
    found = configs(folder)

    endings = ["", "_stream"] if name in STREAMED else [""]
    expected = [f"model_{f}{end}" for f in ("onnx", "torchscript") for end in endings]
    assert sorted(found) == sorted(expected)
    for config in found.values():
        assert config.max_batch_size == MAX_BATCH_ROWS
        stream = config.name.endswith("_stream")
        assert config.WhichOneof("scheduling_choice") == (
            "sequence_batching" if stream else "dynamic_batching"
        )
        assert len(states_of(config)) == stream
        for state in states_of(config):
            assert list(state.dims) == list(state.initial_state[0].dims) == [model.state_size]
            assert state.initial_state[0].WhichOneof("state_data") == "zero_data"
        platform = {"onnxruntime": "onnxruntime_onnx", "pytorch": "pytorch_libtorch"}
        assert config.platform == platform[config.backend]


def test_every_tensor_is_one_of_the_files(repository):
    """Names, types and shapes of a configuration are those of the file; none is left out."""
    _, _, folder = repository
    for config in configs(folder).values():
        inputs = [*config.input, *states_of(config)]
        if config.backend == "pytorch":
            module = torch.jit.load(folder / config.name / "1/model.pt")
            arguments = module.forward.schema.arguments[1:]
            assert {str(a.type) for a in arguments} == {"Tensor"}
            assert len(arguments) == len(inputs)
            continue
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(onnx_ops_library())
        path = folder / config.name / "1/model.onnx"
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        required = {i.name: i for i in session.get_inputs()}
        assert {getattr(i, "input_name", "") or i.name for i in inputs} == set(required)
        given = {o.name: o for o in session.get_outputs()}
        for entry, tensor in [
            *((e, required[e.name]) for e in config.input),
            *((e, given[e.name]) for e in config.output),
        ]:
            free = [size if isinstance(size, int) else -1 for size in tensor.shape[1:]]
            assert model_shape(entry) == free, entry.name
            assert {"tensor(float)": "float32", "tensor(int64)": "int64"}[tensor.type] == dtype_of(
                entry
            )


def test_a_dynamic_batch_scores_each_request_like_the_module(repository):
    """Requests of other callers, rows of any length: each row's score is the module's, alone."""
    _, model, folder = repository
    for config in configs(folder).values():
        if states_of(config):
            continue
        run = runner(folder, config)
        rows = [random_batch(model, lengths, 9, with_state=False) for lengths in ([9], [4, 7], [1])]
        requests = [(r.input.numpy(), r.lengths.numpy()[:, None]) for r in rows]

        answers = run(batch(config, requests))

        start = 0
        for request in rows:
            output, state = model(request.input, request.lengths)
            stop = start + len(request.lengths)
            expected = {model.config.output_name: output, "state_out": state}
            for entry, name in zip(config.output, expected, strict=True):
                got = answers[entry.name][start:stop]
                assert max_abs(got, expected[name].detach()) <= FLOAT32_MAX_ABS
                assert got.dtype == dtype_of(entry)
                sizes = zip(got.shape[1:], entry.dims, strict=True)
                assert all(dim in (size, -1) for size, dim in sizes)
            start = stop


def test_sequences_in_chunks_are_scored_like_whole_rows(repository):
    """Triton carries the state: zeros first, then what the file gave, whatever rows meet."""
    name, model, folder = repository
    found = [config for config in configs(folder).values() if states_of(config)]
    assert bool(found) == (name in STREAMED)
    for config in found:
        run = runner(folder, config)
        (state,) = states_of(config)
        whole = random_batch(model, [12, 8], 12, with_state=False)
        expected, last = model(whole.input, whole.lengths)
        zeros = np.zeros((1, *state.initial_state[0].dims), np.float32)
        carried, outputs = {0: zeros, 1: zeros}, {0: [], 1: []}
        # The second sequence ends after two chunks; each chunk meets whoever is there.
        for start, rows in ((0, [0, 1]), (4, [1, 0]), (8, [0])):
            chunks = [
                (whole.input[r : r + 1, start : start + 4].numpy(), np.array([[4]])) for r in rows
            ]
            feed = batch(config, chunks)
            feed[state.input_name] = np.concatenate([carried[r] for r in rows])

            answers = run(feed)

            for place, r in enumerate(rows):
                outputs[r].append(answers[config.output[0].name][place : place + 1])
                carried[r] = answers[state.output_name][place : place + 1]
        for r, chunks in outputs.items():
            per_timestep = model.config.pooling == "none"
            got = np.concatenate(chunks, axis=1)[0] if per_timestep else chunks[-1][0]
            want = expected[r, : whole.lengths[r]] if per_timestep else expected[r]
            assert max_abs(got, want.detach()) <= FLOAT32_MAX_ABS
            assert max_abs(carried[r][0], last[r].detach()) <= FLOAT32_MAX_ABS


def test_the_readme_has_a_request_that_the_model_answers(repository):
    """The second command's tensors are what the first model takes."""
    _, _, folder = repository
    text = (folder / "README.md").read_text()

    name, body = re.search(r"models/(\w+)/infer -d '(.*)'", text).groups()
    tensors = json.loads(body)["inputs"]
    request = [
        np.array(t["data"], {"FP32": "float32", "INT64": "int64"}[t["datatype"]]).reshape(
            t["shape"]
        )
        for t in tensors
    ]
    config = configs(folder)[name]
    answers = runner(folder, config)(batch(config, [request]))

    assert [t["name"] for t in tensors] == [i.name for i in config.input]
    assert all(np.isfinite(array).all() for array in answers.values())
    assert "tritonserver --model-repository=/models" in text


def test_the_onnx_model_is_the_proven_artefact(repository):
    """Byte for byte; only the one with state differs, by the value that made state optional."""
    _, _, folder = repository

    assert (folder / "model_onnx/1/model.onnx").read_bytes() == (
        folder.parent / "model.onnx"
    ).read_bytes()


def test_large_weights_lie_beside_each_graph(tmp_path):
    """External data is copied with its name, which the graph holds."""
    model = make_model(MODELS["stack windows"])
    export(
        model,
        tmp_path,
        ExportOptions(formats=("onnx",), triton=tmp_path / "models", external_data_bytes=0),
    )

    for name, config in configs(tmp_path / "models").items():
        assert [p.suffix for p in (tmp_path / "models" / name / "1").iterdir()].count(".data") == 1
        rows = random_batch(model, [5, 3], 5, with_state=False)
        feed = batch(config, [(rows.input.numpy(), rows.lengths.numpy()[:, None])])
        for state in states_of(config):
            feed[state.input_name] = np.zeros((2, model.state_size), np.float32)
        answers = runner(tmp_path / "models", config)(feed)
        expected = model(rows.input, rows.lengths)[0].detach()
        assert max_abs(answers[config.output[0].name], expected) <= FLOAT32_MAX_ABS


def test_a_repository_is_not_replaced_unasked(tmp_path):
    """A folder that is there stops the export before any work; --overwrite keeps other models."""
    models = tmp_path / "models"
    (models / "other").mkdir(parents=True)
    model = make_model(MODELS["stack one"])

    with pytest.raises(ConfigError, match="models exists already"):
        export(model, tmp_path, ExportOptions(formats=("onnx",), triton=models))
    assert list(tmp_path.iterdir()) == [models]
    for _ in range(2):
        options = ExportOptions(formats=("onnx",), triton=models, overwrite=True)
        report = export(model, tmp_path, options)

    assert {p.name for p in models.iterdir()} == {
        "README.md",
        "model_onnx",
        "model_onnx_stream",
        "other",
    }
    assert "how to run Triton" in report.notices[-1]


def test_a_file_that_scores_differently_is_not_written(tmp_path, monkeypatch):
    """What is not the proven artefact is compared with the module too; nothing appears."""

    class Wrong(triton.Scoring):
        def forward(self, input: torch.Tensor, lengths: torch.Tensor):
            output, state = self.model(input, lengths)
            return output + 0.001, state

    monkeypatch.setattr(triton, "Scoring", Wrong)
    options = ExportOptions(formats=("torchscript",), triton=tmp_path / "models")

    with pytest.raises(ParityError, match=r"model_torchscript/model\.pt does not give"):
        export(make_model(MODELS["stack one"]), tmp_path, options)
    assert list(tmp_path.iterdir()) == []


def test_float64_models_are_declared_as_such(tmp_path):
    """The dtype of features, outputs and state is the model's."""
    model = make_model(MODELS["stack one"], torch.float64)
    export(model, tmp_path, ExportOptions(triton=tmp_path / "models"))

    for config in configs(tmp_path / "models").values():
        tensors = [config.input[0], *config.output, *states_of(config)]
        assert {dtype_of(t) for t in tensors} == {"float64"}
