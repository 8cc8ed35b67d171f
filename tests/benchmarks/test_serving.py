"""The comparison with other servers: callers, checks and tables; and our own server in it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest

import serving
import serving_servers
from qrnn_protos.v1 import prediction_pb2 as pb
from serving_cases import CASES, WIDTH, Case, inputs_of, make_model
from serving_faults import bad_neighbour, poisons
from serving_load import Inputs, WrongNumbersError, load
from serving_report import summary, tables, write_report
from serving_servers import ALL, OURS_NAME, PEERS, NotInstalledError
from serving_wire import KSERVE, LITSERVE, MOSEC, OURS, AnswerError, Wire, http_to, kserve


@pytest.fixture(scope="module")
def model_and_file(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def numbers(rows, timesteps):
    return np.random.default_rng(rows).standard_normal((rows, timesteps, WIDTH), np.float32)


class Pretended:
    """Connections to a function of all messages that come within a millisecond."""

    def __init__(self, answer_batch, callers):
        self.calls = [self.call] * callers
        self.answer_batch = answer_batch
        self.waiting = []

    async def call(self, message):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((message, future))
        if len(self.waiting) == 1:
            self.answering = asyncio.create_task(self.answer())
        return await future

    async def answer(self):
        await asyncio.sleep(0.001)
        batch, self.waiting = self.waiting, []
        try:
            answers = self.answer_batch([message for message, _ in batch])
        except ValueError as error:
            for _, future in batch:
                future.set_exception(AnswerError(str(error)))
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)

    async def close(self):
        self.waiting = []


def pretended_wire(answer_batch):
    async def connect(port, callers):
        return Pretended(answer_batch, callers)

    def encode(values):
        return values.tobytes()

    def decode(answer):
        return np.frombuffer(answer, np.float32).reshape(1, 1)

    return Wire(encode=encode, decode=decode, connect=connect)


def sums(messages):
    """Scores: the sum of each message."""
    return [np.frombuffer(m, np.float32).sum(keepdims=True).tobytes() for m in messages]


def sum_inputs(calls):
    values = [numbers(1, length + 1) for length in range(calls)]
    return Inputs(values=values, scores=[v.sum(keepdims=True).reshape(1, 1) for v in values])


def test_messages_hold_the_numbers():
    """What each kind of server reads is what was to be scored."""
    values = numbers(3, 5)

    ours = pb.PredictRequest.FromString(OURS.encode(values))
    triton = kserve.ModelInferRequest.FromString(KSERVE.encode(values))
    raw, text = MOSEC.encode(values), json.loads(LITSERVE.encode(values))

    assert ours.values.data == triton.raw_input_contents[0] == raw[8:] == values.tobytes()
    assert list(ours.values.shape) == [15, WIDTH]
    assert np.frombuffer(ours.lengths.data, np.int64).tolist() == [5, 5, 5]
    assert list(triton.inputs[0].shape) == [3, 5, WIDTH]
    assert int.from_bytes(raw[:8], "little") == text["rows"] == 3


def test_row_error_is_no_answer():
    """Our server answers a wrong row within a reply that is well."""
    reply = pb.PredictResponse(errors=[pb.RowError(row=0, message="values: expected finite")])

    with pytest.raises(AnswerError, match="finite"):
        OURS.decode(reply.SerializeToString())


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"HTTP/1.1 500 Internal\r\nContent-Length: 4\r\n\r\nlost", "500.*lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", "no answer"),
        (b"", "no answer"),
    ],
)
async def test_http_failure_is_an_error(reply, told):
    """Another status, a body that is cut and a closed connection are no answers."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connections = await http_to("/x", "text/plain")(port, 1)
        with pytest.raises(AnswerError, match=told):
            await connections.calls[0](b"")
        await connections.close()


async def test_http_answers_come_over_one_connection():
    """A caller keeps its connection, and gets the body that belongs to its call."""
    connected = []

    async def serve(reader, writer):
        connected.append(writer)
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(3)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nx: y\r\n\r\n" + body[::-1])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connections = await http_to("/x", "text/plain")(port, 1)
        answers = [await connections.calls[0](body) for body in (b"abc", b"xyz")]
        await connections.close()

    assert answers == [b"cba", b"zyx"]
    assert len(connected) == 1


