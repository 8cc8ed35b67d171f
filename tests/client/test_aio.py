"""The asyncio client against a real socket."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qrnn_client import (
    AsyncClient,
    Batching,
    ClientError,
    DeadlineError,
    Health,
    InputError,
    InvalidRequestError,
    PredictionError,
    RetryPolicy,
    UnavailableError,
)
from qrnn_client.testing import FakeModel, FakeServer


@pytest.fixture
async def aio_client(server, quick_retry):
    async with AsyncClient(server.target, retry=quick_retry) as client:
        yield client


async def test_async_predictions_run_at_the_same_time(server, aio_client, make_rows, assert_scored):
    """Many predictions are under way at once, and none gets another's scores."""
    jobs = [make_rows(*range(1, 2 + number % 5)) for number in range(50)]
    await aio_client.models()
    holds = [server.hold_next() for _ in range(10)]

    predictions = [asyncio.create_task(aio_client.predict("sums", rows)) for rows in jobs]
    for hold in holds:
        await asyncio.to_thread(hold.arrived.wait, 30)
    for hold in holds:
        hold.release()
    done = await asyncio.gather(*predictions)

    assert len(server.calls) == 50
    for rows, prediction in zip(jobs, done, strict=True):
        assert_scored(prediction.outputs, rows)


async def test_async_answers_that_come_late_stay_with_their_rows(server, make_rows, assert_scored):
    """Five rows in batches of two, the first batch answered last: every row keeps its scores."""
    rows = make_rows(1, 5, 2, 5, 3)
    hold = server.hold_next()

    async with AsyncClient(server.target, batching=Batching(max_rows=2, in_flight=3)) as client:
        job = asyncio.create_task(client.predict("sums", rows))
        await asyncio.to_thread(server.wait_for_answers, 2)
        hold.release()
        prediction = await job

    assert prediction.timing.calls == 3
    assert_scored(prediction.outputs, rows)


@pytest.mark.parametrize("max_rows", [1, 3, 100])
async def test_async_predict_does_what_predict_does(server, client, max_rows, make_rows):
    """Outputs, states and errors are those of the blocking client."""
    rows = [*make_rows(2, 1, 4), None, np.full((1, 3), np.nan, np.float32), *make_rows(3)]
    expected = client.predict("sums", rows, return_state=True, on_error="return")

    async with AsyncClient(server.target, batching=Batching(max_rows=max_rows)) as aio_client:
        got = await aio_client.predict("sums", rows, return_state=True, on_error="return")
        again = await aio_client.predict(
            "sums", rows, states=got.states, return_state=True, on_error="return"
        )

    np.testing.assert_array_equal(scored(got.outputs), scored(expected.outputs))
    np.testing.assert_array_equal(scored(got.states), scored(expected.states))
    np.testing.assert_array_equal(scored(again.states), 2 * scored(expected.states))
    assert got.errors == expected.errors


def scored(values):
    return np.array([value for value in values if value is not None])


async def test_async_predict_raises_with_the_whole_prediction(aio_client, make_rows):
    """A failed row raises; the others' scores are in the exception."""
    with pytest.raises(PredictionError) as caught:
        await aio_client.predict("sums", [*make_rows(1), None])

    assert caught.value.prediction.outputs[0] is not None


