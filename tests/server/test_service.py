"""PredictionService over a real socket, around a scorer that tests can hold and break."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import (
    KEEPALIVE_MIN_PING_INTERVAL_S,
    KEEPALIVE_PING_S,
    MAX_MESSAGE_BYTES,
)
from qrnn_serve.core.errors import DeadlineExceededError
from qrnn_serve.server import codec, front, service
from qrnn_serve.server.calls import Call, CallGuard
from support.scorers import FEATURE_SCHEMA, POISON, TIMESTEP_SCHEMA, SumScorer
from support.servers import array, request, running_server, tensor


def rows_of(*lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(-9, 10, (t, 2)).astype(np.float32) for t in lengths]


def sums(rows):
    return np.array([row.sum(axis=0) for row in rows])


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def hold(running, scorer):
    """Occupy the replica with one call of one timestep until the gate opens."""
    while scorer.entered.acquire(blocking=False):
        pass
    scorer.gate.clear()
    call = running.stub.Predict(request(rows_of(1)))
    task = asyncio.ensure_future(call)
    assert await asyncio.to_thread(scorer.entered.acquire, timeout=10)
    return task


async def waiting_requests(running, count):
    """Wait until that many requests are in the queue."""
    async with asyncio.timeout(10):
        while running.server.snapshot().depth.requests != count:
            await asyncio.sleep(0)


async def test_predict_scores_every_row():
    """Rows of any length are scored, in order; the reply tells model, version, place and time."""
    rows = rows_of(3, 1, 40)
    async with running_server(SumScorer()) as running:
        reply = await running.stub.Predict(request(rows, model="sums", request_id="my id"))

    np.testing.assert_array_equal(array(reply.rows), [0, 1, 2])
    np.testing.assert_array_equal(array(reply.output), sums(rows))
    assert (reply.model, reply.version, reply.request_id) == ("sums", "7", "my id")
    assert (reply.device, reply.engine) == ("cpu", "native")
    assert (reply.timing.batch_rows, reply.timing.batch_timesteps) == (3, 44)
    assert reply.timing.compute_s > 0


async def test_bad_caller_leaves_its_neighbours_alone():
    """Good, bad dtype, good, at once: the bad one is told what is wrong, the others get scores."""
    scorer = SumScorer()
    good = [rows_of(4, 2, seed=1), rows_of(3, seed=2)]
    bad = request([np.zeros((2, 2))])
    async with running_server(scorer) as running:
        holder = await hold(running, scorer)
        calls = [
            asyncio.ensure_future(running.stub.Predict(message))
            for message in (request(good[0]), bad, request(good[1]))
        ]
        await waiting_requests(running, 2)
        scorer.gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        await holder

    assert scorer.batches[-1] == [4, 2, 3], "the good ones shared a batch"
    np.testing.assert_array_equal(array(results[0].output), sums(good[0]))
    np.testing.assert_array_equal(array(results[2].output), sums(good[1]))
    assert results[1].code() == grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(results[1])
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "values"
    assert "float64" in bad_request.field_violations[0].description


async def test_wrong_rows_come_back_beside_the_scores():
    """A NaN row and a row that breaks the scorer are errors of their own; the third is scored."""
    rows = rows_of(2, 3, 4)
    rows[0][1, 0] = np.nan
    rows[1][2, 1] = POISON
    async with running_server(SumScorer()) as running:
        reply = await running.stub.Predict(request(rows, return_state=True))

    np.testing.assert_array_equal(array(reply.rows), [2])
    np.testing.assert_array_equal(array(reply.output), sums(rows[2:]))
    np.testing.assert_array_equal(array(reply.state), sums(rows[2:]))
    nan, poisoned = reply.errors
    assert (nan.row, nan.code, nan.field, nan.timestep) == (0, 3, "values", 1)
    assert (nan.expected, nan.got) == ("finite numbers", "nan in column 0")
    assert (poisoned.row, poisoned.code, poisoned.timestep) == (1, 13, -1)
    assert "poisoned value" not in poisoned.message, "the model's own exception stays in the log"


async def test_request_of_wrong_rows_alone_reaches_no_replica():
    """When no row can be scored, the reply has the errors and an empty output."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        batches = len(scorer.batches)
        reply = await running.stub.Predict(request([np.full((2, 2), np.inf, np.float32)]))

    assert len(scorer.batches) == batches
    assert array(reply.output).shape == (0, 2)
    assert [error.row for error in reply.errors] == [0]


