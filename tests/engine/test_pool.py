"""The pool with real threads: joining callers, isolating failures, draining and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from qrnn_serve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    OverloadedError,
    ReplicaError,
    UnavailableError,
)
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.pool import PoolConfig, ReplicaPool
from qrnn_serve.engine.queue import QueueConfig, RequestQueue
from qrnn_serve.engine.supervision import SupervisionConfig
from qrnn_serve.engine.types import PackedRows, StageTimes
from support.scorers import (
    FEATURE_SCHEMA,
    POISON,
    TIMESTEP_SCHEMA,
    SumScorer,
    sum_rows,
    whole_number_rows,
)

QUICK = SupervisionConfig(first_wait_s=0.01, max_wait_s=0.02)


def pool_of(*scorers, **settings):
    """A pool whose replicas use these scorers, after each restart the same ones again."""
    config = PoolConfig(**{"supervision": QUICK} | settings)
    return ReplicaPool([lambda scorer=scorer: scorer for scorer in scorers], config)


@contextlib.asynccontextmanager
async def running_pool(*scorers, **settings):
    pool = pool_of(*scorers, **{"batch": BatchLimits(max_timesteps=64)} | settings)
    await pool.start()
    for scorer in scorers:
        scorer.batches.clear()
    try:
        yield pool
    finally:
        for scorer in scorers:
            scorer.gate.set()
        assert await pool.stop(timeout_s=10)


async def hold(pool, scorer):
    """Block the scorer inside a batch of one caller; return that caller's task."""
    while scorer.entered.acquire(blocking=False):
        pass
    scorer.gate.clear()
    task = asyncio.ensure_future(pool.submit(whole_number_rows([1])))
    assert await asyncio.to_thread(scorer.entered.acquire, timeout=10)
    return task


async def settled():
    """Let every task that can run reach its next await."""
    for _ in range(3):
        await asyncio.sleep(0)


def assert_scores_alone(answer, rows, schema=FEATURE_SCHEMA):
    alone = sum_rows(schema, rows)
    np.testing.assert_array_equal(answer.rows, np.arange(rows.rows))
    np.testing.assert_array_equal(answer.scored.output, alone.output)
    np.testing.assert_array_equal(answer.scored.state, alone.state)
    assert answer.failures == ()


@pytest.mark.parametrize("schema", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["row", "timestep"])
async def test_submit_joins_callers_of_any_length_in_one_batch(schema):
    """32 callers with 32 different lengths that wait together share one launch, unpadded."""
    scorer = SumScorer(schema)
    async with running_pool(scorer, batch=BatchLimits(max_timesteps=1000)) as pool:
        holder = await hold(pool, scorer)
        requests = [whole_number_rows([t], seed=t, with_state=t % 3 == 0) for t in range(1, 33)]
        tasks = [asyncio.ensure_future(pool.submit(rows)) for rows in requests]
        await settled()
        scorer.gate.set()
        answers = await asyncio.gather(*tasks)
        await holder

    assert scorer.batches == [[1], list(range(1, 33))]
    for rows, answer in zip(requests, answers, strict=True):
        assert_scores_alone(answer, rows, schema)
        assert answer.timing.batch_rows == 32
    assert pool.snapshot().counts.padded_timesteps == 0


async def test_submit_cuts_a_large_request_and_joins_it_in_order():
    """A request of many batches comes back whole, in order, from two replicas."""
    scorers = SumScorer(TIMESTEP_SCHEMA), SumScorer(TIMESTEP_SCHEMA)
    rows = whole_number_rows([*range(1, 40), 100, 3], seed=5, with_state=True)
    async with running_pool(*scorers, batch=BatchLimits(max_timesteps=50)) as pool:
        answer = await pool.submit(rows)

    assert_scores_alone(answer, rows, TIMESTEP_SCHEMA)
    batches = [lengths for scorer in scorers for lengths in scorer.batches]
    assert all(sum(lengths) <= 50 or lengths == [100] for lengths in batches)
    assert answer.timing.batch_timesteps == rows.timesteps


