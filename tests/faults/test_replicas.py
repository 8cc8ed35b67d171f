"""A real server under load from the real client, while the processes of its replicas are harmed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import select
import signal
import threading
import urllib.request

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qrnn_client import Client
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.artefacts import CONFIGS, random_rows, scores_by_hand, shared_artefacts
from support.server_process import run_command, server_process
from support.servers import CLIENT_OPTIONS, array, request

CONFIG = CONFIGS["features"]
REPLICAS = ("--device", "cpu,cpu", "--replica-processes", "always", "--prometheus-port", 0)
QUICK = ("--hang-timeout-s", 4, "--restart-wait-s", 0.05)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    return shared_artefacts(tmp_path_factory, "features")


@pytest.fixture(scope="module")
def server(artefacts, tmp_path_factory):
    """A server of two replicas, for tests that leave both of them serving."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with server_process(artefacts.paths["native"], log, *REPLICAS, *QUICK) as running:
        yield running


def replicas_of(server):
    return psutil.Process(server.process.pid).children()


def replica_statuses(server):
    """How ListModels says that each replica is."""
    with grpc.insecure_channel(server.target) as channel:
        stub = prediction_pb2_grpc.PredictionServiceStub(channel)
        [model] = stub.ListModels(pb.ListModelsRequest(), timeout=60).models
    return list(model.replicas)


def metric(server, name):
    port = re.search(r"metrics port=(\d+)", server.log)[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return float(re.search(rf"^{name}\S* (\S+)$", reply.read().decode(), re.MULTILINE)[1])


def wait_until(condition):
    """Ask until it holds; the test's own time limit ends a wait that is in vain."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.02)


def wait_for_replicas(server, count=2):
    wait_until(lambda: metric(server, "qrnn_replicas_alive") == count)


def wait_for_end(pids):
    """Whether all of these processes end within a minute."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as fd:
            if not select.select([fd], [], [], 60)[0]:
                return False
    return True


class Load:
    """Callers that predict without a pause, each other rows, until they are told to stop."""

    def __init__(self, server, model, callers=4):
        self.stopping = threading.Event()
        self.calls = 0
        self._server = server
        self._model = model
        self._callers = callers

    def __enter__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(self._callers)
        self._running = [self._pool.submit(self._call, seed) for seed in range(self._callers)]
        wait_until(lambda: self.calls > 3)
        return self

    def __exit__(self, *error):
        self.stopping.set()
        self._pool.shutdown()

    def wait_for_calls(self, more):
        wanted = self.calls + more
        wait_until(lambda: self.calls >= wanted or any(task.done() for task in self._running))

    def wrong_rows(self):
        """Rows without a right answer, of all callers; raises what a caller's call raised."""
        return [row for task in self._running for row in task.result()]

    def _call(self, seed):
        wrong = []
        lengths = [1 + (seed * 7 + k * k) % 60 for k in range(20)]
        rows = random_rows(CONFIG, lengths, seed=seed)
        expected = np.split(scores_by_hand(self._model, rows), np.cumsum(lengths)[:-1])
        with Client(self._server.target, timeout_s=60) as client:
            while not self.stopping.is_set():
                outputs = client.predict("model", rows).outputs
                assert len(outputs) == len(rows)
                for row, (got, right) in enumerate(zip(outputs, expected, strict=True)):
                    if not np.allclose(got, right, rtol=0, atol=FLOAT32_MAX_ABS):
                        wrong.append((seed, row))
                self.calls += 1
        return wrong


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_harmed_replica_costs_no_caller_an_answer(artefacts, server, harm):
    """Killed or stopped under load, a replica is replaced, and every row has its right scores."""
    wait_for_replicas(server)
    restarts = metric(server, "qrnn_replica_restarts_total")
    with Load(server, artefacts.model) as load:
        harmed = replicas_of(server)[0]
        os.kill(harmed.pid, harm)
        wait_until(lambda: harmed not in replicas_of(server))
        load.wait_for_calls(5)
        wait_for_replicas(server)
        load.wait_for_calls(5)
    after = replicas_of(server)

    assert load.wrong_rows() == []
    # More where the machine stood still for longer than a batch may take.
    assert metric(server, "qrnn_replica_restarts_total") >= restarts + 1
    assert harmed not in after
    assert len(after) == 2
    assert not any(replica.status() == psutil.STATUS_ZOMBIE for replica in after)


def test_health_follows_the_replicas(artefacts, server):
    """With one replica the server serves; with none it does not, until one is back."""
    wait_for_replicas(server)
    rows = random_rows(CONFIG, [3, 1])
    with grpc.insecure_channel(server.target) as channel, Client(server.target) as client:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="model"))
        first = next(watch).status
        one, other = replicas_of(server)
        before = replica_statuses(server)
        # A stopped process cannot come back before the other is gone.
        other.suspend()
        one.kill()
        other.kill()
        # Before they are gone both could be given the same request, which is then not tried again.
        assert wait_for_end([one.pid, other.pid])
        outputs = client.predict("model", rows, timeout_s=60).outputs
        second, third = next(watch).status, next(watch).status
        wait_for_replicas(server)
        after = replica_statuses(server)
        watch.cancel()

    expected = scores_by_hand(artefacts.model, rows)
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=0, atol=FLOAT32_MAX_ABS)
    serving = health_pb2.HealthCheckResponse
    assert [first, second, third] == [serving.SERVING, serving.NOT_SERVING, serving.SERVING]
    assert [replica.state for replica in after] == [pb.REPLICA_STATE_SERVING] * 2
    for old, new in zip(before, after, strict=True):
        assert new.restarts > old.restarts
        assert " ended" in new.last_error
        assert new.device == "cpu"