async def test_carried_state_goes_in_and_out():
    """A sequence in two calls with the state carried is the sequence in one call."""
    [row] = rows_of(9)
    async with running_server(SumScorer(TIMESTEP_SCHEMA)) as running:
        whole = await running.stub.Predict(request([row], return_state=True))
        first = await running.stub.Predict(request([row[:4]], return_state=True))
        second = await running.stub.Predict(
            request([row[4:]], state=array(first.state), return_state=True)
        )

    parts = np.concatenate([array(first.output), array(second.output)])
    np.testing.assert_array_equal(parts, array(whole.output))
    np.testing.assert_array_equal(array(second.state), array(whole.state))
    assert array(whole.output_lengths).tolist() == [9]


async def test_predict_is_stateless():
    """A row scores the same before, after and between other callers' rows: nothing is left over."""
    mine, other = request(rows_of(3, seed=1)), request(rows_of(3, seed=2))
    async with running_server(SumScorer()) as running:
        alone = await running.stub.Predict(mine)
        await running.stub.Predict(other)
        after = await running.stub.Predict(mine)

    assert alone.output == after.output


async def test_unknown_model_and_version_are_not_found():
    """The error names what is served; no name means the only model."""
    async with running_server(SumScorer()) as running:
        model = await code_of(running.stub.Predict(request(rows_of(1), model="other")))
        version = await code_of(running.stub.Predict(request(rows_of(1), version="8")))
        named = await running.stub.Predict(request(rows_of(1), model="sums", version="7"))

    assert model.code() == version.code() == grpc.StatusCode.NOT_FOUND
    assert "'sums'" in model.details()
    assert "'7'" in version.details()
    assert named.version == "7"


async def test_list_models_tells_schema_and_limits():
    """Everything a client needs to make a valid request is in ListModels."""
    async with running_server(SumScorer(), queue_timesteps=1234) as running:
        reply = await running.stub.ListModels(pb.ListModelsRequest())

    [model] = reply.models
    assert (model.name, model.version, model.engine) == ("sums", "7", "native")
    assert (model.input_size, model.output_size, model.state_size) == (2, 2, 2)
    [replica] = model.replicas
    assert (replica.device, replica.state) == ("cpu", pb.REPLICA_STATE_SERVING)
    assert (replica.restarts, replica.last_error) == (0, "")
    assert (model.dtype, list(model.devices)) == (pb.DATA_TYPE_FLOAT32, ["cpu"])
    assert model.weights_sha256 == FEATURE_SCHEMA.weights_sha256
    assert (reply.max_message_bytes, reply.max_request_timesteps) == (MAX_MESSAGE_BYTES, 1234)


async def test_stream_answers_in_order_while_it_is_open():
    """Each message of a stream is answered, in order, without waiting for the stream to end."""
    async with running_server(SumScorer()) as running:
        call = running.stub.PredictStream()
        replies = []
        for number in range(20):
            rows = rows_of(1 + number % 5, seed=number)
            await call.write(request(rows, request_id=str(number)))
            reply = await call.read()
            replies.append((reply.request_id, array(reply.output).tolist()))
        await call.done_writing()
        end = await call.read()

    expected = [
        (str(number), sums(rows_of(1 + number % 5, seed=number)).tolist()) for number in range(20)
    ]
    assert replies == expected
    assert end == grpc.aio.EOF


