"""A real server process with real artefacts: right numbers, bad neighbours, signals, garbage."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import signal
import socket
import urllib.request

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from support.artefacts import CONFIGS, ENGINES, random_rows, scores_by_hand
from support.server_process import run_command, server_process
from support.servers import CLIENT_OPTIONS, array, request

SERVICE = "qrnn_serve.v1.PredictionService"


def stub_of(channel):
    return prediction_pb2_grpc.PredictionServiceStub(channel)


def health_of(channel, service=""):
    reply = health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=service), timeout=10
    )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


@pytest.fixture(scope="module")
def ids_server(artefacts, tmp_path_factory):
    """A server of the model of token ids, for tests that leave it running."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ("--name", "words", "--prometheus-port", 0)
    with server_process(artefacts["ids"].paths["native"], log, *options) as server:
        yield server


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["ids", "features"])
def test_served_scores_are_those_of_the_reference(artefacts, tmp_path, name, engine):
    """Each artefact through the command, gRPC and its engine gives the reference's scores."""
    model = artefacts[name].model
    rows = random_rows(CONFIGS[name], [7, 1, 30, 2, 2, 111])
    with (
        server_process(artefacts[name].paths[engine], tmp_path / "log") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        reply = stub_of(channel).Predict(request(rows), timeout=30)
        listed = stub_of(channel).ListModels(pb.ListModelsRequest(), timeout=30)
        health = [health_of(channel, service) for service in ("", SERVICE, "model")]
        status = server.stop()

    expected = scores_by_hand(model, rows)
    np.testing.assert_allclose(array(reply.output), expected, rtol=0, atol=FLOAT32_MAX_ABS)
    assert (reply.engine, reply.device, reply.model) == (engine, "cpu", "model")
    assert listed.models[0].engine == engine
    assert health == ["SERVING"] * 3
    assert status == 0, server.log


def test_ids_out_of_range_harm_nobody(artefacts, ids_server):
    """Ids outside the vocabulary are row errors; their neighbours and 100 calls are scored."""
    rows = [np.array(row) for row in ([3, 4, 9], [3, 10], [-1], [2**62, 1], [0])]
    good = request([rows[0], rows[4]])
    with grpc.insecure_channel(ids_server.target) as channel:
        predict = stub_of(channel).Predict
        reply = predict(request(rows), timeout=30)
        later = [predict(good, timeout=30) for _ in range(100)]

    np.testing.assert_array_equal(array(reply.rows), [0, 4])
    expected = scores_by_hand(artefacts["ids"].model, [rows[0], rows[4]])
    np.testing.assert_allclose(array(reply.output), expected, rtol=0, atol=FLOAT32_MAX_ABS)
    facts = [(e.row, e.code, e.timestep, e.got, e.expected) for e in reply.errors]
    assert facts == [
        (1, 3, 1, "10", "an id from 0 to 9"),
        (2, 3, 0, "-1", "an id from 0 to 9"),
        (3, 3, 0, str(2**62), "an id from 0 to 9"),
    ]
    for one in later:
        np.testing.assert_array_equal(array(one.output), array(later[0].output))
    assert ids_server.process.poll() is None


def test_scores_do_not_depend_on_earlier_or_concurrent_callers(artefacts, tmp_path):
    """What one fresh process answers, another answers in any order and to any of 8 callers."""
    config = CONFIGS["causal"]
    messages = [request(random_rows(config, [3], seed=seed)) for seed in range(8)]

    def one_by_one(predict, order):
        return {number: array(predict(messages[number], timeout=30).output) for number in order}

    def at_once(predict):
        with concurrent.futures.ThreadPoolExecutor(8) as callers:
            return list(callers.map(lambda _: one_by_one(predict, range(8)), range(8)))

    # One row a launch: the same kernel runs the same rows, so the bits are the same.
    with served(artefacts, tmp_path, "--max-batch-rows", 1) as predict:
        first = one_by_one(predict, range(8))
        again = at_once(predict)
    with served(artefacts, tmp_path) as predict:
        reverse = one_by_one(predict, reversed(range(8)))
        batched = at_once(predict)

    for number, expected in first.items():
        for replies in (reverse, *again):
            np.testing.assert_array_equal(replies[number], expected)
        for replies in batched:
            np.testing.assert_allclose(
                replies[number], expected, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS
            )


@contextlib.contextmanager
def served(artefacts, tmp_path, *options):
    with (
        server_process(artefacts["causal"].paths["native"], tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        yield stub_of(channel).Predict


def test_different_lengths_share_launches(artefacts, tmp_path):
    """32 callers with 32 lengths are scored together, not one by one."""
    config = CONFIGS["causal"]
    messages = [request(random_rows(config, [length], seed=length)) for length in range(1, 33)]
    # As if the device were busy for two seconds while they come.
    with served(artefacts, tmp_path, "--batch-wait-ms", 2000) as predict:
        replies = [call.result() for call in [predict.future(m, timeout=60) for m in messages]]

    assert max(reply.timing.batch_rows for reply in replies) >= 16
    assert all(reply.engine == "native" for reply in replies)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_the_running_call_end(artefacts, tmp_path, number):
    """On a signal health turns, a new call gets UNAVAILABLE, the running one its scores, exit 0."""
    config = CONFIGS["features"]
    small, long = request(random_rows(config, [1])), request(random_rows(config, [2000] * 400))
    options = ("--max-batch-timesteps", 2000, "--prometheus-port", 0)
    with (
        server_process(artefacts["features"].paths["native"], tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel,
    ):
        stub = stub_of(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        running = stub.Predict.future(long, timeout=120)
        wait_until_waiting(server)
        server.process.send_signal(number)
        turned = next(watch).status
        with pytest.raises(grpc.RpcError) as refused:
            stub.Predict(small, timeout=10)
        ended_before = running.done()
        reply = running.result()
        status = server.process.wait(40)

    assert turned == health_pb2.HealthCheckResponse.NOT_SERVING
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not ended_before, "the call was to be running while the server refused the new one"
    assert len(array(reply.rows)) == 400
    assert status == 0, server.log


def test_call_that_outlasts_the_grace_period_is_told_so(artefacts, tmp_path):
    """After the grace period the running call gets UNAVAILABLE and the process exits with 1."""
    config = CONFIGS["features"]
    long = request(random_rows(config, [2000] * 400))
    options = ("--max-batch-timesteps", 2000, "--prometheus-port", 0, "--grace-s", 0.1)
    with (
        server_process(artefacts["features"].paths["native"], tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel,
    ):
        running = stub_of(channel).Predict.future(long, timeout=120)
        wait_until_waiting(server)
        status = server.stop()
        error = running.exception(timeout=10)

    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert status == 1, server.log


def wait_until_waiting(server):
    """Return once a call waits in the queue, the rest of one that is being scored too."""
    port = re.search(r"metrics port=(\d+)", server.log)[1]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            if re.search(r"qrnn_queue_timesteps\S* [1-9]", reply.read().decode()):
                return


def test_port_in_use_exits_with_2(artefacts):
    """A taken port is a clear error, before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_command(artefacts["ids"].paths["native"], "--port", port)

    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.onnx"], "no such file"),
        (["{ids}", "--device", "cuda:99"], "cuda:99"),
        (["{ids}", "--engine", "onnx"], "engine"),
        (["{ids}", "--port", "-3"], "port"),
        (["{ids}", "--bogus"], "bogus"),
        (["{ids}", "--max-batch-rows", "many"], "many"),
        ([__file__], "checkpoint"),
    ],
)
def test_wrong_command_lines_exit_with_2(artefacts, arguments, message):
    """Each mistake gets one clear line and exit status 2, no traceback."""
    path = artefacts["ids"].paths["native"]

    done = run_command(*(argument.format(ids=path) for argument in arguments))

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_one_line_is_printed_and_logs_go_to_stderr(artefacts, tmp_path):
    """Standard output has the ready line and nothing else; the log has the call."""
    path = artefacts["ids"].paths["native"]
    with (
        server_process(path, tmp_path / "log", "--log-level", "debug") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub_of(channel).Predict(request([np.array([1])], request_id="seen"), timeout=30)
        status = server.stop()
        rest = server.process.stdout.read()

    assert (status, rest) == (0, "")
    assert "request_id='seen' code=OK" in server.log


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["native", "torchscript"])
@pytest.mark.parametrize("name", ["ids", "features"])
def test_served_on_a_gpu_scores_are_those_of_the_reference(artefacts, tmp_path, name, engine):
    """Served on a GPU, both torch engines give the reference's scores, and bad ids harm nobody."""
    rows = random_rows(CONFIGS[name], [7, 1, 300, 2, 2, 111])
    path = artefacts[name].paths[engine]
    with (
        server_process(path, tmp_path / "log", "--device", "cuda:0") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        predict = stub_of(channel).Predict
        wrong = [np.array([10, -1])] if name == "ids" else [np.full((2, 5), np.nan, np.float32)]
        first = predict(request([*wrong, *rows]), timeout=60)
        reply = predict(request(rows), timeout=60)
        status = server.stop()

    expected = scores_by_hand(artefacts[name].model, rows)
    np.testing.assert_allclose(array(reply.output), expected, rtol=0, atol=FLOAT32_MAX_ABS)
    np.testing.assert_array_equal(array(first.rows), np.arange(1, 7))
    assert (reply.engine, reply.device) == (engine, "cuda:0")
    assert status == 0, server.log