def test_idle_descriptors_and_memory_do_not_grow_with_restarts(artefacts, server):
    """After a replica was replaced three times the server holds no more descriptors than before."""
    process = psutil.Process(server.process.pid)
    rows = random_rows(CONFIG, [5, 9])
    counts = []
    with Client(server.target) as client:
        for _ in range(3):
            wait_for_replicas(server)
            client.predict("model", rows)
            counts.append(process.num_fds())
            gone = replicas_of(server)[0]
            gone.kill()
            wait_until(lambda: gone not in replicas_of(server))  # noqa: B023
            wait_for_replicas(server)

    assert max(counts) <= counts[0] + 2


@contextlib.contextmanager
def busy_server(artefacts, tmp_path):
    """A server in the midst of a call of many batches, its replicas, the call and its rows."""
    rows = random_rows(CONFIG, [500] * 300)
    options = (*REPLICAS, "--max-batch-timesteps", 2000)
    with (
        server_process(artefacts.paths["native"], tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel,
    ):
        predict = prediction_pb2_grpc.PredictionServiceStub(channel).Predict
        call = predict.future(request(rows), timeout=120)
        wait_until(lambda: metric(server, "qrnn_batches_total") > 0)
        yield server, [replica.pid for replica in replicas_of(server)], call, rows


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_all_processes_lets_running_calls_end(artefacts, tmp_path, number):
    """A signal to the server and its replicas drains: the call is answered, status 0, none left."""
    with busy_server(artefacts, tmp_path) as (server, pids, call, rows):
        for pid in (*pids, server.process.pid):
            os.kill(pid, number)
        reply = call.result()
        status = server.process.wait(60)
        gone = wait_for_end(pids)

    last = scores_by_hand(artefacts.model, rows[-1:])
    np.testing.assert_allclose(array(reply.output)[-500:], last, rtol=0, atol=FLOAT32_MAX_ABS)
    assert len(array(reply.rows)) == 300
    assert len(pids) == 2
    assert gone
    assert status == 0, server.log
    assert "Traceback" not in server.log


def test_killed_server_leaves_no_replica(artefacts, tmp_path):
    """SIGKILL of the server in the midst of a batch ends its replicas too."""
    with busy_server(artefacts, tmp_path) as (server, pids, call, _):
        server.process.kill()
        gone = wait_for_end(pids)
        error = call.exception(timeout=30)

    assert len(pids) == 2
    assert gone
    assert error.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:99", "cuda:99"), ("cpu,cuda:99", "cuda:99"), ("cpu,,cpu", "got ''"), ("cuda", "GPU")],
)
def test_replica_that_cannot_start_stops_the_server(artefacts, device, message):
    """A device that is not there is one clear line and exit status 2, from a process too."""
    options = ("--port", 0, "--device", device, "--replica-processes", "always")
    done = run_command(artefacts.paths["native"], *options)

    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
