"""The command on a repository of real artefacts: half copies, reloads under traffic, memory."""

from __future__ import annotations

import shutil
import threading
import time

import grpc
import numpy as np
import psutil

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.artefacts import CONFIGS, random_rows, scores_by_hand
from support.server_process import run_command, server_process
from support.servers import array, request

RELOADS = 20
SERVING, FAILED = pb.VERSION_STATE_SERVING, pb.VERSION_STATE_FAILED


def copy(source, folder, beside=True):
    """An artefact, and what belongs to it unless told, as a version."""
    folder.mkdir(parents=True, exist_ok=True)
    files = source.parent.glob(f"{source.name}*") if beside else [source]
    for file in files:
        shutil.copy(file, folder)


def until(condition):
    stop_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < stop_s
        time.sleep(0.05)


def versions(stub, state):
    """(model, version, error) of the versions in that state."""
    reply = stub.ListModels(pb.ListModelsRequest(), timeout=10)
    return [(v.model, v.version, v.error) for v in reply.versions if v.state == state]


def test_half_copied_and_damaged_artefacts_are_never_served(artefacts, tmp_path):
    """An artefact without its proof, or with bytes changed, is reported; whole, it takes over."""
    repository = tmp_path / "models"
    files = artefacts["ids"].paths
    rows = random_rows(CONFIGS["ids"], [3, 7])
    expected = scores_by_hand(artefacts["ids"].model, rows)
    copy(files["native"], repository / "ids" / "1")
    copy(artefacts["features"].paths["onnx"], repository / "features" / "1")
    with (
        server_process(repository, tmp_path / "log", "--watch-s", 0.1) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = prediction_pb2_grpc.PredictionServiceStub(channel)
        copy(files["torchscript"], repository / "ids" / "2", beside=False)
        until(lambda: versions(stub, FAILED))
        [missing] = versions(stub, FAILED)
        before = stub.Predict(request(rows, model="ids"), timeout=30)
        copy(files["torchscript"], repository / "ids" / "2")
        until(lambda: ("ids", "2", "") in versions(stub, SERVING))
        after = stub.Predict(request(rows, model="ids"), timeout=30)
        copy(files["onnx"], repository / "ids" / "3")
        damaged = repository / "ids" / "3" / files["onnx"].name
        until(lambda: ("ids", "3", "") in versions(stub, SERVING))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        until(lambda: versions(stub, FAILED))
        [broken] = versions(stub, FAILED)
        last = stub.Predict(request(rows, model="ids"), timeout=30)
        status = server.stop()

    assert missing[:2] == ("ids", "2")
    assert ".proof.json: missing" in missing[2]
    assert (before.version, before.engine) == ("1", "native")
    assert (after.version, after.engine) == ("2", "torchscript")
    assert (last.version, last.engine) == ("3", "onnx")
    assert broken[:2] == ("ids", "3")
    assert "damaged" in broken[2]
    for reply in (before, after, last):
        np.testing.assert_allclose(array(reply.output), expected, rtol=0, atol=FLOAT32_MAX_ABS)
    assert status == 0, server.log


def test_twenty_reloads_under_traffic_lose_no_call_and_no_memory(artefacts, tmp_path):
    """Memory after 20 reloads is within 5 % of that after the first; no call fails."""
    repository = tmp_path / "models"
    copy(artefacts["ids"].paths["native"], repository / "ids" / "1")
    rows = random_rows(CONFIGS["ids"], [3, 7])
    failures, stop = [], threading.Event()
    options = ("--model-control", "rpc")
    with (
        server_process(repository, tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = prediction_pb2_grpc.PredictionServiceStub(channel)

        def traffic():
            while not stop.is_set():
                try:
                    stub.Predict(request(rows), timeout=30)
                except grpc.RpcError as error:
                    failures.append(error)

        caller = threading.Thread(target=traffic)
        caller.start()
        used = []
        for _ in range(1 + RELOADS):
            stub.LoadModel(pb.LoadModelRequest(model="ids"), timeout=60)
            until(lambda: not versions(stub, pb.VERSION_STATE_DRAINING))
            used.append(psutil.Process(server.process.pid).memory_info().rss)
        stop.set()
        caller.join()
        status = server.stop()

    assert failures == []
    assert used[-1] <= 1.05 * used[0]
    assert status == 0, server.log


def test_wrong_repositories_exit_with_2(artefacts, tmp_path):
    """A model without a good version, and a name for a whole repository, are one clear line."""
    copy(artefacts["ids"].paths["onnx"], tmp_path / "ids" / "1", beside=False)

    unproven = run_command(tmp_path, "--port", 0)
    named = run_command(tmp_path, "--port", 0, "--name", "x")

    assert (unproven.returncode, named.returncode) == (2, 2)
    assert "no version of ids can be served: ids version 1: " in unproven.stderr
    assert ".proof.json: missing" in unproven.stderr
    assert "name: " in named.stderr
    assert "Traceback" not in unproven.stderr + named.stderr
