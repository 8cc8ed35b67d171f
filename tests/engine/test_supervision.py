"""Replicas that die, hang or do not start: what happens to their rows, and when they come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from qrnn_serve.core.errors import ConfigError, ReplicaError, UnavailableError
from qrnn_serve.engine.pool import PoolConfig, ReplicaPool
from qrnn_serve.engine.replica_status import ReplicaState
from qrnn_serve.engine.supervision import Restarts, SupervisionConfig
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.scorers.process import ProcessScorer
from support import sum_worker
from support.scorers import FEATURE_SCHEMA, SumScorer, sum_rows, whole_number_rows

QUICK = SupervisionConfig(first_wait_s=0.01, max_wait_s=0.02)
IMPATIENT = dataclasses.replace(QUICK, hang_timeout_s=1.0)


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def process(**faults):
    return lambda: ProcessScorer(sum_worker.command(**faults), start_timeout_s=60)


@contextlib.asynccontextmanager
async def running(*loaders, supervision=QUICK, **settings):
    pool = ReplicaPool(loaders, PoolConfig(supervision=supervision), **settings)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop(timeout_s=10)


def scorer_of(pool, number=0):
    return pool._replicas[number].scorer


def harmful(value):
    values = np.zeros((2, 2), np.float32)
    values[0] = value
    return PackedRows(values=values, lengths=np.array([1, 1]))


def assert_scores(answer, rows):
    assert answer.failures == ()
    np.testing.assert_array_equal(answer.scored.output, sum_rows(FEATURE_SCHEMA, rows).output)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_waits_double_up_to_a_limit_and_end():
    """Failed starts wait 1, 2, 4, 4 seconds, and the fifth in a row gives the replica up."""
    config = SupervisionConfig(first_wait_s=1, max_wait_s=4)
    restarts = Restarts(config, clock=Clock())

    assert [restarts.wait_s() for _ in range(5)] == [1, 2, 4, 4, None]


def test_a_minute_of_service_forgets_failures_and_less_does_not():
    """A replica that served long starts again as if for the first time; a crash loop does not."""
    clock = Clock()
    restarts = Restarts(SupervisionConfig(first_wait_s=1, stable_s=60), clock=clock)
    waits = []
    for life_s in (59.9, 59.9, 60, 1, 3600):
        restarts.serving()
        clock.now_s += life_s
        waits.append(restarts.wait_s())
        clock.now_s += 100  # the time it takes to start again is no service

    assert waits == [1, 2, 1, 2, 1]


def test_replica_that_starts_is_never_given_up():
    """Whatever kills it, as long as it starts again it does, every 30 seconds in the end."""
    restarts = Restarts(SupervisionConfig(first_wait_s=1), clock=Clock())
    waits = []
    for number in range(2000):
        if number % 5 == 0:
            restarts.serving()
        waits.append(restarts.wait_s())

    assert waits == [1, 2, 4, 8, 16, *[30] * 1995]


def test_time_limit_of_a_batch_follows_its_expected_time():
    """A batch may take the configured seconds and 20 times what was expected."""
    assert SupervisionConfig(hang_timeout_s=3).batch_timeout_s(0.5) == 13
    with pytest.raises(ConfigError, match="hang_timeout_s"):
        SupervisionConfig(hang_timeout_s=0)


async def test_killer_row_is_tried_twice_and_its_neighbours_are_scored():
    """Callers in one batch with a row that kills its process get scores; that caller an error."""
    others = [whole_number_rows([3, 1], seed=seed) for seed in range(8)]
    async with running(process()) as pool:
        first_pid = scorer_of(pool).pid
        os.kill(first_pid, signal.SIGSTOP)
        holder = asyncio.ensure_future(pool.submit(whole_number_rows([1])))
        await until(lambda: pool.snapshot().depth.requests == 0 and not holder.done())
        tasks = [asyncio.ensure_future(pool.submit(rows)) for rows in others[:4]]
        killer = asyncio.ensure_future(pool.submit(harmful(sum_worker.KILLS)))
        tasks += [asyncio.ensure_future(pool.submit(rows)) for rows in others[4:]]
        await asyncio.sleep(0)
        os.kill(first_pid, signal.SIGCONT)
        with pytest.raises(ReplicaError, match="two replicas were lost"):
            await killer
        answers = await asyncio.gather(*tasks)
        await holder
        counts = pool.snapshot().counts
        failed = pool.failed.is_set()

    for rows, answer in zip(others, answers, strict=True):
        assert_scores(answer, rows)
    assert (counts.scored, counts.failed, counts.restarts) == (9, 1, 2)
    assert counts.retried >= 1
    assert not failed


@pytest.mark.parametrize("harm", [sum_worker.HANGS, sum_worker.BREAKS], ids=["hangs", "breaks"])
async def test_process_that_hangs_or_breaks_is_replaced(harm):
    """Without an answer in time, or with nothing but errors, a process is replaced by another."""
    rows = whole_number_rows([4, 2])
    async with running(process(), process(), supervision=IMPATIENT) as pool:
        pids = {scorer_of(pool, number).pid for number in (0, 1)}
        with pytest.raises(ReplicaError, match="two replicas were lost"):
            await pool.submit(harmful(harm))
        answer = await pool.submit(rows)
        await until(lambda: pool.snapshot().replicas_alive == 2)
        new_pids = {scorer_of(pool, number).pid for number in (0, 1)}
        restarts = pool.snapshot().counts.restarts

    assert_scores(answer, rows)
    assert restarts == 2
    assert not pids & new_pids


async def test_callers_wait_for_the_only_replica_to_come_back():
    """A killed process costs its callers time, not their answers; serving goes off and on."""
    serving = []
    requests = [whole_number_rows([5], seed=seed) for seed in range(20)]
    async with running(process(), on_serving=serving.append) as pool:
        os.kill(scorer_of(pool).pid, signal.SIGKILL)
        answers = await asyncio.gather(*(pool.submit(rows) for rows in requests))
        while_running = list(serving)
        [status] = pool.snapshot().replicas
        counts = pool.snapshot().counts

    for rows, answer in zip(requests, answers, strict=True):
        assert_scores(answer, rows)
    assert while_running == [True, False, True]
    assert (status.state, status.restarts) == (ReplicaState.SERVING, 1)
    assert " ended" in status.last_error
    assert counts.retried <= 20
    assert counts.scored == 20


async def test_process_that_is_killed_while_idle_is_replaced_before_it_is_needed():
    """Nobody has to send a row for a lost process to be found and started again."""
    serving = []
    async with running(process(), on_serving=serving.append, supervision=IMPATIENT) as pool:
        os.kill(scorer_of(pool).pid, signal.SIGKILL)
        await until(lambda: serving == [True, False, True])
        counts = pool.snapshot().counts

    assert (counts.batches, counts.restarts) == (0, 1)


async def test_replica_that_never_starts_again_is_given_up_and_the_others_serve(caplog):
    """After five failures a replica is given up, once and in the log; the pool goes on."""
    starts = 0

    def once():
        nonlocal starts
        starts += 1
        if starts > 1:
            raise OSError("the device fell off the bus")
        return SumScorer()

    rows = whole_number_rows([2])
    answers = []
    async with running(once, SumScorer) as pool:
        scorer_of(pool).dead = True
        while not pool._replicas[0].ended:
            answers.append(await pool.submit(rows))
        lost, healthy = pool.snapshot().replicas
        alive, failed = pool.snapshot().replicas_alive, pool.failed.is_set()

    for answer in answers:
        assert_scores(answer, rows)
    assert (alive, failed, starts) == (1, False, 6)
    assert (lost.state, lost.restarts) == (ReplicaState.GIVEN_UP, 5)
    assert lost.last_error == "OSError: the device fell off the bus"
    assert (healthy.state, healthy.restarts) == (ReplicaState.SERVING, 0)
    assert healthy.last_error == ""
    assert [r.message for r in caplog.records].count("replica given up failed_starts=5") == 1
    assert "the device fell off the bus" in caplog.text


async def test_pool_fails_when_its_last_replica_is_given_up():
    """Callers that wait for a replica that never comes back are told, and later ones at once."""
    scorer = SumScorer()
    async with running(lambda: scorer) as pool:
        scorer.dead = True
        with pytest.raises(UnavailableError, match="no replica is left"):
            await pool.submit(whole_number_rows([1]))
        await asyncio.wait_for(pool.failed.wait(), 10)
        with pytest.raises(UnavailableError, match="no replica is left"):
            await pool.submit(whole_number_rows([1]))


async def test_thread_that_hangs_is_abandoned_and_its_late_answer_dropped(caplog):
    """A hung thread's rows go to another replica; what it says later counts for nothing."""
    slow, healthy = SumScorer(), SumScorer()
    requests = [whole_number_rows([3], seed=seed) for seed in range(2)]
    async with running(lambda: slow, lambda: healthy, supervision=IMPATIENT) as pool:
        slow.gate.clear()
        healthy.batches.clear()
        while slow.entered.acquire(blocking=False):
            pass
        answers = []
        # One of two goes to the slow replica, and the other to the healthy one.
        while not slow.entered.acquire(blocking=False):
            tasks = [asyncio.ensure_future(pool.submit(rows)) for rows in requests]
            answers += await asyncio.gather(*tasks)
        alive = pool.snapshot().replicas_alive
        slow.gate.set()
        await until(lambda: slow.closed)
        more = await pool.submit(requests[0])
        scored = pool.snapshot().counts.scored

    for number, answer in enumerate(answers):
        assert_scores(answer, requests[number % 2])
    assert_scores(more, requests[0])
    assert alive == 1
    assert scored == len(answers) + 1
    assert "--replica-processes always" in caplog.text


