"""Several front ends on one port: numbers, one queue, drain, health, metrics, reload, crashes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import urllib.request

import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.server import front_ends
from qrnn_serve.server.app import Server
from qrnn_serve.server.config import ServerConfig
from support.artefacts import CONFIGS, random_rows, scores_by_hand
from support.scorers import POISON, TIMESTEP_SCHEMA, SumScorer, whole_number_rows
from support.server_process import server_process
from support.servers import CLIENT_OPTIONS, array, request, running_server, source_of

FRONT_ENDS = 2


def serving(scorer, **settings):
    return running_server(scorer, **{"front_ends": FRONT_ENDS, "restart_wait_s": 0.01} | settings)


@contextlib.asynccontextmanager
async def stubs_of(target, count):
    """As many connections, each its own, so that the kernel deals them to the front ends."""
    async with contextlib.AsyncExitStack() as stack:
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        stubs = []
        for _ in range(count):
            channel = grpc.aio.insecure_channel(target, options=options)
            await stack.enter_async_context(channel)
            stubs.append(prediction_pb2_grpc.PredictionServiceStub(channel))
        yield stubs


def process_ids(caplog):
    """Of every front end that was started, in order."""
    message = "front end serves pid=%d"
    return [record.args[0] for record in caplog.records if record.msg == message]


def rows_and_sums(*lengths, seed=0):
    packed = whole_number_rows(lengths, seed=seed)
    rows = np.split(packed.values, np.cumsum(lengths)[:-1])
    return rows, np.array([row.sum(axis=0) for row in rows])


async def test_every_connection_gets_its_own_rows(caplog):
    """40 connections with 10 calls at once each, small and large: each gets the sums of its rows.

    Both front ends have some of them.
    """
    caplog.set_level(logging.INFO)
    async with serving(SumScorer()) as running, stubs_of(running.target, 40) as stubs:

        async def check(number, stub):
            for turn in range(10):
                length = 20_000 if number % 10 == turn else 3
                rows, sums = rows_and_sums(length, 1, 2, seed=100 * number + turn)
                reply = await stub.Predict(request(rows, request_id=f"{number}/{turn}"))
                np.testing.assert_array_equal(array(reply.output), sums)
                assert reply.request_id == f"{number}/{turn}"

        await asyncio.gather(*(check(*pair) for pair in enumerate(stubs)))
        connections = [
            sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(pid).net_connections())
            for pid in process_ids(caplog)
        ]

    # The fixture's own connection is there too.
    assert sum(connections) >= 40
    assert len(connections) == FRONT_ENDS
    assert all(connections)


async def test_state_row_errors_and_times_cross():
    """State in and out, wrong rows, rows on which the model fails, and the stages of the time."""
    rows, _ = rows_and_sums(2, 1, 3)
    rows[1][0, 0] = np.nan
    bad = [np.full((1, 2), POISON, np.float32)]
    state = np.arange(6, dtype=np.float32).reshape(3, 2)
    async with serving(SumScorer(TIMESTEP_SCHEMA)) as running:
        reply = await running.stub.Predict(request(rows, state=state, return_state=True))
        failed = await running.stub.Predict(request([*bad, rows[0]]))

    np.testing.assert_array_equal(array(reply.rows), [0, 2])
    expected = [state[i] + np.cumsum(rows[i], axis=0) for i in (0, 2)]
    np.testing.assert_array_equal(array(reply.output), np.concatenate(expected))
    np.testing.assert_array_equal(array(reply.state), [e[-1] for e in expected])
    np.testing.assert_array_equal(array(reply.output_lengths), [2, 3])
    [error] = reply.errors
    assert (error.row, error.code) == (1, grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert [(e.row, e.code) for e in failed.errors] == [(0, grpc.StatusCode.INTERNAL.value[0])]
    np.testing.assert_array_equal(array(failed.rows), [1])
    assert reply.timing.compute_s == 1e-6
    assert reply.timing.decode_s > 0
    assert (reply.device, reply.engine, reply.timing.batch_rows) == ("cpu", "native", 2)


async def test_errors_of_the_engine_reach_the_caller():
    """Overload with its time to wait, a request that is too large, deadlines, and other methods."""
    scorer = SumScorer()
    async with serving(scorer, queue_timesteps=8, max_batch_timesteps=8) as running:
        scorer.gate.clear()
        while scorer.entered.acquire(blocking=False):
            pass
        first = asyncio.ensure_future(running.stub.Predict(request(rows_and_sums(8)[0])))
        assert await asyncio.to_thread(scorer.entered.acquire, timeout=20)
        second = asyncio.ensure_future(running.stub.Predict(request(rows_and_sums(8)[0])))
        while running.server.snapshot().depth.requests < 1:
            await asyncio.sleep(0.01)
        full = await error_of(running.stub.Predict(request(rows_and_sums(8)[0])))
        large = await error_of(running.stub.Predict(request(rows_and_sums(9)[0])))
        late = await error_of(running.stub.Predict(request(rows_and_sums(1)[0]), timeout=0.2))
        refused = await error_of(running.stub.UnloadModel(pb.UnloadModelRequest(model="sums")))
        listed = await running.stub.ListModels(pb.ListModelsRequest())
        scorer.gate.set()
        await asyncio.gather(first, second)

    assert full.code() == large.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    details = rpc_status.from_call(full).details
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
    assert dict(large.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
    assert late.code() in {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    assert refused.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "--model-control rpc" in refused.details()
    assert [model.name for model in listed.models] == ["sums"]


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_caller_that_leaves_costs_nothing():
    """The rows of a call that is cancelled leave the queue."""
    scorer = SumScorer()
    async with serving(scorer) as running:
        scorer.gate.clear()
        while scorer.entered.acquire(blocking=False):
            pass
        held = asyncio.ensure_future(running.stub.Predict(request(rows_and_sums(1)[0])))
        assert await asyncio.to_thread(scorer.entered.acquire, timeout=20)
        left = asyncio.ensure_future(running.stub.Predict(request(rows_and_sums(5)[0])))
        async with asyncio.timeout(20):
            while running.server.snapshot().depth.timesteps != 5:
                await asyncio.sleep(0.01)
            left.cancel()
            while running.server.snapshot().depth.timesteps != 0:
                await asyncio.sleep(0.01)
        scorer.gate.set()
        await held


async def test_a_front_end_that_is_killed_is_replaced(caplog):
    """Its connections break, those of the other go on; another takes its place, and is counted."""
    caplog.set_level(logging.INFO)
    async with serving(SumScorer(), prometheus_port=0) as running:
        async with stubs_of(running.target, 20) as stubs:
            rows, sums = rows_and_sums(3, 4)
            await asyncio.gather(*(stub.Predict(request(rows)) for stub in stubs))
            os.kill(process_ids(caplog)[0], signal.SIGKILL)
            replies = await asyncio.gather(
                *(stub.Predict(request(rows), timeout=30) for stub in stubs),
                return_exceptions=True,
            )
            async with asyncio.timeout(60):
                while len(process_ids(caplog)) < FRONT_ENDS + 1:
                    await asyncio.sleep(0.05)
        async with stubs_of(running.target, 20) as stubs:
            later = await asyncio.gather(*(stub.Predict(request(rows)) for stub in stubs))
        text = await asyncio.to_thread(scrape, caplog)

    answered = [reply for reply in replies if isinstance(reply, pb.PredictResponse)]
    lost = [reply for reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
    assert len(answered) + len(lost) == 20
    assert answered
    assert {error.code() for error in lost} <= {grpc.StatusCode.UNAVAILABLE}
    for reply in (*answered, *later):
        np.testing.assert_array_equal(array(reply.output), sums)
    assert "qrnn_front_end_restarts_total 1.0" in text
    assert f"qrnn_front_ends_alive {FRONT_ENDS}.0" in text


def scrape(caplog):
    [port] = [record.args[0] for record in caplog.records if record.msg == "metrics port=%d"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read().decode()


async def test_when_no_front_end_can_start_again_the_server_fails(monkeypatch, caplog):
    """Each is given up after five failed starts; with none left the server says so."""

    async def broken(config, fd):
        raise OSError("as was asked")

    caplog.set_level(logging.INFO)
    async with serving(SumScorer(), restart_wait_s=0.001) as running:
        monkeypatch.setattr(front_ends, "_spawn", broken)
        for pid in process_ids(caplog):
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await running.server.failed()

    assert caplog.text.count("front end given up") == FRONT_ENDS
    assert "as was asked" in caplog.text


async def test_one_scrape_shows_all(caplog):
    """Requests of every front end are in one count, and in each stage, within seconds."""
    caplog.set_level(logging.INFO)
    async with serving(SumScorer(), prometheus_port=0) as running:
        async with stubs_of(running.target, 30) as stubs:
            rows, _ = rows_and_sums(3)
            await asyncio.gather(*(stub.Predict(request(rows)) for stub in stubs))
        async with asyncio.timeout(30):
            count = 'qrnn_stage_seconds_count{model="sums",stage="encode"} 30.0'
            while count not in (text := await asyncio.to_thread(scrape, caplog)):
                await asyncio.sleep(0.1)

    assert 'qrnn_requests_total{end="scored",model="sums"} 30.0' in text
    for stage in ("decode", "queue", "upload", "compute", "download"):
        assert f'qrnn_stage_seconds_count{{model="sums",stage="{stage}"}} 30.0' in text


async def test_drain_answers_what_runs_and_refuses_the_rest():
    """A running call is answered, health is NOT_SERVING, and the stop is in order."""
    scorer = SumScorer()
    rows, sums = rows_and_sums(5)
    async with serving(scorer) as running:
        assert await running.health("sums") == "SERVING"
        scorer.gate.clear()
        while scorer.entered.acquire(blocking=False):
            pass
        call = asyncio.ensure_future(running.stub.Predict(request(rows)))
        assert await asyncio.to_thread(scorer.entered.acquire, timeout=20)
        stopping = asyncio.ensure_future(running.server.stop(grace_s=30))
        async with asyncio.timeout(20):
            while await running.health("sums") != "NOT_SERVING":
                await asyncio.sleep(0.01)
        late = await error_of(running.stub.Predict(request(rows)))
        scorer.gate.set()
        reply = await call
        in_order = await stopping

    np.testing.assert_array_equal(array(reply.output), sums)
    assert late.code() == grpc.StatusCode.UNAVAILABLE
    assert in_order


async def test_versions_switch_while_calls_go_on():
    """A reload loses no call; the old version ends once no front end uses it."""
    old, new = SumScorer(), SumScorer()
    rows, sums = rows_and_sums(3, 1)
    async with serving(old) as running, stubs_of(running.target, 8) as stubs:
        versions, done = [], asyncio.Event()

        async def call(stub):
            while not done.is_set():
                reply = await stub.Predict(request(rows, model="sums"))
                np.testing.assert_array_equal(array(reply.output), sums)
                versions.append(reply.version)

        callers = [asyncio.ensure_future(call(stub)) for stub in stubs]
        await asyncio.sleep(0.2)
        await running.server._lifecycle.load(source_of(lambda: new, version="8"))
        async with asyncio.timeout(30):
            while not old.closed:
                await asyncio.sleep(0.01)
        seen = len(versions)
        while len(versions) < seen + 50:
            await asyncio.sleep(0.01)
        done.set()
        await asyncio.gather(*callers)
        await running.server._lifecycle.unload("sums")
        async with asyncio.timeout(30):
            gone = await error_of(running.stub.Predict(request(rows, model="sums")))
        assert new.closed

    assert versions[0] == "7"
    assert set(versions[seen + 8 :]) == {"8"}
    assert gone.code() == grpc.StatusCode.NOT_FOUND


async def test_a_port_in_use_is_a_clear_error():
    """A second server on the port is refused, whichever of both has several front ends."""
    async with serving(SumScorer()) as running:
        port = int(running.target.rpartition(":")[2])
        for count in (1, 2):
            server = Server(ServerConfig(port=port, front_ends=count), source_of(SumScorer))
            with pytest.raises(ConfigError, match="cannot listen"):
                await server.start()
            await server.stop(grace_s=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Server(
            ServerConfig(port=taken.getsockname()[1], front_ends=2), source_of(SumScorer)
        )
        with pytest.raises(ConfigError, match="cannot listen"):
            await server.start()
        await server.stop(grace_s=0)


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_a_real_server_with_front_ends(artefacts, tmp_path, loop):
    """The command: reference scores, SIGTERM with status 0, and no process left, also if killed."""
    rows = random_rows(CONFIGS["ids"], [7, 1, 30, 2, 2, 111])
    expected = scores_by_hand(artefacts["ids"].model, rows)
    options = ("--front-ends", 2, "--event-loop", loop)
    for number, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        path = artefacts["ids"].paths["native"]
        with server_process(path, tmp_path / "log", *options) as server:
            with grpc.insecure_channel(server.target) as channel:
                predict = prediction_pb2_grpc.PredictionServiceStub(channel).Predict
                reply = predict(request(rows), timeout=60)
            ids = [int(pid) for pid in re.findall(r"front end serves pid=(\d+)", server.log)]
            files = [os.pidfd_open(pid) for pid in ids]
            assert server.stop(number) == status, server.log
        np.testing.assert_allclose(array(reply.output), expected, rtol=0, atol=FLOAT32_MAX_ABS)
        assert len(files) == 2
        for file in files:
            assert ended(file), server.log


def ended(pidfd, timeout_s=20):
    import select

    with os.fdopen(pidfd):
        return bool(select.select([pidfd], [], [], timeout_s)[0])
