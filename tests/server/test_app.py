"""Life of a server: readiness, health, shutdown, failure of its model, ports."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.types import StageTimes
from qrnn_serve.server.app import Server, serve
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.stages import STAGES
from support.scorers import TIMESTEP_SCHEMA, SumScorer, whole_number_rows
from support.servers import CLIENT_OPTIONS, array, request, running_server, source_of

SERVICE = "qrnn_serve.v1.PredictionService"


def message(length=2):
    return request([whole_number_rows([length]).values])


async def start_call(running, scorer):
    scorer.gate.clear()
    while scorer.entered.acquire(blocking=False):
        pass
    task = asyncio.ensure_future(running.stub.Predict(message()))
    assert await asyncio.to_thread(scorer.entered.acquire, timeout=10)
    return task


async def test_health_serves_each_name_once_ready():
    """The server, the service and the model are SERVING; another name is not found."""
    async with running_server(SumScorer()) as running:
        statuses = [await running.health(name) for name in ("", SERVICE, "sums")]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await running.health("other")

    assert statuses == ["SERVING"] * 3
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_server_is_not_ready_before_its_warm_up_is_done():
    """While the model loads and warms up, health says NOT_SERVING and calls get UNAVAILABLE."""
    scorer = SumScorer()
    scorer.gate.clear()
    server = Server(ServerConfig(port=0), source_of(lambda: scorer))
    starting = asyncio.ensure_future(server.start())
    assert await asyncio.to_thread(scorer.entered.acquire, timeout=10)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        before = await check(health_pb2.HealthCheckRequest())
        predict = channel.unary_unary(f"/{SERVICE}/Predict")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await predict(message().SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as unlisted:
            await channel.unary_unary(f"/{SERVICE}/ListModels")(b"")
        scorer.gate.set()
        await starting
        after = await check(health_pb2.HealthCheckRequest())
    assert await server.stop(grace_s=5)

    assert before.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert refused.value.code() == unlisted.value.code() == grpc.StatusCode.UNAVAILABLE
    assert after.status == health_pb2.HealthCheckResponse.SERVING


async def test_every_watcher_hears_of_the_shutdown():
    """Two watchers of one name and one of a model are told, also after another watcher has left."""
    async with running_server(SumScorer()) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "", "", "sums")
        ]
        first = [(await watch.read()).status for watch in watches]
        watches.pop(0).cancel()
        await running.health("")
        await running.server.stop(grace_s=5)
        last = [(await watch.read()).status for watch in watches]
        ends = [await watch.read() for watch in watches]

    assert first == [health_pb2.HealthCheckResponse.SERVING] * 4
    assert last == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
    assert ends == [grpc.aio.EOF] * 3


async def test_watch_of_an_unknown_name_waits_for_it():
    """Watching a name that is not served is no error: it may come later."""
    async with running_server(SumScorer()) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="later"))
        status = (await watch.read()).status
        watch.cancel()

    assert status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_stop_lets_the_running_call_end_and_refuses_new_ones():
    """At shutdown health turns at once, a new call gets UNAVAILABLE, the running one its scores."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        call = await start_call(running, scorer)
        stopping = asyncio.ensure_future(running.server.stop(grace_s=30))
        await asyncio.sleep(0)
        health = await running.health("")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Predict(message())
        assert not stopping.done()
        scorer.gate.set()
        reply = await call
        in_order = await stopping

    assert health == "NOT_SERVING"
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert len(reply.rows.data) == 8
    assert in_order


class SlowReader:
    """A connection that takes 256 kB of a server's bytes, and the rest once `go_on` is set."""

    def __init__(self, target):
        self.host, _, self.port = target.rpartition(":")
        self.go_on = asyncio.Event()
        self.copies = []
        self.writers = []

    async def __aenter__(self):
        self.listener = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self.listener.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error):
        self.listener.close()
        for copy in self.copies:
            copy.cancel()
        for writer in self.writers:
            writer.close()
        waits = [*self.copies, *(writer.wait_closed() for writer in self.writers)]
        await asyncio.gather(*waits, return_exceptions=True)

    async def connect(self, reader, writer):
        # Small, so that a reply of megabytes cannot hide in the buffers between the two.
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        near.setblocking(False)
        await asyncio.get_running_loop().sock_connect(near, (self.host, int(self.port)))
        server_reader, server_writer = await asyncio.open_connection(sock=near)
        self.writers += [writer, server_writer]
        self.copies += [
            asyncio.ensure_future(self.copy(reader, server_writer)),
            asyncio.ensure_future(self.copy(server_reader, writer, at_once=1 << 18)),
        ]

    async def copy(self, reader, writer, at_once=None):
        taken = 0
        while data := await reader.read(1 << 16):
            taken += len(data)
            if at_once is not None and taken > at_once:
                await self.go_on.wait()
            writer.write(data)
            await writer.drain()


