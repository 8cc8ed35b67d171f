"""The blocking client against a real socket."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from qrnn_client import (
    Batching,
    Client,
    ClientError,
    Health,
    InputError,
    ModelNotFoundError,
    PackedRows,
    PredictionError,
    ProtocolError,
    RetryPolicy,
    UnavailableError,
    _connection,
)
from qrnn_client.testing import FakeModel, FakeServer


def test_predict_scores_rows_of_any_length(client, make_rows, assert_scored):
    """Every row gets its own scores, in order, with the model and version that gave them."""
    rows = make_rows(1, 5, 2, 5, 300)

    prediction = client.predict("sums", rows)

    assert prediction.ok
    assert (prediction.model, prediction.version, prediction.engine) == ("sums", "1", "fake")
    assert prediction.states is None
    assert prediction.timing.calls == prediction.timing.attempts == 1
    assert_scored(prediction.outputs, rows)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 100])
def test_predict_cuts_rows_into_calls(server, max_rows, make_rows, assert_scored):
    """However the rows are cut, each goes once and the answers come back in order."""
    rows = make_rows(*(1 + i % 5 for i in range(23)))

    with Client(server.target, batching=Batching(max_rows=max_rows, in_flight=3)) as client:
        prediction = client.predict("sums", rows)

    assert prediction.timing.calls == -(-23 // max_rows)
    sent = [call.lengths for call in sorted(server.calls, key=lambda call: call.request_id)]
    assert sorted(length for call in sent for length in call) == sorted(map(len, rows))
    assert all(call.request_id.startswith(prediction.request_id) for call in server.calls)
    assert_scored(prediction.outputs, rows)


def test_predict_names_rows_by_the_callers_index(server, make_rows, assert_scored):
    """Errors of the client and of the server, over several calls, name the caller's rows."""
    rows = make_rows(*(1 + i % 3 for i in range(12)))
    rows[2] = rows[2][:, :2]
    rows[5] = None
    for bad in (1, 6, 11):
        rows[bad] = np.full((2, 3), np.nan, np.float32)
    good = [row for i, row in enumerate(rows) if i not in (1, 2, 5, 6, 11)]

    with Client(server.target, batching=Batching(max_rows=3)) as client:
        prediction = client.predict("sums", rows, on_error="return")

    assert [error.row for error in prediction.errors] == [1, 2, 5, 6, 11]
    assert {error.code for error in prediction.errors} == {"INVALID_ARGUMENT"}
    assert [output is None for output in prediction.outputs] == [
        row is None or i in (1, 2, 6, 11) for i, row in enumerate(rows)
    ]
    assert_scored([output for output in prediction.outputs if output is not None], good)
    assert not prediction.ok


def test_predict_raises_with_the_whole_prediction(client, make_rows, assert_scored):
    """By default a failed row raises, and the other rows' scores are in the exception."""
    rows = make_rows(2, 1)

    with pytest.raises(PredictionError, match=r"1 of 3 rows .* row 1: values: expected") as caught:
        client.predict("sums", [rows[0], np.zeros((1, 7), np.float32), rows[1]])

    outputs = caught.value.prediction.outputs
    assert outputs[1] is None
    assert_scored([outputs[0], outputs[2]], rows)


@pytest.mark.parametrize("rows", [[], np.zeros((0, 4, 3), np.float32)], ids=["list", "array"])
def test_predict_without_rows_sends_nothing(server, client, rows):
    """No rows: an empty prediction that still names the model."""
    prediction = client.predict("sums", rows, return_state=True)

    assert (prediction.outputs, prediction.errors, prediction.states) == ([], [], [])
    assert (prediction.model, prediction.version) == ("sums", "1")
    assert server.calls == []


def test_predict_when_no_row_can_be_sent(server, client):
    """Only bad rows: an error for each, and no call."""
    prediction = client.predict("sums", [None, "x"], on_error="return", return_state=True)

    assert [error.row for error in prediction.errors] == [0, 1]
    assert prediction.states == [None, None]
    assert server.calls == []


def test_predict_per_timestep(quick_retry, make_rows):
    """A model with one vector a timestep gives each row its own matrix, also over several calls."""
    rows = make_rows(3, 1, 40, 2, 5)
    model = FakeModel(
        score=lambda row: np.cumsum(row, axis=0)[:, :2],
        input_size=3,
        output_size=2,
        output_per_timestep=True,
    )

    with (
        FakeServer(model) as server,
        Client(server.target, batching=Batching(max_rows=2)) as client,
    ):
        prediction = client.predict("model", [*rows, np.full((1, 3), np.inf)], on_error="return")

    assert prediction.outputs[5] is None
    for row, output in zip(rows, prediction.outputs, strict=False):
        np.testing.assert_allclose(output, np.cumsum(row, axis=0)[:, :2], rtol=1e-6)