async def test_stream_scores_several_messages_at_once():
    """Messages sent without waiting are batched together, and answered in order."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        holder = await hold(running, scorer)
        call = running.stub.PredictStream()
        for number in range(5):
            await call.write(request(rows_of(2 + number), request_id=str(number)))
        await waiting_requests(running, 5)
        scorer.gate.set()
        ids = [(await call.read()).request_id for _ in range(5)]
        await call.done_writing()
        await holder

    assert ids == ["0", "1", "2", "3", "4"]
    assert scorer.batches[-1] == [2, 3, 4, 5, 6]


async def test_stream_ends_with_the_status_of_a_wrong_request():
    """A request that is wrong as a whole ends its stream, after the answers before it."""
    async with running_server(SumScorer()) as running:
        call = running.stub.PredictStream()
        await call.write(request(rows_of(1), request_id="good"))
        await call.write(request(rows_of(1), model="other"))
        good = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()

    assert good.request_id == "good"
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


async def test_full_queue_refuses_at_once_while_health_answers():
    """Queue limit 8, 20 calls: 12 are refused while the replica is blocked; health answers."""
    scorer = SumScorer()
    async with running_server(scorer, queue_timesteps=8) as running:
        holder = await hold(running, scorer)
        tasks = [
            asyncio.ensure_future(running.stub.Predict(request(rows_of(1)))) for _ in range(20)
        ]
        await waiting_requests(running, 8)
        async with asyncio.timeout(10):
            while sum(task.done() for task in tasks) < 12:
                await asyncio.sleep(0)
        health = await running.health("")
        models = await running.stub.ListModels(pb.ListModelsRequest())
        scorer.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await holder

    refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
    assert len(refused) == 12
    for error in refused:
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(error).details[0].Unpack(retry)
        pushback_ms = int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])
        assert 0 < retry.retry_delay.ToMilliseconds() <= pushback_ms <= 60_000
    assert health == "SERVING"
    assert len(models.models) == 1


async def test_request_larger_than_the_queue_is_refused_for_ever():
    """A request past the server's limit is told the limit, and not to try again."""
    async with running_server(SumScorer(), queue_timesteps=8) as running:
        error = await code_of(running.stub.Predict(request(rows_of(9))))

    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "at most 8 timesteps" in error.details()
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"


async def test_calls_past_the_concurrency_limit_are_refused():
    """More calls at once than the limit are refused with a time to wait."""
    scorer = SumScorer()
    async with running_server(scorer, max_concurrent_calls=2) as running:
        holder = await hold(running, scorer)
        second = asyncio.ensure_future(running.stub.Predict(request(rows_of(1))))
        await waiting_requests(running, 1)
        error = await code_of(running.stub.Predict(request(rows_of(1))))
        scorer.gate.set()
        await asyncio.gather(holder, second)

    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc_status.from_call(error).details


async def test_cancelled_call_leaves_the_queue():
    """A caller that hangs up while it waits costs no computation."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        holder = await hold(running, scorer)
        leaving = running.stub.Predict(request(rows_of(7)))
        staying = asyncio.ensure_future(running.stub.Predict(request(rows_of(5))))
        task = asyncio.ensure_future(leaving)
        await waiting_requests(running, 2)
        leaving.cancel()
        await waiting_requests(running, 1)
        scorer.gate.set()
        await asyncio.gather(holder, staying)
        with pytest.raises(asyncio.CancelledError):
            await task

    assert scorer.batches[-1] == [5]


async def test_call_past_its_deadline_leaves_the_queue():
    """A caller whose deadline passes is told so and its rows are never scored."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        holder = await hold(running, scorer)
        error = await code_of(running.stub.Predict(request(rows_of(7)), timeout=0.05))
        await waiting_requests(running, 0)
        scorer.gate.set()
        await holder

    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert [7] not in scorer.batches


