"""The clients and qrnn-score against `qrnn-serve` itself, on every engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from qrnn_client import (
    AsyncClient,
    Batching,
    Client,
    Health,
    cli,
)
from qrnn_serve import SequenceModel, save
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.artefacts import random_model, random_rows, scores_by_hand, write_artefacts
from support.server_process import server_process

SPEECH = Path(__file__).parents[2] / "examples/japanese_vowels/japanese_vowels_test.parquet"
LENGTHS = (1, 7, 3, 40, 2, 3)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, its rows, and the server that serves it."""

    model: object
    rows: list
    target: str
    process: object

    @property
    def expected(self):
        """Scores in float64, one array a row."""
        scores = scores_by_hand(self.model, self.rows)
        if self.model.config.pooling != "none":
            return list(scores)
        return np.split(scores, np.cumsum(LENGTHS)[:-1])


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    """Models of features, of ids and of sums of ids, as every kind of file."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_artefacts(random_model(name), folder / name)
        for name in ("features", "ids", "sums of ids")
    }


@pytest.fixture(
    scope="module",
    params=[
        ("features", "native"),
        ("features", "onnx"),
        ("ids", "torchscript"),
        ("ids", "onnx"),
        ("sums of ids", "native"),
        ("sums of ids", "onnx"),
    ],
    ids="-".join,
)
def served(request, artefacts, tmp_path_factory):
    name, engine = request.param
    log_path = tmp_path_factory.mktemp("log") / "log.txt"
    with server_process(artefacts[name].paths[engine], log_path, "--name", "model") as server:
        model = artefacts[name].model
        rows = random_rows(model.config, LENGTHS, seed=5)
        yield Served(model, rows, server.target, server)


def check(outputs, expected):
    for output, scores in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, scores, rtol=0, atol=FLOAT32_MAX_ABS)


@pytest.mark.parametrize("max_rows", [1, 4, 100])
def test_real_predictions(served, max_rows):
    """Every engine, however the rows are cut: the scores of the float64 definition."""
    with Client(served.target, batching=Batching(max_rows=max_rows)) as client:
        prediction = client.predict("model", served.rows)

    check(prediction.outputs, served.expected)
    timing = prediction.timing
    stages_s = (timing.decode_s, timing.queue_s, timing.upload_s, timing.compute_s)
    assert all(seconds > 0 for seconds in (*stages_s, timing.download_s, timing.encode_s))


async def test_real_async_predictions(served):
    """The same over asyncio."""
    async with AsyncClient(served.target) as client:
        prediction = await client.predict("model", served.rows)

    check(prediction.outputs, served.expected)


def test_real_row_errors_name_the_callers_rows(served):
    """What the server refuses is named by the caller's index, its neighbours are scored."""
    bad = np.full_like(served.rows[0], 10**6 if served.model.config.takes_ids else np.nan)
    rows = [*served.rows[:3], bad, *served.rows[3:], bad]

    with Client(served.target, batching=Batching(max_rows=3)) as client:
        prediction = client.predict("model", rows, on_error="return")

    assert [error.row for error in prediction.errors] == [3, 7]
    for error in prediction.errors:
        assert (error.code, error.field, error.timestep) == ("INVALID_ARGUMENT", "values", 0)
        assert str(error).startswith(f"row {error.row}, timestep 0: values: expected ")
        assert "row" not in error.message
    outputs = [output for output in prediction.outputs if output is not None]
    check(outputs, served.expected)


def test_real_models_and_health(served):
    """The catalogue is the model's own configuration; server and model are healthy."""
    config = served.model.config
    with Client(served.target) as client:
        (info,) = client.models()
        health = [client.health(), client.health("model"), client.health("nobody")]

    assert info.takes_ids == config.takes_ids
    assert info.output_size == served.expected[0].shape[-1]
    assert info.output_per_timestep == (config.pooling == "none")
    assert info.state_size == served.model.state_size
    assert len(info.weights_sha256) == 64
    assert health == [Health.SERVING, Health.SERVING, Health.SERVICE_UNKNOWN]