async def test_submit_starts_at_once_on_an_idle_replica():
    """A lone caller is not held back to wait for others: its batch has its row alone."""
    scorer = SumScorer()
    async with running_pool(scorer) as pool:
        for length in (3, 1):
            await pool.submit(whole_number_rows([length]))

    assert scorer.batches == [[3], [1]]


async def test_poisoned_row_fails_alone():
    """A row on which the scorer fails gets an error; its neighbours in all requests get scores."""
    scorer = SumScorer()
    bad = whole_number_rows([2, 3, 1, 2], seed=1)
    values = bad.values.copy()
    values[3] = POISON
    bad = PackedRows(values=values, lengths=bad.lengths)
    good = [whole_number_rows([4, 2], seed=seed) for seed in (2, 3)]
    async with running_pool(scorer) as pool:
        holder = await hold(pool, scorer)
        tasks = [asyncio.ensure_future(pool.submit(rows)) for rows in (good[0], bad, good[1])]
        await settled()
        scorer.gate.set()
        answers = await asyncio.gather(*tasks)
        await holder
        assert not pool.failed.is_set()

    assert sorted(scorer.batches[1]) == sorted([4, 2, 2, 3, 1, 2, 4, 2]), "they shared a batch"
    assert_scores_alone(answers[0], good[0])
    assert_scores_alone(answers[2], good[1])
    np.testing.assert_array_equal(answers[1].rows, [0, 2, 3])
    expected = sum_rows(FEATURE_SCHEMA, bad).output[[0, 2, 3]]
    np.testing.assert_array_equal(answers[1].scored.output, expected)
    assert [failure.row for failure in answers[1].failures] == [1]
    assert isinstance(answers[1].failures[0].error, ReplicaError)


async def test_many_poisoned_rows_cost_a_bounded_number_of_launches():
    """A request that is poisoned all over is answered without a launch for each of its rows."""
    scorer = SumScorer()
    rows = PackedRows(
        values=np.full((1000, 2), POISON, np.float32), lengths=np.ones(1000, np.int64)
    )
    async with running_pool(scorer, batch=BatchLimits(max_timesteps=2000)) as pool:
        answer = await pool.submit(rows)

    assert len(answer.failures) == 1000
    assert answer.scored is None
    assert len(scorer.batches) < 200


async def test_out_of_memory_is_retried_smaller_and_lowers_the_batch_limit():
    """A batch that does not fit is scored in halves, and later batches stay below that size."""
    scorer = SumScorer()
    rows = whole_number_rows([4] * 16, seed=3)
    async with running_pool(scorer) as pool:
        scorer.memory_timesteps = 20
        answer = await pool.submit(rows)
        first = list(scorer.batches)
        scorer.batches.clear()
        again = await pool.submit(rows)

    assert_scores_alone(answer, rows)
    assert_scores_alone(again, rows)
    assert max(map(sum, first)) == 64
    assert max(map(sum, scorer.batches)) <= 32


async def test_row_too_large_for_memory_gets_its_own_error():
    """A row that alone runs out of memory is refused; a normal one in its request is scored."""
    scorer = SumScorer()
    async with running_pool(scorer) as pool:
        scorer.memory_timesteps = 10
        answer = await pool.submit(whole_number_rows([2, 30, 3]))

    assert [failure.row for failure in answer.failures] == [1]
    assert isinstance(answer.failures[0].error, OverloadedError)
    np.testing.assert_array_equal(answer.rows, [0, 2])


async def test_dead_scorer_fails_its_callers_and_the_pool():
    """A scorer that fails on everything ends its replica; callers get UnavailableError."""
    scorer = SumScorer()
    async with running_pool(scorer) as pool:
        holder = await hold(pool, scorer)
        waiting = asyncio.ensure_future(pool.submit(whole_number_rows([2])))
        await settled()
        scorer.dead = True
        scorer.gate.set()
        for task in (holder, waiting):
            with pytest.raises(UnavailableError):
                await task
        await asyncio.wait_for(pool.failed.wait(), timeout=10)
        with pytest.raises(UnavailableError):
            await pool.submit(whole_number_rows([1]))

    assert pool.snapshot().replicas_alive == 0
    assert scorer.closed