async def test_stop_waits_until_a_slow_client_has_its_reply():
    """A reply of megabytes that the client is still reading when its call has ended is not cut."""
    rows = [whole_number_rows([1000]).values] * 1000
    async with running_server(SumScorer(TIMESTEP_SCHEMA)) as running:
        slow = SlowReader(running.target)
        async with (
            slow as target,
            grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel,
        ):
            stub = prediction_pb2_grpc.PredictionServiceStub(channel)
            call = asyncio.ensure_future(stub.Predict(request(rows)))
            while running.server.snapshot().counts.timesteps < 1_000_000:
                await asyncio.sleep(0.01)
            stop = asyncio.ensure_future(running.server.stop(grace_s=20))
            await asyncio.wait((stop,), timeout=1.5)
            stopped_before = stop.done()
            slow.go_on.set()
            reply = await asyncio.wait_for(call, timeout=30)
            in_order = await stop

    assert not stopped_before
    assert len(array(reply.output)) == 1_000_000
    assert in_order


async def test_stop_ends_calls_that_outlast_the_grace_period():
    """After the grace period a call that still runs gets UNAVAILABLE, and the stop says so."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        call = await start_call(running, scorer)
        in_order = await running.server.stop(grace_s=0.01)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call

    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not in_order


async def test_stop_answers_what_an_open_stream_sent():
    """A stream that is open at shutdown gets the answers it waits for, then UNAVAILABLE."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        scorer.gate.clear()
        while scorer.entered.acquire(blocking=False):
            pass
        stream = running.stub.PredictStream()
        await stream.write(message())
        assert await asyncio.to_thread(scorer.entered.acquire, timeout=10)
        stopping = asyncio.ensure_future(running.server.stop(grace_s=30))
        await asyncio.sleep(0)
        scorer.gate.set()
        reply = await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert await stopping

    assert len(reply.rows.data) == 8
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_dead_model_turns_health_and_ends_the_process():
    """A model that fails on everything is NOT_SERVING at once and the server ends with status 1."""
    scorer = SumScorer()
    announced = asyncio.get_running_loop().create_future()
    config = ServerConfig(port=0, grace_s=5, restart_wait_s=0.01)
    serving = asyncio.ensure_future(serve(config, source_of(lambda: scorer), announced.set_result))
    async with grpc.aio.insecure_channel(await announced) as channel:
        scorer.dead = True
        predict = channel.unary_unary(f"/{SERVICE}/Predict")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await predict(message().SerializeToString())
        status = await asyncio.wait_for(serving, timeout=30)

    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert status == 1


async def list_services(running):
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    reply = await stub.ServerReflectionInfo(iter([asked])).read()
    return {entry.name for entry in reply.list_services_response.service}


async def test_reflection_is_on_for_loopback_addresses_unless_told():
    """On a loopback address the services can be listed; with --no-reflection they cannot."""
    async with running_server(SumScorer()) as running:
        names = await list_services(running)
    async with running_server(SumScorer(), reflection=False) as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        hidden = await stub.ServerReflectionInfo().code()

    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert hidden == grpc.StatusCode.UNIMPLEMENTED
    assert ServerConfig(host="0.0.0.0").reflects is False
    assert ServerConfig(host="::1").reflects is True