def test_real_command_scores_a_file(served, tmp_path):
    """qrnn-score on a real file, a real server: ids, order and scores."""
    column = pa.array([row.tolist() for row in served.rows])
    table = pa.table({"id": ["a", "b", "a", "ü", "e", "f"], "features": column})
    pq.write_table(table, tmp_path / "in.parquet")

    paths = [str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet")]
    done = CliRunner().invoke(cli.main, [*paths, "--target", served.target, "--batch-rows", "2"])

    assert done.exit_code == 0, done.stderr
    scores = pq.read_table(tmp_path / "out.parquet")
    assert scores["id"].to_pylist() == ["a", "b", "a", "ü", "e", "f"]
    check(map(np.array, scores["score"].to_pylist()), served.expected)


@pytest.fixture(scope="module")
def small_server(artefacts, tmp_path_factory):
    """A server with a small queue."""
    options = ("--name", "model", "--queue-timesteps", 64)
    log_path = tmp_path_factory.mktemp("log") / "log.txt"
    with server_process(artefacts["ids"].paths["native"], log_path, *options) as server:
        yield server


@pytest.fixture
def make_ids(artefacts):
    return lambda lengths: random_rows(artefacts["ids"].model.config, lengths)


def test_real_states_carry_over(small_server, artefacts, make_ids):
    """A sequence in two parts with its state carried ends in the state of the whole."""
    rows = make_ids((5, 2, 17))
    with Client(small_server.target) as client:
        whole = client.predict("model", rows, return_state=True)
        first = client.predict("model", [row[:1] for row in rows], return_state=True)
        rest = client.predict(
            "model", [row[1:] for row in rows], states=first.states, return_state=True
        )

    for expected, got in zip(whole.states, rest.states, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_MAX_ABS)


def test_real_limit_of_one_request(small_server, make_ids):
    """A row above the server's own limit is an error of that row; the others are scored."""
    with Client(small_server.target) as client:
        prediction = client.predict("model", make_ids((3, 65, 64)), on_error="return")

    assert [(error.row, error.got) for error in prediction.errors] == [(1, "65 timesteps")]
    assert prediction.outputs[0] is not None
    assert prediction.outputs[2] is not None


def test_real_full_queue_is_waited_for(small_server, artefacts, make_ids):
    """More calls at once than the server queues: those it refuses are sent again."""
    rows = make_ids([60] * 60)
    batching = Batching(max_rows=1, in_flight=16)

    with Client(small_server.target, batching=batching) as client:
        prediction = client.predict("model", rows)

    expected = scores_by_hand(artefacts["ids"].model, rows)
    check(prediction.outputs, expected)
    assert prediction.timing.attempts >= prediction.timing.calls == 60


def test_real_speech_file(tmp_path):
    """qrnn-score on the Japanese Vowels test file gives the scores of the module itself."""
    torch.manual_seed(3)
    layer = LayerConfig(hidden_size=24, window=2)
    qrnn = QRNNConfig(input_size=12, layers=(layer, layer))
    model = SequenceModel(
        SequenceModelConfig(qrnn=qrnn, pooling="last_max_mean", head_size=9)
    ).eval()
    save(model, tmp_path / "model.pt")
    utterances = pq.read_table(SPEECH)

    with server_process(tmp_path / "model.pt", tmp_path / "log.txt") as server:
        paths = [str(SPEECH), str(tmp_path / "scores.parquet")]
        options = ["--target", server.target, "--batch-rows", "50"]
        done = CliRunner().invoke(cli.main, [*paths, *options])

    assert done.exit_code == 0, done.stderr
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores["id"].equals(utterances["id"])
    rows = [np.array(row, np.float32) for row in utterances["features"].to_pylist()]
    expected = scores_by_hand(model, rows)
    np.testing.assert_allclose(scores["score"].to_pylist(), expected, rtol=0, atol=FLOAT32_MAX_ABS)


@pytest.mark.parametrize("state", [False, True])
def test_real_predictions_in_half_precision(served, state):
    """With half, features and scores travel as float16: the scores of the rounded rows, rounded."""
    model, rows = served.model, served.rows
    if not model.config.takes_ids:
        rows = [row.astype(np.float16).astype(np.float32) for row in rows]
    with Client(served.target, half=True) as client, Client(served.target) as full:
        prediction = client.predict("model", served.rows, return_state=state)
        expected = full.predict("model", rows, return_state=state)

    for output, scores in zip(prediction.outputs, expected.outputs, strict=True):
        assert output.dtype == np.float16
        np.testing.assert_allclose(output, scores, rtol=2**-11, atol=2**-25 + FLOAT32_MAX_ABS)
    if state:
        for ours, theirs in zip(prediction.states, expected.states, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=FLOAT32_MAX_ABS)