async def test_rows_of_a_dead_replica_are_scored_by_the_other():
    """When one of two replicas dies with rows in hand, the other answers them."""
    dying, healthy = SumScorer(), SumScorer()
    async with running_pool(dying, healthy) as pool:
        healthy.gate.clear()
        dying.gate.clear()
        requests = [whole_number_rows([60], seed=seed) for seed in (1, 2)]
        tasks = [asyncio.ensure_future(pool.submit(rows)) for rows in requests]
        for scorer in (dying, healthy):
            while len(scorer.batches) == 0:
                await asyncio.to_thread(scorer.entered.acquire, timeout=10)
        dying.dead = True
        dying.gate.set()
        healthy.gate.set()
        answers = await asyncio.gather(*tasks)
        alive, retried = pool.snapshot().replicas_alive, pool.snapshot().counts.retried
        assert not pool.failed.is_set()

    for rows, answer in zip(requests, answers, strict=True):
        assert_scores_alone(answer, rows)
    assert (alive, retried) == (1, 1)


async def test_scorer_with_missing_rows_answers_nobody_from_that_batch():
    """A scorer that returns too few rows is found out before any reply."""

    scorer = SumScorer()
    rows = whole_number_rows([2, 3])
    async with running_pool(scorer) as pool:
        scorer.forgets_a_row = True
        answer = await pool.submit(rows)

    assert scorer.batches == [[2, 3], [1], [2], [3]], "the batch, the check, each row again"
    assert_scores_alone(answer, rows)


async def test_submit_refuses_when_full_while_the_replica_is_blocked():
    """Queue limit 8 and a blocked replica: of 20 callers 8 wait, 12 are refused at once."""
    scorer = SumScorer()
    async with running_pool(scorer, queue=QueueConfig(max_timesteps=8)) as pool:
        holder = await hold(pool, scorer)
        tasks = [asyncio.ensure_future(pool.submit(whole_number_rows([1]))) for _ in range(20)]
        await settled()
        refused = [task for task in tasks if task.done()]
        depth = pool.snapshot().depth
        scorer.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await holder

    errors = [result for result in results if isinstance(result, Exception)]
    assert len(refused) == len(errors) == 12
    assert all(isinstance(e, OverloadedError) and 0 < e.retry_after_s <= 60 for e in errors)
    assert (depth.requests, depth.timesteps) == (8, 8)
    assert pool.snapshot().counts.refused == 12


async def test_cancelled_caller_costs_nothing():
    """A caller that leaves while it waits is not scored, and its room is free."""
    scorer = SumScorer()
    async with running_pool(scorer, queue=QueueConfig(max_timesteps=5)) as pool:
        holder = await hold(pool, scorer)
        leaving = asyncio.ensure_future(pool.submit(whole_number_rows([5])))
        await settled()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        staying = asyncio.ensure_future(pool.submit(whole_number_rows([4])))
        await settled()
        scorer.gate.set()
        await asyncio.gather(holder, staying)

    assert scorer.batches == [[1], [4]]
    assert pool.snapshot().counts.cancelled == 1


async def test_late_request_is_dropped_before_it_is_scored():
    """A request whose deadline passes in the queue is told so and never reaches the scorer."""
    scorer = SumScorer()
    async with running_pool(scorer) as pool:
        with pytest.raises(DeadlineExceededError):
            await pool.submit(whole_number_rows([7]), deadline_s=time.monotonic() - 1)
        holder = await hold(pool, scorer)
        late = asyncio.ensure_future(
            pool.submit(whole_number_rows([9]), deadline_s=math.nextafter(time.monotonic(), 1e12))
        )
        await settled()
        scorer.gate.set()
        with pytest.raises(DeadlineExceededError):
            await late
        await holder

    assert [9] not in scorer.batches
    assert pool.snapshot().counts.expired == 2


