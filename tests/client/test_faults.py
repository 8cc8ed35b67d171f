"""The client when the server is late, full, wrong, far away, killed or large."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qrnn_client import (
    Batching,
    Client,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RetryPolicy,
    ServerError,
    UnavailableError,
    _channel,
)
from qrnn_client.testing import FakeModel, FakeServer
from qrnn_protos.v1 import limits

SERVER_PROGRAM = Path(__file__).with_name("fake_server_process.py")


def test_scores_stay_with_their_rows_when_answers_come_late(server, assert_scored, make_rows):
    """Five rows in batches of two, the first batch answered last: every row keeps its scores."""
    rows = make_rows(1, 5, 2, 5, 3)
    hold = server.hold_next()

    def release_last():
        server.wait_for_answers(2)
        hold.release()

    releasing = threading.Thread(target=release_last)
    releasing.start()
    with Client(server.target, batching=Batching(max_rows=2, in_flight=3)) as client:
        prediction = client.predict("sums", rows)
    releasing.join()

    assert prediction.timing.calls == 3
    assert_scored(prediction.outputs, rows)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_passing_failures_are_retried(server, client, code, make_rows, assert_scored):
    """A server that is full or away for some calls still scores every row once."""
    rows = make_rows(2, 3)
    server.fail_next(code, times=5)

    prediction = client.predict("sums", rows)

    assert prediction.timing.attempts == 6
    assert_scored(prediction.outputs, rows)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.CANCELLED, ServerError),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
    ],
)
def test_failures_that_would_stay_are_not_retried(server, client, code, error, make_rows):
    """What sending again cannot mend is sent once, and the server's words are in the error."""
    server.fail_next(code, "the server's own words", times=3)

    with pytest.raises(error, match=rf"{server.target}: {code.name} .*the server's own words"):
        client.predict("sums", make_rows(1))

    assert len(server.calls) == 1


def test_call_fails_as_a_whole_when_one_of_several_does(server, quick_retry, make_rows):
    """A call that is refused ends the prediction at once, and the calls before it too."""
    batching = Batching(max_rows=1, in_flight=4)
    with Client(server.target, retry=quick_retry, batching=batching) as client:
        client.models()
        holds = [server.hold_next() for _ in range(3)]
        server.fail_next(grpc.StatusCode.INVALID_ARGUMENT)
        with pytest.raises(InvalidRequestError):
            client.predict("sums", make_rows(*[1] * 9))

    assert all(hold.gone.wait(30) for hold in holds)
    assert len(server.calls) == 4


def test_server_that_never_answers_meets_the_deadline(server, quick_retry, make_rows):
    """Without an answer a call ends at its timeout, is sent once more, and then fails."""
    server.drop_next(10)
    started_s = time.monotonic()

    with (
        Client(server.target, retry=quick_retry, timeout_s=0.2) as client,
        pytest.raises(DeadlineError, match="2 attempts") as caught,
    ):
        client.predict("sums", make_rows(1))

    assert time.monotonic() - started_s < 10
    assert isinstance(caught.value, TimeoutError)
    assert len(server.calls) == 2
    # gRPC rounds what it sends of a deadline up.
    assert all(0 < call.timeout_s < 1 for call in server.calls)


def test_every_call_has_a_deadline_by_default(server, make_rows):
    """Nobody asked for one, and the server still sees a deadline of a minute."""
    with Client(server.target) as client:
        client.predict("sums", make_rows(1))
        client.predict("sums", make_rows(1), timeout_s=7)

    assert 50 < server.calls[0].timeout_s < 61
    assert 5 < server.calls[1].timeout_s < 8


def test_one_lost_answer_is_asked_for_again(server, quick_retry, make_rows, assert_scored):
    """A single call without an answer costs its timeout and nothing else."""
    rows = make_rows(1, 2)
    server.drop_next(1)

    with Client(server.target, retry=quick_retry, timeout_s=0.5) as client:
        assert_scored(client.predict("sums", rows).outputs, rows)


