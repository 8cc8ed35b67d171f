"""A scorer in a process of its own: right numbers, growing memory, errors, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from qrnn_serve.core import errors
from qrnn_serve.core.config import to_mapping
from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.engine.types import PackedRows, ScorerDeadError
from qrnn_serve.scorers import ScorerSpec, batch_memory, copying, load_checked
from qrnn_serve.scorers.batch_memory import BatchLayout, BatchMemory
from qrnn_serve.scorers.packets import Channel, Kind, Packet, error_of, failed
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from support import sum_worker
from support.artefacts import CONFIGS, packed, random_rows, scores_by_hand
from support.scorers import (
    FEATURE_SCHEMA,
    POISON,
    TIMESTEP_SCHEMA,
    sum_rows,
    whole_number_rows,
)
from support.server_process import environment


@contextlib.contextmanager
def started(**faults):
    scorer = ProcessScorer(sum_worker.command(**faults), start_timeout_s=60)
    try:
        yield scorer
    finally:
        scorer.close()


@pytest.fixture(scope="module")
def sums():
    """One process for tests that leave it running."""
    with started() as scorer:
        yield scorer


def rows_with_first(value, length=3) -> PackedRows:
    values = np.zeros((length, 2), np.float32)
    values[0] = value
    return PackedRows(values=values, lengths=np.array([length]))


def assert_same(scored, expected):
    np.testing.assert_array_equal(scored.output, expected.output, strict=True)
    np.testing.assert_array_equal(scored.state, expected.state, strict=True)


def wait_for_end(pid):
    """Wait for a process that is no child of this one; whether it ended within a minute."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(fd):
        return bool(select.select([fd], [], [], 60)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_the_reference_and_of_a_thread(artefacts, name):
    """A real model scores odd lengths, with state too, to the bit as it does in a thread."""
    spec = ScorerSpec(path=str(artefacts[name].paths["native"]), threads=1)
    rows = random_rows(CONFIGS[name], [7, 1, 30, 2, 2, 111])
    thread = load_checked(spec)
    scorer = ProcessScorer(worker_command(spec))
    try:
        fresh = scorer.score(packed(rows))
        carried = scorer.score(packed(rows, state=fresh.state))
        facts = (scorer.schema, scorer.device, scorer.engine)
    finally:
        scorer.close()

    expected = scores_by_hand(artefacts[name].model, rows)
    np.testing.assert_allclose(fresh.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
    assert_same(fresh, thread.score(packed(rows)))
    assert_same(carried, thread.score(packed(rows, state=fresh.state)))
    assert facts == (thread.schema, "cpu", "native")
    assert scorer.max_timesteps > 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("base", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["row", "timestep"])
def test_every_dtype_and_odd_size_crosses_to_the_bit(base, dtype):
    """Answers equal those of the same scorer here: no row, one, many, with and without a state."""
    schema = dataclasses.replace(base, dtype=dtype)
    cases = []
    for lengths in ([1], [3, 1, 31], [33], [1] * 257, [1023, 1]):
        for with_state in (False, True):
            rows = whole_number_rows(lengths, seed=len(lengths), with_state=with_state)
            state = rows.state if rows.state is None else rows.state.astype(dtype)
            rows = PackedRows(values=rows.values.astype(dtype), lengths=rows.lengths, state=state)
            cases.append(rows)
    with started(schema=to_mapping(schema)) as scorer:
        scored = [scorer.score(rows) for rows in cases]

    for rows, answer in zip(cases, scored, strict=True):
        assert_same(answer, sum_rows(schema, rows))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("takes_ids", [False, True], ids=["features", "ids"])
def test_layout_keeps_each_array_apart(takes_ids, width, rows):
    """Rows and answers written to the memory come out as they were, empty ones and states too."""
    schema = dataclasses.replace(
        TIMESTEP_SCHEMA,
        takes_ids=takes_ids,
        input_size=width,
        output_size=5,
        state_size=7,
    )
    random = np.random.default_rng(rows)
    lengths = random.integers(1, 9, rows)
    timesteps = int(lengths.sum())
    shape = (timesteps, *schema.timestep_shape)
    values = random.integers(0, 99, shape) if takes_ids else random.random(shape)
    put = PackedRows(
        values=values if takes_ids else values.astype(np.float32),
        lengths=lengths,
        state=random.random((rows, 7)).astype(np.float32),
    )
    layout = BatchLayout(schema, rows, timesteps, with_state=True)
    memory = BatchMemory(os.memfd_create("test"))
    room = memory.make_room(layout.nbytes)
    output = random.random((timesteps, 5)).astype(np.float32)
    layout.put_rows(put, room)
    layout.put_scores(batch_memory.ScoredRows(output=output, state=put.state + 1), room)
    got = BatchLayout.of(layout.packet(1, memory.size), schema).rows_in(room)
    scored = layout.scores_in(room, Packet(Kind.SCORED, padded_timesteps=4))
    np.testing.assert_array_equal(got.values, put.values, strict=True)
    np.testing.assert_array_equal(got.lengths, put.lengths, strict=True)
    np.testing.assert_array_equal(got.state, put.state, strict=True)
    del got, room
    memory.close()

    np.testing.assert_array_equal(scored.output, output, strict=True)
    np.testing.assert_array_equal(scored.state, put.state + 1, strict=True)
    assert scored.padded_timesteps == 4


def test_device_that_writes_in_place_is_given_memory_to_pin():
    """A scorer that takes places for its answers gets pinned shared memory, grown or not."""
    with started(in_place=True) as scorer:
        for lengths in ([3, 1], [40_000], [2]):
            rows = whole_number_rows(lengths)
            assert_same(scorer.score(rows), sum_rows(FEATURE_SCHEMA, rows))


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_copies_with_several_threads_are_whole(monkeypatch, threads):
    """Every element is copied, for lengths that the threads do not divide, and strided arrays."""
    monkeypatch.setattr(copying, "_WORTHWHILE_BYTES", 1)
    monkeypatch.setattr(copying, "_threads", lambda: threads)
    for shape in [(1,), (2, 3), (7, 5), (1001, 3), (5, 0)]:
        array = np.random.default_rng(1).random(shape).astype(np.float32)
        for source in (array, array[::-1]):
            place = np.full(shape, np.nan, np.float32)
            copying.copy_array(place, source)
            np.testing.assert_array_equal(place, source)
            np.testing.assert_array_equal(copying.copy_of(source), source)


def test_times_cross_and_have_the_copies_beside():
    """What the process says of its stages arrives, with the copies of both sides added."""
    told = {"upload_s": 1000, "compute_s": 2000, "download_s": 4000}
    with started(times=told, graphs=300, replayed=1) as scorer:
        first = scorer.score(whole_number_rows([1]))
        small = first.times
        large = scorer.score(whole_number_rows([1 << 20])).times

    assert small.compute_s == large.compute_s == 2000
    assert 1000 < small.upload_s < large.upload_s < 1100
    assert 4000 < small.download_s < 4100
    assert (first.graphs, first.replayed) == (300, 1)


def test_memory_grows_with_the_batch_and_nothing_leaks(sums):
    """Batches of 1 to a million timesteps are right; many lose no descriptor and no memory."""
    other = psutil.Process(sums.pid)

    def usage():
        gc.collect()
        return [
            count
            for side in (psutil.Process(), other)
            for count in (side.num_fds(), len(side.memory_maps(grouped=False)))
        ]

    for timesteps in (1, 3000, 1_000_001, 77, 400_000, 1):
        rows = whole_number_rows([timesteps])
        assert_same(sums.score(rows), sum_rows(FEATURE_SCHEMA, rows))
    small = whole_number_rows([5, 3])
    sums.score(small)
    before, memory_before = usage(), other.memory_info().rss
    for _ in range(2000):
        sums.score(small)
    after, memory_after = usage(), other.memory_info().rss

    for first, last in zip(before, after, strict=True):
        assert last <= first + 3
    assert memory_after < memory_before * 1.1 + (4 << 20)


def test_memory_above_what_is_kept_is_given_back(monkeypatch):
    """After a batch larger than what is kept, a small one shrinks the file, and both are right."""
    monkeypatch.setattr(batch_memory, "_KEPT_BYTES", 1 << 16)
    with started() as scorer:
        sizes = []
        for timesteps in (10, 100_000, 90_000, 10, 11, 100_000):
            rows = whole_number_rows([timesteps])
            assert_same(scorer.score(rows), sum_rows(FEATURE_SCHEMA, rows))
            sizes.append(scorer._memory.size)

    assert sizes[0] < 1 << 16 < sizes[1] == sizes[2]
    assert sizes[3] == sizes[4] == 1 << 16
    assert sizes[5] == sizes[1]


def test_batch_that_the_machine_has_no_room_for_is_refused(monkeypatch, sums):
    """More shared memory than half of what is free is a MemoryError before any is taken."""
    size = sums._memory.size
    monkeypatch.setattr(batch_memory, "free_host_bytes", lambda: 1 << 20)
    rows = whole_number_rows([size // 4 + (1 << 18)])
    with pytest.raises(MemoryError, match=r"takes \d+ bytes of shared memory"):
        sums.score(rows)

    assert sums._memory.size == size
    small = whole_number_rows([4, 2])
    assert_same(sums.score(small), sum_rows(FEATURE_SCHEMA, small))


def test_errors_of_a_batch_cross_with_their_class_and_the_process_scores_on():
    """Out of memory is a MemoryError here too; another error tells what happened and where."""
    small = whole_number_rows([2])
    with started(memory_timesteps=10) as scorer:
        with pytest.raises(MemoryError, match="no room for 11 timesteps"):
            scorer.score(whole_number_rows([11]))
        with pytest.raises(ReplicaError, match="RuntimeError: poisoned value") as poisoned:
            scorer.score(rows_with_first(POISON))
        after = scorer.score(small)

    assert "support/scorers.py" in poisoned.value.__notes__[0]
    assert_same(after, sum_rows(FEATURE_SCHEMA, small))


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type)]
# It needs more than a message, and no scorer raises it.
ERRORS.remove(errors.OverloadedError)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        *((kind, kind) for kind in ERRORS),
        (MemoryError, MemoryError),
        (FileNotFoundError, OSError),
        (ScorerDeadError, ReplicaError),
    ],
)
def test_error_keeps_its_class_or_gets_that_of_its_nearest_base(raised, expected):
    """Every error of ours, and of the system, is raised on the other side with its message."""
    told = error_of(failed(raised("as was asked")))

    assert type(told) is expected
    assert str(told) == "as was asked"