async def test_warm_up_that_hangs_in_a_thread_stops_the_start():
    """A model that hangs before it serves is an error of the start, not a wait for ever."""
    scorer = SumScorer()
    scorer.gate.clear()
    config = PoolConfig(supervision=SupervisionConfig(start_timeout_s=0.2, hang_timeout_s=0.1))
    pool = ReplicaPool([lambda: scorer], config)
    with pytest.raises(ReplicaError, match="hangs in a thread"):
        await pool.start()
    scorer.gate.set()
    assert await pool.stop(timeout_s=10)


async def test_model_that_was_replaced_on_disk_is_not_mixed_in(caplog):
    """A replica that would come back with other weights is given up: answers stay of one model."""
    other = dataclasses.replace(FEATURE_SCHEMA, weights_sha256="1" * 64)
    schemas = [FEATURE_SCHEMA, *[other] * 9]
    async with running(lambda: SumScorer(schemas.pop(0))) as pool:
        scorer_of(pool).dead = True
        with pytest.raises(UnavailableError):
            await pool.submit(whole_number_rows([1]))

    assert "was replaced by that of another model" in caplog.text


async def test_start_raises_what_the_first_replica_raised_and_ends_the_others(tmp_path):
    """A replica that does not start stops the start; processes that did start are ended."""
    count = tmp_path / "pids"
    good, bad = process(count=str(count)), process(raises="ConfigError", count=str(count))
    pool = ReplicaPool([good, bad], PoolConfig(supervision=QUICK))
    with pytest.raises(ConfigError, match="as was asked"):
        await pool.start()
    ended = await pool.stop(timeout_s=30)
    pids = count.read_text().split()

    assert ended
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_stop_does_not_wait_for_a_replica_between_two_starts():
    """A replica that waits for its next start ends at once with the pool."""
    slowly = SupervisionConfig(first_wait_s=3600, max_wait_s=3600)
    async with running(process(), process(), supervision=slowly) as pool:
        os.kill(scorer_of(pool).pid, signal.SIGKILL)
        tasks = [asyncio.ensure_future(pool.submit(whole_number_rows([1]))) for _ in range(9)]
        await asyncio.gather(*tasks)
        while pool.snapshot().replicas_alive == 2:
            await pool.submit(whole_number_rows([1]))
        ended = await pool.stop(timeout_s=5)

    assert ended