async def test_async_retries(server, aio_client, make_rows, assert_scored):
    """Passing failures are retried, others are not."""
    rows = make_rows(2, 3)
    server.fail_next(grpc.StatusCode.UNAVAILABLE, times=3)
    prediction = await aio_client.predict("sums", rows)
    server.fail_next(grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(InvalidRequestError):
        await aio_client.predict("sums", rows)

    assert prediction.timing.attempts == 4
    assert len(server.calls) == 5
    assert_scored(prediction.outputs, rows)


async def test_async_call_meets_its_deadline(server, aio_client, make_rows):
    """Without an answer the call ends at its timeout, is sent once more, and fails."""
    server.drop_next(5)

    with pytest.raises(DeadlineError, match="2 attempts"):
        await aio_client.predict("sums", make_rows(1), timeout_s=0.2)

    assert len(server.calls) == 2


async def test_cancelling_a_prediction_cancels_its_calls(server, make_rows):
    """When the task is cancelled the server learns of it, for every call under way."""
    holds = [server.hold_next(), server.hold_next()]
    batching = Batching(max_rows=1, in_flight=2)
    async with AsyncClient(server.target, batching=batching) as client:
        job = asyncio.create_task(client.predict("sums", make_rows(1, 1, 1)))
        for hold in holds:
            assert await asyncio.to_thread(hold.arrived.wait, 30)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        gone = [await asyncio.to_thread(hold.gone.wait, 30) for hold in holds]

    assert gone == [True, True]
    assert len(server.calls) == 2


async def test_async_failure_cancels_the_calls_beside_it(server, quick_retry, make_rows):
    """A call that is refused ends the prediction at once, and the calls before it too."""
    batching = Batching(max_rows=1, in_flight=4)
    async with AsyncClient(server.target, retry=quick_retry, batching=batching) as client:
        await client.models()
        holds = [server.hold_next() for _ in range(3)]
        server.fail_next(grpc.StatusCode.INVALID_ARGUMENT)
        with pytest.raises(InvalidRequestError):
            await client.predict("sums", make_rows(*[1] * 9))
        gone = [await asyncio.to_thread(hold.gone.wait, 30) for hold in holds]

    assert gone == [True] * 3
    assert len(server.calls) == 4


async def test_async_models_and_health(server, aio_client):
    """What is loaded, and whether it serves."""
    server.health["sums"] = Health.NOT_SERVING

    (info,) = await aio_client.models()
    assert info.name == "sums"
    assert await aio_client.health() is Health.SERVING
    assert await aio_client.health("sums") is Health.NOT_SERVING
    assert await aio_client.health("nobody") is Health.SERVICE_UNKNOWN


async def test_async_client_follows_a_new_version(server, aio_client, make_rows):
    """When the server has switched versions, rows are scored again by the new one."""
    await aio_client.predict("sums", make_rows(1))
    server.models = [FakeModel(score=len, name="sums", version="2", input_size=3)]

    prediction = await aio_client.predict("sums", make_rows(4))

    assert (prediction.version, prediction.outputs[0].tolist()) == ("2", [4])


async def test_async_client_of_no_server():
    """Nobody at the address: the error names it and what to try."""
    with FakeServer() as server:
        target = server.target
    retry = RetryPolicy(connect_s=0.2, first_wait_s=0.05)

    async with AsyncClient(target, retry=retry) as client:
        with pytest.raises(UnavailableError, match=rf"{target}.*Is the server running"):
            await client.models()


async def test_async_client_may_be_made_before_its_loop(server, make_rows):
    """The connection belongs to the loop of the first call, not to where the client was made."""
    client = await asyncio.to_thread(AsyncClient, server.target)

    async with client:
        assert (await client.predict("sums", make_rows(1))).ok


async def test_closed_async_client_says_so(server, make_rows):
    """A client that was closed refuses further calls in its own words."""
    client = AsyncClient(server.target)
    await client.close()

    with pytest.raises(ClientError, match="closed"):
        await client.predict("sums", make_rows(1))


def test_async_client_checks_its_arguments():
    """A target or timeout that is none is refused when the client is made."""
    with pytest.raises(InputError, match="target"):
        AsyncClient("host:port")
    with pytest.raises(InputError, match="timeout_s"):
        AsyncClient("host:1", timeout_s=0)


def write_rows(path, rows):
    features = pa.array([row.tolist() for row in rows], pa.list_(pa.list_(pa.float32(), 3)))
    pq.write_table(pa.table({"id": list(range(len(rows))), "features": features}), path)


async def test_async_score_leaves_the_loop_free(
    server, aio_client, tmp_path, make_rows, assert_scored
):
    """A file is scored while the loop goes on with other predictions."""
    rows = make_rows(1, 2, 3)
    write_rows(tmp_path / "in.parquet", rows)
    await aio_client.models()
    hold = server.hold_next()

    job = asyncio.create_task(
        aio_client.score("sums", tmp_path / "in.parquet", tmp_path / "out.parquet")
    )
    assert await asyncio.to_thread(hold.arrived.wait, 30)
    prediction = await aio_client.predict("sums", rows)
    hold.release()
    report = await job

    assert (report.rows, report.failed) == (3, 0)
    assert_scored(prediction.outputs, rows)
    assert_scored(pq.read_table(tmp_path / "out.parquet")["score"].to_pylist(), rows)


async def test_cancelling_a_file_ends_its_job(server, aio_client, tmp_path, make_rows):
    """When the task is cancelled the calls under way are, and no output is left."""
    write_rows(tmp_path / "in.parquet", make_rows(1, 2))
    hold = server.hold_next()

    job = asyncio.create_task(
        aio_client.score("sums", tmp_path / "in.parquet", tmp_path / "out.parquet")
    )
    assert await asyncio.to_thread(hold.arrived.wait, 30)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job

    assert await asyncio.to_thread(hold.gone.wait, 30)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]