def test_missing_library_and_unknown_errors_are_named():
    """Which library is missing is kept for the command line; other errors name their class."""
    missing = error_of(failed(ModuleNotFoundError("no cupy", name="cupy")))
    unknown = error_of(failed(ZeroDivisionError("by zero")))

    assert (type(missing), missing.name) == (ModuleNotFoundError, "cupy")
    assert (type(unknown), str(unknown)) == (ReplicaError, "ZeroDivisionError: by zero")


def test_start_that_fails_raises_what_the_process_raised_and_leaves_none():
    """A load that raises, a process that ends and one that takes too long are told apart."""
    before = psutil.Process().children()
    with pytest.raises(errors.ConfigError, match="as was asked") as raised:
        ProcessScorer(sum_worker.command(raises="ConfigError"))
    with pytest.raises(ReplicaError, match="ended before it had loaded its model: exit status 7"):
        ProcessScorer(sum_worker.command(exits=7))
    with pytest.raises(ReplicaError, match=r"did not load its model within 0\.5 s"):
        ProcessScorer(sum_worker.command(hangs=True), start_timeout_s=0.5)

    assert "sum_worker.py" in raised.value.__notes__[0]
    assert psutil.Process().children() == before


def test_wrong_model_and_device_are_the_errors_of_load_scorer(artefacts, tmp_path):
    """What `load_scorer` refuses is refused by the process in the same words."""
    spec = ScorerSpec(path=str(tmp_path / "none.pt"))
    with pytest.raises(errors.ArtefactError) as here:
        load_checked(spec)
    with pytest.raises(errors.ArtefactError) as there:
        ProcessScorer(worker_command(spec))

    assert str(there.value) == str(here.value)