async def test_drain_waits_for_every_answer_and_stop_fails_the_rest():
    """drain ends when all callers have answers; stop gives UnavailableError to those without."""
    scorer = SumScorer()
    async with running_pool(scorer) as pool:
        await pool.submit(whole_number_rows([1]))
        await asyncio.wait_for(pool.drain(), timeout=10)
        holder = await hold(pool, scorer)
        waiting = asyncio.ensure_future(pool.submit(whole_number_rows([2])))
        await settled()
        drain = asyncio.ensure_future(pool.drain())
        await settled()
        assert not drain.done()
        ended = await pool.stop(timeout_s=0.01)
        for task in (holder, waiting):
            with pytest.raises(UnavailableError):
                await task
        await asyncio.wait_for(drain, timeout=10)

    assert not ended, "the replica was still inside its scorer"


async def test_start_fails_when_the_scorer_cannot_warm_up():
    """A scorer that fails or gives non-finite scores never becomes ready."""

    class Broken(SumScorer):
        def score(self, rows):
            scored = super().score(rows)
            return type(scored)(output=scored.output * np.nan, state=scored.state)

    for scorer, error in ((Broken(), ReplicaError), (SumScorer(), RuntimeError)):
        scorer.dead = error is RuntimeError
        pool = pool_of(scorer)
        with pytest.raises(error):
            await pool.start()
        assert await pool.stop(timeout_s=10)


async def test_warm_up_covers_sizes_up_to_the_batch_limit():
    """Before the first caller, batches from 1 timestep to the full limit have run."""
    scorer = SumScorer()
    pool = pool_of(scorer, batch=BatchLimits(max_timesteps=100))
    await pool.start()
    sizes = [sum(lengths) for lengths in scorer.batches]
    assert await pool.stop(timeout_s=10)

    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64, 100]


async def test_warm_up_out_of_memory_lowers_the_batch_limit():
    """A device that has no room for the full batch limit serves with smaller batches."""
    scorer = SumScorer()
    scorer.memory_timesteps = 20
    rows = whole_number_rows([4] * 16, seed=3)
    async with running_pool(scorer) as pool:
        answer = await pool.submit(rows)

    assert_scores_alone(answer, rows)
    assert max(map(sum, scorer.batches)) <= 16


@pytest.mark.parametrize("schema", [FEATURE_SCHEMA, TIMESTEP_SCHEMA], ids=["last", "timestep"])
async def test_long_rows_go_in_pieces_with_their_state(schema):
    """Rows of many batches, with and without state of their own, score as if they were whole."""
    scorer = SumScorer(replace(schema, cuts_in_time=True))
    requests = [
        whole_number_rows([3, 130, 5, 64, 65], seed=1, with_state=True),
        whole_number_rows([200], seed=2),
    ]
    async with running_pool(scorer) as pool:
        assert pool.max_row_timesteps == QueueConfig().max_timesteps
        answers = await asyncio.gather(*(pool.submit(rows) for rows in requests))

    for rows, answer in zip(requests, answers, strict=True):
        assert_scores_alone(answer, rows, schema)
    assert max(map(sum, scorer.batches)) <= 64


async def test_piece_is_kept_before_the_next_may_run(monkeypatch):
    """The last piece may end on another replica at once: by then its request has those before."""
    kept = []
    resume = RequestQueue.resume

    def checked(queue, outcome):
        kept.append(outcome in outcome.part.request._outcomes)
        resume(queue, outcome)

    monkeypatch.setattr(RequestQueue, "resume", checked)
    async with running_pool(SumScorer(replace(TIMESTEP_SCHEMA, cuts_in_time=True))) as pool:
        await pool.submit(whole_number_rows([200]))

    assert kept == [True, True, True]