async def test_deadline_of_the_call_goes_to_the_engine():
    """Rows of a call whose deadline has passed are refused before they are queued."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        prediction = service.PredictionService(running.server._models, CallGuard(1), None)
        late = Call(method="Predict", request_id="late", deadline_s=time.monotonic() - 1)
        with pytest.raises(DeadlineExceededError):
            await prediction.predict(request(rows_of(7)).SerializeToString(), late)

    assert [7] not in scorer.batches


async def test_cancelled_stream_drops_what_it_sent():
    """A stream that hangs up takes its waiting messages out of the queue."""
    scorer = SumScorer()
    async with running_server(scorer) as running:
        holder = await hold(running, scorer)
        call = running.stub.PredictStream()
        for _ in range(3):
            await call.write(request(rows_of(7)))
        await waiting_requests(running, 3)
        call.cancel()
        await waiting_requests(running, 0)
        scorer.gate.set()
        await holder

    assert all(7 not in lengths for lengths in scorer.batches[-2:])


@pytest.mark.parametrize("schema", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["row", "timestep"])
async def test_large_messages_pass_both_ways(schema):
    """A request of almost 60 MiB, and a reply of that size, pass with the shared limits."""
    timesteps = (59 << 20) // 8
    row = np.ones((timesteps, 2), np.float32)
    scorer = SumScorer(schema, max_timesteps=1 << 23)
    async with running_server(scorer, queue_timesteps=1 << 23) as running:
        reply = await running.stub.Predict(request([row]))

    output = array(reply.output)
    expected = timesteps if schema is FEATURE_SCHEMA else np.arange(1, timesteps + 1)
    np.testing.assert_array_equal(output[:, 0], expected)


async def test_message_past_the_limit_is_refused_and_the_server_lives():
    """A message above 64 MiB gets RESOURCE_EXHAUSTED; the next call is answered."""
    options = [("grpc.max_send_message_length", -1)]
    huge = pb.PredictRequest(request_id="x")
    huge.values.data = bytes(MAX_MESSAGE_BYTES + 1)
    async with running_server(SumScorer()) as running:
        async with grpc.aio.insecure_channel(running.target, options=options) as channel:
            predict = channel.unary_unary(f"/{service.SERVICE_NAME}/Predict")
            error = await code_of(predict(huge.SerializeToString()))
        reply = await running.stub.Predict(request(rows_of(2)))

    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert array(reply.rows).tolist() == [0]


async def test_unexpected_error_leaks_nothing(monkeypatch, caplog):
    """An error nobody expected is INTERNAL with a reference; its text is in the log alone."""

    def broken(*args):
        raise RuntimeError("secret path /etc/model")

    async with running_server(SumScorer()) as running:
        monkeypatch.setattr(codec, "encode", broken)
        metadata = (("x-request-id", "trace-1"),)
        error = await code_of(running.stub.Predict(request(rows_of(1)), metadata=metadata))

    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "trace-1" in error.details()
    assert "secret path" in caplog.text


async def test_each_call_has_a_log_line_with_its_request_id(caplog):
    """One line a call, with method, id, code, rows and times; an id cannot forge another line."""
    caplog.set_level(logging.DEBUG, logger="qrnn_serve")
    rows = rows_of(2, 3)
    rows[0][0, 0] = np.nan
    async with running_server(SumScorer()) as running:
        await running.stub.Predict(request(rows, request_id="one\ntwo"))
        await code_of(running.stub.Predict(request(rows, model="other")))

    lines = [r.getMessage() for r in caplog.records if r.name == "qrnn_serve.server.calls"]
    assert len(lines) == 2
    assert (
        r"method=Predict request_id='one\ntwo' code=OK requests=1 rows=2 row_errors=1" in lines[0]
    )
    assert "code=NOT_FOUND" in lines[1]
    assert "\n" not in lines[0]


async def test_bytes_that_are_no_message_are_invalid():
    """Garbage gets INVALID_ARGUMENT, and an unknown method UNIMPLEMENTED."""
    async with running_server(SumScorer()) as running:
        predict = running.channel.unary_unary(f"/{service.SERVICE_NAME}/Predict")
        unknown = running.channel.unary_unary(f"/{service.SERVICE_NAME}/Unknown")
        garbage = await code_of(predict(b"\xff\xff"))
        empty = await code_of(predict(b""))
        missing = await code_of(unknown(b""))

    assert garbage.code() == empty.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert missing.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_prediction_goes_on_while_a_large_message_is_decoded():
    """Small calls are answered while a message of many megabytes is on its way."""
    row = np.ones(((40 << 20) // 8, 2), np.float32)
    scorer = SumScorer(max_timesteps=1 << 23)
    async with running_server(scorer, queue_timesteps=1 << 23) as running:
        large = asyncio.ensure_future(running.stub.Predict(request([row])))
        replies = [await running.stub.Predict(request(rows_of(1))) for _ in range(5)]
        await large

    assert len(replies) == 5


def test_service_has_every_method_of_the_proto():
    """The routes are those of prediction.proto."""
    prediction = service.PredictionService(None, CallGuard(1), None)
    methods = pb.DESCRIPTOR.services_by_name["PredictionService"].methods_by_name

    for name in methods:
        details = type("Details", (), {"method": f"/{service.SERVICE_NAME}/{name}"})()
        assert prediction.handlers().service(details) is not None


def test_keepalive_of_both_sides_fits():
    """The client's pings come less often than the server takes offence at."""
    options = dict(front._OPTIONS)

    accepted_ms = options["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert accepted_ms == KEEPALIVE_MIN_PING_INTERVAL_S * 1000
    assert KEEPALIVE_PING_S > KEEPALIVE_MIN_PING_INTERVAL_S
    assert options["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
    assert tensor(np.zeros(1, np.float32)).data == bytes(4)