def test_killed_process_is_a_dead_scorer():
    """A process that is killed in the midst of a batch, or between two, never scores again."""
    with started() as scorer:
        with pytest.raises(ScorerDeadError, match="ended: killed by SIGKILL"):
            scorer.score(rows_with_first(sum_worker.KILLS))
        with pytest.raises(ScorerDeadError, match="ended: killed by SIGKILL"):
            scorer.score(whole_number_rows([1]))


@pytest.mark.parametrize("how", ["hangs", "stopped"])
def test_interrupt_ends_a_batch_that_hangs(how):
    """From another thread a hanging or stopped process is killed, and the batch raises."""
    with started() as scorer:
        if how == "stopped":
            os.kill(scorer.pid, signal.SIGSTOP)
        threading.Timer(0.3, scorer.interrupt).start()
        with pytest.raises(ScorerDeadError, match="killed by SIGKILL"):
            scorer.score(rows_with_first(sum_worker.HANGS))


def test_signals_to_all_processes_leave_the_replica_at_work():
    """SIGINT and SIGTERM, as a terminal or container sends to all, do not end it; close does."""
    rows = whole_number_rows([3])
    with started() as scorer:
        os.kill(scorer.pid, signal.SIGTERM)
        os.kill(scorer.pid, signal.SIGINT)
        assert_same(scorer.score(rows), sum_rows(FEATURE_SCHEMA, rows))
        own_group = os.getpgid(scorer.pid) == scorer.pid != os.getpgid(0)

    assert own_group
    assert wait_for_end(scorer.pid)