async def test_failed_piece_fails_its_row_alone():
    """A row that fails in its second piece is not scored on; its neighbours are."""
    scorer = SumScorer(replace(TIMESTEP_SCHEMA, cuts_in_time=True))
    rows = whole_number_rows([10, 200, 7])
    values = rows.values.copy()
    values[10 + 100] = POISON
    rows = PackedRows(values=values, lengths=rows.lengths)
    async with running_pool(scorer) as pool:
        answer = await pool.submit(rows)
        depth = pool.snapshot().depth

    assert [failure.row for failure in answer.failures] == [1]
    np.testing.assert_array_equal(answer.rows, [0, 2])
    whole = sum_rows(TIMESTEP_SCHEMA, rows).output
    np.testing.assert_array_equal(answer.scored.output, np.concatenate([whole[:10], whole[210:]]))
    assert sum(map(sum, scorer.batches)) < 17 + 2 * 64 + 10, "the third piece was not scored"
    assert depth.timesteps == 0


async def test_long_row_of_a_dead_replica_is_scored_by_the_other():
    """A replica that dies with the first piece of a row: the other scores every piece."""
    schema = replace(FEATURE_SCHEMA, cuts_in_time=True)
    scorers = SumScorer(schema), SumScorer(schema)
    rows = whole_number_rows([300], seed=7)
    async with running_pool(*scorers) as pool:
        for scorer in scorers:
            scorer.gate.clear()
        task = asyncio.ensure_future(pool.submit(rows))
        while not (started := [scorer for scorer in scorers if scorer.batches]):
            await asyncio.sleep(0)
        started[0].dead = True
        for scorer in scorers:
            scorer.gate.set()
        answer = await task
        alive = pool.snapshot().replicas_alive

    assert_scores_alone(answer, rows)
    assert alive == 1


async def test_idle_devices_share_a_request_and_answer_as_one():
    """Two idle devices score one request in equal shares; the answer is that of one device."""
    slow = [
        SumScorer(TIMESTEP_SCHEMA, device=f"cuda:{n}", second_per_timestep=1e-4) for n in (0, 1)
    ]
    rows = whole_number_rows([40, *[10] * 20, 40], seed=8, with_state=True)
    async with running_pool(*slow, batch=BatchLimits(max_timesteps=512, target_s=1.0)) as pool:
        answer = await pool.submit(rows)

    assert_scores_alone(answer, rows, TIMESTEP_SCHEMA)
    assert [sum(map(sum, scorer.batches)) for scorer in slow] == [140, 140]
    assert sorted(answer.device.split(",")) == ["cuda:0", "cuda:1"]


async def test_answer_tells_the_stages_of_its_batches():
    """A request in three batches has the sum of what the scorer says, and of joining beside it."""
    scorer = SumScorer(second_per_timestep=1e-3)
    scorer.times = StageTimes(upload_s=1000, compute_s=2000, download_s=4000)
    limits = BatchLimits(max_timesteps=20, target_s=1.0)
    async with running_pool(scorer, batch=limits) as pool:
        timing = (await pool.submit(whole_number_rows([20, 20, 20]))).timing

    assert len(scorer.batches) == 3
    assert timing.compute_s == 6000
    assert 3000 < timing.upload_s < 3100
    assert 12000 < timing.download_s < 12100


async def test_snapshot_shows_what_the_cost_model_says():
    """Terms and budget of each replica, and predicted beside measured seconds, can be read."""
    scorer = SumScorer(second_per_timestep=1e-3)
    async with running_pool(scorer) as pool:
        for _ in range(5):
            await pool.submit(whole_number_rows([20]))
        snapshot = pool.snapshot()

    (cost,) = snapshot.costs
    assert cost.device == "cpu"
    assert cost.terms.per_timestep == pytest.approx(1e-3, rel=0.5)
    assert 20 <= cost.budget_timesteps <= 64
    assert snapshot.counts.predicted_s == pytest.approx(snapshot.counts.batch_s, rel=0.9)


def test_pool_needs_a_scorer():
    """A pool without scorers is a mistake in the wiring."""
    with pytest.raises(ConfigError, match="at least one"):
        ReplicaPool([], PoolConfig())