async def test_metrics_tell_what_the_engine_did(caplog):
    """Rows, timesteps, request ends and queue depth can be scraped over HTTP."""
    caplog.set_level(logging.INFO)
    scorer = SumScorer()
    async with running_server(scorer, prometheus_port=0) as running:
        scorer.graphs, scorer.replayed = 7, 1
        await running.stub.Predict(message(5))
        [port] = [record.args[0] for record in caplog.records if record.msg == "metrics port=%d"]
        text = await asyncio.to_thread(scrape, port)

    assert 'qrnn_rows_total{model="sums"} 1.0' in text
    assert 'qrnn_timesteps_total{model="sums"} 5.0' in text
    assert 'qrnn_requests_total{end="scored",model="sums"} 1.0' in text
    assert 'qrnn_queue_timesteps{model="sums"} 0.0' in text
    assert 'qrnn_padded_timesteps_total{model="sums"} 0.0' in text
    assert 'qrnn_replicas_alive{model="sums"} 1.0' in text
    assert 'qrnn_requests_retried_total{model="sums"} 0.0' in text
    labels = 'device="cpu",model="sums",replica="0"'
    for state, value in (("starting", 0.0), ("serving", 1.0), ("given_up", 0.0)):
        assert f'qrnn_replica_state{{{labels},state="{state}"}} {value}' in text
    assert f"qrnn_batch_budget_timesteps{{{labels}}} " in text
    assert f"qrnn_graphs{{{labels}}} 7.0" in text
    assert 'qrnn_graph_replays_total{model="sums"} 1.0' in text
    for term in ("fixed", "per_timestep", "per_longest", "per_row"):
        assert f'qrnn_cost_seconds{{{labels},term="{term}"}} ' in text
    for name in ("predicted", "batch", "queue"):
        assert f'qrnn_{name}_seconds_total{{model="sums"}} ' in text


async def test_metrics_have_a_histogram_of_each_stage(caplog):
    """Each request counts once in each stage, in the buckets above its seconds, and in the sum."""
    caplog.set_level(logging.INFO)
    scorer = SumScorer()
    scorer.times = StageTimes(upload_s=0.002, compute_s=0.03, download_s=1000)
    async with running_server(scorer, prometheus_port=0) as running:
        for _ in range(3):
            reply = await running.stub.Predict(message(5))
        [port] = [record.args[0] for record in caplog.records if record.msg == "metrics port=%d"]
        samples = parse_samples(await asyncio.to_thread(scrape, port), "qrnn_stage_seconds")

    def bucket(stage, bound):
        return samples["_bucket", stage, bound]

    assert {stage for _, stage, _ in samples} == set(STAGES)
    for stage in STAGES:
        assert samples["_count", stage, None] == bucket(stage, "+Inf") == 3
    assert (bucket("upload", "0.001"), bucket("upload", "0.0025")) == (0, 3)
    assert (bucket("compute", "0.025"), bucket("compute", "0.05")) == (0, 3)
    assert (bucket("download", "5"), bucket("download", "+Inf")) == (0, 3)
    assert samples["_sum", "compute", None] == pytest.approx(0.09)
    assert 1000 < reply.timing.download_s < 1100
    assert reply.timing.compute_s == 0.03
    assert 0 < samples["_sum", "decode", None] < 1


def parse_samples(text, family):
    """The samples of a family by suffix, stage and bucket."""
    [found] = [f for f in text_string_to_metric_families(text) if f.name == family]
    return {
        (s.name.removeprefix(family), s.labels["stage"], s.labels.get("le")): s.value
        for s in found.samples
    }


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read().decode()


async def test_metrics_port_in_use_is_a_clear_error():
    """A metrics port that cannot be listened on stops the start and is named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=0, prometheus_port=taken.getsockname()[1])
        server = Server(config, source_of(SumScorer))
        with pytest.raises(ConfigError, match="prometheus_port"):
            await server.start()
        await server.stop(grace_s=0)


async def test_port_in_use_is_a_clear_error():
    """A second server on a port is refused, and the message says what to do."""
    async with running_server(SumScorer()) as running:
        second = Server(ServerConfig(port=running.server.port), source_of(SumScorer))
        with pytest.raises(ConfigError, match=r"--port 0 picks a free port"):
            await second.start()
        await second.stop(grace_s=0)


async def test_model_that_cannot_load_stops_the_start():
    """What the loader raises is what starting raises."""

    def load():
        raise ConfigError("no such device")

    with pytest.raises(ConfigError, match="no such device"):
        await serve(ServerConfig(port=0), source_of(load), print)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"max_batch_rows": 0}, "max_batch_rows"),
        ({"queue_timesteps": 0}, "queue_timesteps"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"batch_ms": 0.0}, "batch_ms"),
        ({"batch_ms": math.inf}, "batch_ms"),
        ({"batch_wait_ms": -1.0}, "batch_wait_ms"),
        ({"threads": 0}, "threads"),
        ({"name": ""}, "name"),
    ],
)
def test_config_names_the_wrong_setting(settings, field):
    """A setting out of range is refused by name."""
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**settings)