async def test_load_counts_right_answers():
    """Callers at once and one after the other; the rate is of the answers, not of the calls."""
    sample = await load(pretended_wire(sums), 0, sum_inputs(4), callers=4, seconds=0.05)

    assert sample.calls_per_s > 4 / 0.05
    assert 1.0 <= sample.p50_ms <= sample.p99_ms


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
async def test_load_tells_no_figure_with_wrong_numbers(wrong):
    """One answer with another number, or none, and there is no sample."""
    answered = []

    def sometimes_wrong(messages):
        answered.extend(messages)
        scores = np.frombuffer(sums(messages)[0], np.float32)
        return [(scores + wrong).tobytes() if len(answered) == 3 else scores.tobytes()]

    with pytest.raises(WrongNumbersError):
        await load(pretended_wire(sometimes_wrong), 0, sum_inputs(1), callers=1, seconds=0.02)


async def test_bad_neighbour_is_counted():
    """Sixteen calls in a batch: a server that fails them all, and one that fails one."""
    inputs = sum_inputs(16)
    poison = inputs.values[0][:, :, : WIDTH - 1]

    def fails_all(messages):
        for message in messages:
            np.frombuffer(message, np.float32).reshape(-1, WIDTH)
        return sums(messages)

    def fails_one(messages):
        scores = sums(messages)
        return [b"" if len(m) % (4 * WIDTH) else s for m, s in zip(messages, scores, strict=True)]

    def decode(answer):
        if not answer:
            raise AnswerError("wrong")
        return np.frombuffer(answer, np.float32).reshape(1, 1)

    harmful = await bad_neighbour(pretended_wire(fails_all), 0, inputs, poison)
    wire = pretended_wire(fails_one)
    wire = Wire(encode=wire.encode, decode=decode, connect=wire.connect)
    harmless = await bad_neighbour(wire, 0, inputs, poison)

    assert harmful == {"neighbours answered": 0, "of": 15, "refused": True}
    assert harmless == {"neighbours answered": 15, "of": 15, "refused": True}


def test_peers_score_what_the_module_scores(model_and_file, monkeypatch):
    """The code that every peer runs, on calls of several sequences and lengths at once."""
    model, file = model_and_file
    monkeypatch.setenv("QRNN_MODEL", str(file))
    spec = importlib.util.spec_from_file_location("scoring", PEERS / "scoring.py")
    scoring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scoring)
    single, several = inputs_of(model, (1, 7, 33), 1), inputs_of(model, (4,), 3)

    outputs = scoring.Model().score([*single.values, *several.values])

    for inputs, found in ((single, outputs[:3]), (several, outputs[3:])):
        for number, scores in enumerate(found):
            inputs.check(number, scores)


def test_our_server_in_the_comparison(model_and_file, tmp_path):
    """A real server: figures of a case, and wrong calls that harm nobody."""
    model, file = model_and_file
    before = os.sched_getaffinity(0)
    field = serving.Field(file, tmp_path, tmp_path, min(before))
    engine = types.SimpleNamespace(rate=lambda *_: 1.0)
    case = Case(name="some", lengths=(1, 30), rows=2, callers=2)
    usual = inputs_of(model, (16,) * 16, 1)
    try:
        field.start(ALL[OURS_NAME], inputs_of(model, (3,), 1))
        server = field.servers[OURS_NAME]
        plan = serving.Plan(rounds=2, seconds=0.1)
        found = serving.measure_case(case, inputs_of(model, (1, 30), 2), field, engine, plan)
        with field.turn(server):
            harm = [
                asyncio.run(bad_neighbour(OURS, server.port, usual, poison))
                for poison in poisons(usual.values[0]).values()
            ]
    finally:
        field.end()

    assert os.sched_getaffinity(0) == before
    assert not found["failures"]
    assert found["servers"][OURS_NAME]["sequences_per_s"]["least"] > 0
    assert harm == [{"neighbours answered": 15, "of": 15, "refused": True}] * 3


def figures(rate):
    return {"sequences_per_s": rate, "p50_ms": 1.0, "p99_ms": 2.0, "cpu_us_per_sequence": 3.0}


def test_ratio_is_of_rounds_and_of_the_best_peer():
    """Ours over the peer with the highest median, round by round; a failed one is no peer."""
    rounds = {
        "ours": [figures(rate) for rate in (10.0, 40.0, 30.0)],
        "slow": [figures(rate) for rate in (1.0, 1.0, 99.0)],
        "fast": [figures(rate) for rate in (20.0, 20.0, 20.0)],
        "broken": [figures(1000.0)],
    }

    found = summary(CASES[0], [20.0, 80.0, 40.0], rounds, {"broken": "why"}, ours="ours")

    assert found["best_peer"] == "fast"
    assert found["over_best_peer"] == {"median": 1.5, "least": 0.5, "most": 2.0}
    assert found["over_engine"]["median"] == 0.5
    assert "broken: why" in found["text"]