def test_full_server_is_given_up_within_the_budget(server, make_rows):
    """A server that stays full fails with its code when the budget is spent, not later."""
    server.fail_next(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", times=10_000)
    retry = RetryPolicy(total_s=0.5, first_wait_s=0.01, max_wait_s=0.05)
    started_s = time.monotonic()

    with (
        Client(server.target, retry=retry, timeout_s=0.4) as client,
        pytest.raises(OverloadedError, match="queue full") as caught,
    ):
        client.predict("sums", make_rows(1))

    assert caught.value.call.elapsed_s < 2
    assert time.monotonic() - started_s < 5
    assert len(server.calls) > 3


@pytest.mark.parametrize("hint_s", [0.0, 0.3])
def test_servers_hint_sets_the_wait(server, hint_s, make_rows):
    """A client that would wait long comes back when the server says, and not before."""
    retry = RetryPolicy(first_wait_s=100, max_wait_s=100)
    server.fail_next(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=hint_s)
    started_s = time.monotonic()

    with Client(server.target, retry=retry) as client:
        assert client.predict("sums", make_rows(1)).timing.attempts == 2

    assert hint_s <= time.monotonic() - started_s < 50


def test_server_that_asks_to_stay_away_is_obeyed(server, client, make_rows):
    """A negative hint ends the retries."""
    server.fail_next(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=-1, times=3)

    with pytest.raises(OverloadedError, match="1 attempt "):
        client.predict("sums", make_rows(1))


class ServerProcess:
    """A fake server that can be killed, and started again on its port."""

    def __init__(self):
        self.port = 0
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, SERVER_PROGRAM, str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        self.port = int(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def killable():
    server = ServerProcess()
    yield server
    server.kill()


def write_rows(path, rows):
    features = pa.array([row.tolist() for row in rows], pa.list_(pa.list_(pa.float32(), 3)))
    pq.write_table(
        pa.table({"id": [f"id {i}" for i in range(len(rows))], "features": features}), path
    )


def test_job_outlives_a_killed_server(killable, tmp_path, make_rows, assert_scored):
    """The server is killed in the middle and started again: the file has each row once."""
    rows = make_rows(*(1 + number % 4 for number in range(600)))
    write_rows(tmp_path / "in.parquet", rows)
    restarts = []

    def restart(progress):
        if not restarts:
            restarts.append(progress.rows)
            killable.kill()
            killable.start()

    retry = RetryPolicy(first_wait_s=0.05, max_wait_s=0.2)
    batching = Batching(max_rows=10, in_flight=4)
    with (
        pytest.MonkeyPatch.context() as patch,
        Client(f"127.0.0.1:{killable.port}", retry=retry, batching=batching) as client,
    ):
        # Pieces this small are written while most of the file is still to be sent.
        patch.setattr("qrnn_client._score._PIECE", Batching(max_rows=50))
        report = client.score(
            "sums", tmp_path / "in.parquet", tmp_path / "out.parquet", progress=restart
        )

    assert restarts[0] < 600
    assert report.attempts > report.calls == 60
    scores = pq.read_table(tmp_path / "out.parquet")
    assert scores["id"].to_pylist() == [f"id {number}" for number in range(600)]
    assert_scored(scores["score"].to_pylist(), rows)


def test_job_of_a_server_that_stays_away_leaves_no_output(killable, tmp_path, make_rows):
    """When the budget is spent the error names the server, and no half file is left."""
    write_rows(tmp_path / "in.parquet", make_rows(*[2] * 100))
    retry = RetryPolicy(total_s=0.5, first_wait_s=0.05, max_wait_s=0.1)

    with (
        pytest.MonkeyPatch.context() as patch,
        Client(
            f"127.0.0.1:{killable.port}", retry=retry, timeout_s=0.4, batching=Batching(max_rows=5)
        ) as client,
    ):
        patch.setattr("qrnn_client._score._PIECE", Batching(max_rows=10))
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{killable.port}"):
            client.score(
                "sums",
                tmp_path / "in.parquet",
                tmp_path / "out.parquet",
                progress=lambda progress: killable.process.kill(),
            )

    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_messages_above_four_mebibytes(server, make_rows, assert_scored, rng):
    """One call may hold more than gRPC's own default of 4 MiB."""
    rows = list(rng.standard_normal((64, 30_000, 3), dtype=np.float32))
    batching = Batching(max_bytes=60 * 1024 * 1024, max_timesteps=10**9)

    with Client(server.target, batching=batching) as client:
        prediction = client.predict("sums", rows)

    assert server.calls[0].request_bytes > 20 * 1024 * 1024
    assert prediction.timing.calls == 1
    assert_scored(prediction.outputs, rows)


def test_replies_above_four_mebibytes(rng):
    """The same for a reply: small rows whose scores are large."""
    model = FakeModel(
        score=lambda row: row * np.arange(400),
        input_size=1,
        output_size=400,
        output_per_timestep=True,
    )
    rows = [rng.integers(-9, 9, (41, 1)).astype(np.float32) for _ in range(65)]
    batching = Batching(max_bytes=60 * 1024 * 1024)

    with FakeServer(model) as server, Client(server.target, batching=batching) as client:
        prediction = client.predict("model", rows)

    assert prediction.timing.calls == 1
    assert sum(output.nbytes for output in prediction.outputs) > 4 * 1024 * 1024
    for row, output in zip(rows, prediction.outputs, strict=True):
        np.testing.assert_array_equal(output, row * np.arange(400))


def test_a_hundred_megabytes_with_default_settings(server, rng, assert_scored):
    """Many rows are cut so that no message comes near the limits."""
    rows = list(rng.standard_normal((400, 21_000, 3), dtype=np.float32))

    with Client(server.target) as client:
        prediction = client.predict("sums", rows)

    assert sum(row.nbytes for row in rows) > 100_000_000
    assert max(call.request_bytes for call in server.calls) < limits.MAX_MESSAGE_BYTES / 8
    assert sum(len(call.lengths) for call in server.calls) == 400
    assert_scored(prediction.outputs, rows)


def test_row_above_the_servers_limits(model, make_rows, assert_scored):
    """A row that fits no message is an error with size and limit; the others are scored."""
    rows = make_rows(5, 10_000, 7, 300)
    with (
        FakeServer(model, max_message_bytes=100_000, max_request_timesteps=200) as server,
        Client(server.target) as client,
    ):
        prediction = client.predict("sums", rows, on_error="return")

    assert [(error.row, error.got) for error in prediction.errors] == [
        (1, "120,008 bytes"),
        (3, "300 timesteps"),
    ]
    assert "87,500 bytes" in prediction.errors[0].expected
    assert_scored([prediction.outputs[0], prediction.outputs[2]], [rows[0], rows[2]])


@pytest.fixture
def fast_pings(monkeypatch):
    """The shipped keepalive settings with all times divided by 300, so that pings are seen soon."""
    options = dict(_channel.CHANNEL_OPTIONS)
    options["grpc.keepalive_time_ms"] //= 300
    for module in ("_connection", "_aio"):
        monkeypatch.setattr(f"qrnn_client.{module}.CHANNEL_OPTIONS", tuple(options.items()))
    interval_ms = 1000 * limits.KEEPALIVE_MIN_PING_INTERVAL_S // 300
    return ("grpc.http2.min_recv_ping_interval_without_data_ms", interval_ms)


def predict_slowly(server, client, row, *, seconds):
    """Predict while the server takes its time; return the outputs."""
    hold = server.hold_next()
    releasing = threading.Timer(seconds, hold.release)
    releasing.start()
    try:
        return client.predict("sums", [row]).outputs
    finally:
        releasing.cancel()


def test_pings_during_a_long_call_are_welcome(model, fast_pings, make_rows, assert_scored):
    """Ten keepalive intervals into one call, the server has not sent the client away."""
    (row,) = make_rows(3)
    with (
        FakeServer(model, options=[fast_pings]) as server,
        Client(server.target, retry=RetryPolicy(max_attempts=1)) as client,
    ):
        outputs = predict_slowly(server, client, row, seconds=2.0)

    assert_scored(outputs, [row])


def test_pings_are_sent_during_a_long_call(model, fast_pings, make_rows):
    """The same client is sent away by a server with gRPC's own rules: so pings are really sent."""
    (row,) = make_rows(3)
    strict = ("grpc.http2.min_recv_ping_interval_without_data_ms", 300_000)
    with (
        FakeServer(model, options=[strict]) as server,
        Client(server.target, retry=RetryPolicy(max_attempts=1)) as client,
        pytest.raises(UnavailableError, match="Too many pings"),
    ):
        predict_slowly(server, client, row, seconds=20.0)


def test_calls_are_shared_by_servers_and_left_to_the_living(model, quick_retry, make_rows):
    """Two addresses get half of the calls each; when one server stops, the other gets the rest."""
    rows = make_rows(1)
    with (
        FakeServer(model) as first,
        FakeServer(model) as second,
        Client(f"{first.target},{second.target}", retry=quick_retry) as client,
    ):
        for _ in range(20):
            client.predict("sums", rows)
        before = len(first.calls), len(second.calls)
        for _ in range(100):
            client.predict("sums", rows)
        shares = len(first.calls) - before[0], len(second.calls) - before[1]
        first.stop()
        for _ in range(10):
            client.predict("sums", rows)
        after = len(second.calls) - before[1] - shares[1]

    assert sum(shares) == 100
    assert min(shares) >= 40
    assert after == 10