PARENT = f"""
import sys
import numpy as np
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.scorers.process import ProcessScorer
from support import sum_worker

scorer = ProcessScorer(sum_worker.command())
print(scorer.pid, flush=True)
if sys.argv[1] == "busy":
    values = np.full((1, 2), {sum_worker.HANGS}, np.float32)
    scorer.score(PackedRows(values=values, lengths=np.array([1])))
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_process_ends_when_its_server_is_killed(state):
    """After SIGKILL of the server no process is left, whether idle, in a batch or stopped."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    pid = int(parent.stdout.readline())
    if state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()

    assert wait_for_end(pid)


def test_answer_to_another_batch_reaches_nobody(sums):
    """An answer whose number is not that of the question is no answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    question = Packet(Kind.SCORE, batch=5)
    Channel(theirs).send(Packet(Kind.SCORED, batch=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_channel", Channel(ours))
        with pytest.raises(ScorerDeadError, match="expected the answer"):
            sums._ask(question)
    ours.close()
    theirs.close()


def test_packets_of_another_version_or_kind_of_program_are_refused():
    """A changed package and bytes that are no packet are told apart, and neither is used."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    theirs.send(b"QRNX" + (1).to_bytes(2, "little") + bytes(66))
    with pytest.raises(ReplicaError, match="version 2, got 1"):
        channel.receive()
    theirs.send(b"GET / HTTP/1.1")
    with pytest.raises(ReplicaError, match="expected a packet"):
        channel.receive()
    Channel(theirs).send(Packet(Kind.SCORED, rows=2**63, padded_timesteps=9, text="ä"))
    received = channel.receive()
    theirs.close()
    ended = channel.receive()
    channel.close()

    assert received == Packet(Kind.SCORED, rows=2**63, padded_timesteps=9, text="ä")
    assert ended is None


def test_layout_of_another_model_or_beyond_the_memory_is_refused():
    """A packet that does not fit the schema, or the memory, is not read from."""
    packet = BatchLayout(FEATURE_SCHEMA, 2, 9, with_state=False).packet(1, 4096)

    for wrong in ({"input_size": 3}, {"dtype": 3}, {"flags": 1}, {"memory_bytes": 10}):
        with pytest.raises(ReplicaError, match="This is a bug"):
            BatchLayout.of(dataclasses.replace(packet, **wrong), FEATURE_SCHEMA)