def test_predict_of_ids(make_rows, rng):
    """Token ids arrive as they were given, from arrays or lists."""
    model = FakeModel(score=lambda row: row.sum(), vocabulary_size=1000)
    rows = [rng.integers(0, 1000, n) for n in (5, 1, 300)]

    with FakeServer(model) as server, Client(server.target) as client:
        prediction = client.predict("model", [*rows, [1, 2, 3]])

    assert [float(output[0]) for output in prediction.outputs] == [
        *(float(r.sum()) for r in rows),
        6,
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_predict_in_every_float_type(dtype, make_rows):
    """Values and outputs travel in the model's own type."""
    model = FakeModel(score=lambda row: row[-1, :2], input_size=3, output_size=2, dtype=dtype)
    rows = make_rows(2, 1, 9)

    with FakeServer(model) as server, Client(server.target) as client:
        outputs = client.predict("model", rows).outputs

    assert {output.dtype.name for output in outputs} == {dtype}
    for row, output in zip(rows, outputs, strict=True):
        np.testing.assert_array_equal(output, row[-1, :2].astype(output.dtype))


def test_predict_carries_states(server, client, make_rows):
    """States come back by row, go in again, and a row that failed has none."""
    rows = make_rows(2, 3, 4)

    first = client.predict("sums", [*rows, None], return_state=True, on_error="return")
    second = client.predict("sums", [*rows, rows[0]], states=first.states, return_state=True)

    assert first.states[3] is None
    np.testing.assert_array_equal(first.states[:3], np.array([[2], [3], [4]]) * np.ones(4))
    np.testing.assert_array_equal(second.states, np.array([[4], [6], [8], [2]]) * np.ones(4))


def test_predict_of_packed_rows(client, make_rows, assert_scored):
    """Packed rows are scored like a list of them."""
    rows = make_rows(4, 1, 6)

    prediction = client.predict("sums", PackedRows(np.concatenate(rows), [4, 1, 6]))

    assert_scored(prediction.outputs, rows)


def test_predict_needs_no_name_where_one_model_is_loaded(client, model, make_rows, server):
    """An empty name is the only model; with several the error lists them."""
    assert client.predict("", make_rows(1)).model == "sums"

    server.models = [model, FakeModel(score=len, name="other", input_size=3)]
    with pytest.raises(InputError, match=r"\['other', 'sums'\]"), Client(server.target) as fresh:
        fresh.predict("", make_rows(1))


@pytest.mark.parametrize("version", ["", "9"])
def test_predict_of_an_unknown_model_lists_those_that_are_loaded(client, make_rows, version):
    """The error names what was asked for and what there is, before anything is sent."""
    name = "sums" if version else "sum"
    with pytest.raises(ModelNotFoundError, match="loaded: 'sums' version '1'") as caught:
        client.predict(name, make_rows(1), version=version)

    assert caught.value.call.code is grpc.StatusCode.NOT_FOUND


def test_predict_notices_a_model_that_was_loaded_later(server, client, model, make_rows):
    """A name that the client does not know yet is looked up again."""
    client.predict("sums", make_rows(1))
    server.models = [model, FakeModel(score=len, name="other", input_size=3)]

    assert client.predict("other", make_rows(5)).outputs[0].tolist() == [5]


def test_predict_follows_a_new_version(server, client, make_rows):
    """When the server has switched versions, rows are checked and scored again by the new one."""
    client.predict("sums", make_rows(1))
    server.models = [FakeModel(score=len, name="sums", version="2", input_size=5, output_size=1)]

    prediction = client.predict("sums", make_rows(4, width=5))

    assert prediction.version == "2"
    assert prediction.outputs[0].tolist() == [4]


def test_predict_never_mixes_versions(server, make_rows):
    """A switch between two calls of one prediction scores all rows again, by the new version."""
    second = FakeModel(
        score=lambda row: [len(row), 0], name="sums", version="2", input_size=3, output_size=2
    )
    server.pass_next()
    hold = server.hold_next()

    def switch():
        hold.arrived.wait()
        server.models = [second]
        hold.release()

    switching = threading.Thread(target=switch)
    switching.start()
    with Client(server.target, batching=Batching(max_rows=2, in_flight=1)) as client:
        prediction = client.predict("sums", make_rows(1, 2, 3, 4))
    switching.join()

    assert prediction.version == "2"
    assert [output.tolist() for output in prediction.outputs] == [[1, 0], [2, 0], [3, 0], [4, 0]]
    assert [call.lengths for call in server.calls] == [(1, 2), (3, 4)] * 2


def test_predict_refuses_a_reply_that_names_rows_twice(server, client, make_rows):
    """A reply with a row twice gives out no score at all."""
    server.tamper_next(lambda reply: setattr(reply.rows, "data", np.array([0, 0]).tobytes()))

    with pytest.raises(ProtocolError, match=r"missing \[1\]"):
        client.predict("sums", make_rows(1, 2))


def test_models_and_health(server, client):
    """What is loaded, and whether it serves, of the server and of each model."""
    server.health["sums"] = Health.NOT_SERVING

    (info,) = client.models()
    assert (info.name, info.input_size, info.output_size, info.dtype) == ("sums", 3, 2, "float32")
    assert info.expects == "features [T, 3] float32"
    assert client.health() is Health.SERVING
    assert client.health("sums") is Health.NOT_SERVING
    assert client.health("nobody") is Health.SERVICE_UNKNOWN


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_server_is_said_clearly_and_soon():
    """Nobody at the address: the error names it and what to try, within the connect budget."""
    target = f"127.0.0.1:{unused_port()}"
    started_s = time.monotonic()

    with (
        Client(target, retry=RetryPolicy(connect_s=0.3, first_wait_s=0.05)) as client,
        pytest.raises(UnavailableError, match=rf"{target}.*Is the server running") as caught,
    ):
        client.predict("sums", [])

    assert time.monotonic() - started_s < 5
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.call.attempts > 1


def test_health_of_no_server():
    """A health check of nobody raises at once."""
    with (
        Client(f"127.0.0.1:{unused_port()}") as client,
        pytest.raises(UnavailableError, match="1 attempt"),
    ):
        client.health()


def test_wait_for_ready_waits_for_the_server(model, make_rows, assert_scored):
    """With wait_for_ready a client that was first scores as soon as the server is there."""
    server = FakeServer(model, port=unused_port())
    retry = RetryPolicy(connect_s=0.01, first_wait_s=0.01, max_wait_s=0.05)
    rows = make_rows(1, 2)
    outputs = []

    with Client(server.target, retry=retry, wait_for_ready=True) as client:
        job = threading.Thread(target=lambda: outputs.extend(client.predict("sums", rows).outputs))
        job.start()
        with server:
            job.join()

    assert_scored(outputs, rows)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("calls", [1, 3])
def test_interrupt_ends_a_prediction(server, make_rows, assert_scored, calls):
    """Ctrl-C raises at once, the server learns that nobody waits, and the client still works."""
    holds = [server.hold_next() for _ in range(calls)]
    rows = make_rows(1, 2, 3)

    def interrupt():
        for hold in holds:
            hold.arrived.wait()
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    with Client(server.target, batching=Batching(max_rows=1)) as client:
        client.models()
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            client.predict("sums", make_rows(*[1] * calls))
        gone = [hold.gone.wait(30) for hold in holds]
        prediction = client.predict("sums", rows)
    interrupting.join()

    assert gone == [True] * calls
    assert_scored(prediction.outputs, rows)


def test_interrupted_channel_is_left_alone(server, make_rows):
    """An interrupt inside gRPC may leave a lock held: no thread may meet that channel again."""
    with Client(server.target) as client:
        client.predict("sums", make_rows(1))
        connection = client._connections.of_this_thread()

        def interrupted(request, timeout):
            raise KeyboardInterrupt

        connection.methods = dict.fromkeys(connection.methods, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.predict("sums", make_rows(1))

        assert connection.channel in _connection._interrupted_channels
        assert client._connections.of_this_thread() is not connection
        assert client.predict("sums", make_rows(1)).ok


def test_main_thread_has_a_channel_to_itself(server):
    """What an interrupt breaks in the main thread's channel is not shared with other threads."""
    with Client(server.target) as client, ThreadPoolExecutor(2) as pool:
        connections = [pool.submit(client._connections.of_this_thread).result() for _ in range(4)]
        own = client._connections.of_this_thread()

    assert len(set(connections)) == 1
    assert own is not connections[0]


def test_closed_client_says_so(server, make_rows):
    """A client that was closed refuses further calls in its own words."""
    client = Client(server.target)
    client.close()

    with pytest.raises(ClientError, match="closed"):
        client.predict("sums", make_rows(1))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_timeouts_that_are_none(server, timeout_s, make_rows):
    """A timeout must be a length of time, for the client and for a call."""
    with pytest.raises(InputError, match="timeout_s"):
        Client(server.target, timeout_s=timeout_s)
    with pytest.raises(InputError, match="timeout_s"), Client(server.target) as client:
        client.predict("sums", make_rows(1), timeout_s=timeout_s)


def test_threads_share_a_client(client, make_rows, assert_scored):
    """Predictions of many threads over one client do not mix."""
    jobs = [make_rows(1 + number, 2, 3 + number) for number in range(16)]
    outputs = [None] * len(jobs)

    def work(number):
        outputs[number] = client.predict("sums", jobs[number]).outputs

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for rows, got in zip(jobs, outputs, strict=True):
        assert_scored(got, rows)