def test_report_names_what_is_missing(tmp_path):
    """A peer that could not be installed, and one without a figure, are said with the reason."""
    cell = summary(CASES[0], [20.0], {"ours": [figures(10.0)]}, {"peer": "no reply"}, ours="ours")
    results = {
        "environment": {"cpu": "some", "load": 0.5, "python": "3.11", "torch": "2"},
        "plan": {"rounds": 1, "seconds": 1.0},
        "servers": {"ours": {}, "peer": {}, "absent": {}},
        "missing": {"absent": "no wheel"},
        "cases": [cell],
        "faults": {
            "ours": {"SIGTERM": {"answered": 16, "of": 16}},
            "peer": {"SIGTERM": {"failed": "it died"}},
        },
    }

    text = tables(results)
    written = write_report(results, tmp_path / "serving")

    assert "Without absent: no wheel" in text
    assert "no figure for peer: no reply" in text
    assert "| SIGTERM | 16 of 16 answered | it died |" in text
    assert json.loads(written[0].read_text())["cases"][0]["over_engine"]["median"] == 0.5
    assert all(path.stat().st_size > 0 for path in written)


def test_peer_that_cannot_be_installed_is_named(tmp_path, monkeypatch, capsys):
    """pip's own reason; the run goes on without it."""
    error = "WARNING: slow\nERROR: No matching distribution found for mosec\n"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=error)
    monkeypatch.setattr(serving_servers.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(serving_servers.subprocess, "run", lambda *_, **__: failed)

    missing = serving.install_all([ALL[OURS_NAME], ALL["mosec"]], tmp_path)

    assert missing == {"mosec": "ERROR: No matching distribution found for mosec"}
    assert "without mosec" in capsys.readouterr().out
    with pytest.raises(NotInstalledError):
        serving_servers.install(ALL["mosec"], tmp_path)


def test_server_that_does_not_start_is_named(model_and_file, tmp_path):
    """Its status and the end of its log."""
    _, file = model_and_file
    command = ["sh", "-c", "echo no such thing; exit 3"]
    peer = serving_servers.Peer(
        name="broken", package=None, wire=OURS, command=lambda _: command, settings=""
    )
    server = serving_servers.start(peer, file, tmp_path, tmp_path / "x", 0)
    server._process.wait()

    with pytest.raises(RuntimeError, match=r"status 3.*\n.*no such thing"):
        server.check_runs()


def test_no_process_of_a_server_is_left(model_and_file, tmp_path):
    """Not even one whose parent has ended, or that is paused."""
    _, file = model_and_file
    command = ["sh", "-c", "sh -c 'sleep 600 & wait' & wait"]
    peer = serving_servers.Peer(
        name="parents", package=None, wire=OURS, command=lambda _: command, settings=""
    )
    server = serving_servers.start(peer, file, tmp_path, tmp_path / "x", 0)
    root = psutil.Process(server._process.pid)
    while len(processes := [root, *root.children(recursive=True)]) < 3:
        time.sleep(0.01)
    server.pause()
    processes[1].kill()

    server.end()

    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


@pytest.mark.parametrize(("text", "told"), [("triton,nothing", "got nothing"), ("", "got ")])
def test_unknown_peer_is_refused(monkeypatch, capsys, text, told):
    """With the names that there are."""
    monkeypatch.setattr("sys.argv", ["serving.py", "--peers", text])

    with pytest.raises(SystemExit):
        serving.main()

    refused = capsys.readouterr().err
    assert told in refused
    assert "litserve" in refused


def test_cases_are_those_of_the_table():
    """One sequence a call at 1, 8 and 64 callers for two lengths, uneven ones, and many a call."""
    single = [c for c in CASES if c.rows == 1 and len(set(c.lengths)) == 1]
    uneven = [c for c in CASES if len(set(c.lengths)) > 1]

    assert {(c.lengths[0], c.callers) for c in single} == {
        (timesteps, callers) for timesteps in (32, 128) for callers in (1, 8, 64)
    }
    assert [(min(c.lengths), max(c.lengths), c.callers) for c in uneven] == [(1, 256, 64)]
    assert [c.rows for c in CASES if c.rows > 1] == [128, 1024]
    assert Path(PEERS / "triton_model.py").is_file()
