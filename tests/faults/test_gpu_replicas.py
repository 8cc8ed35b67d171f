"""Replicas on a GPU that fault, hang, die or run out of memory, and what becomes of the rows."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import signal
import threading

import numpy as np
import psutil
import pytest

from qrnn_client import Client
from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.pool import PoolConfig, ReplicaPool
from qrnn_serve.engine.supervision import SupervisionConfig
from qrnn_serve.scorers import ScorerSpec
from qrnn_serve.scorers.process import ProcessScorer
from support import gpu_worker
from support.artefacts import CONFIGS, packed, random_rows, scores_by_hand, shared_artefacts
from support.server_process import server_process

pytestmark = pytest.mark.gpu

CONFIG = CONFIGS["features"]
QUICK = SupervisionConfig(first_wait_s=0.01, max_wait_s=0.02)
IMPATIENT = dataclasses.replace(QUICK, hang_timeout_s=2.0)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    return shared_artefacts(tmp_path_factory, "features")


@contextlib.asynccontextmanager
async def running(artefacts, replicas=2, supervision=QUICK, batch=BatchLimits(), **faults):  # noqa: B008
    """A pool of replicas of one GPU, each a process."""
    spec = ScorerSpec(path=str(artefacts.paths["native"]), device="cuda:0")
    load = lambda: ProcessScorer(gpu_worker.command(spec, **faults))  # noqa: E731
    pool = ReplicaPool([load] * replicas, PoolConfig(supervision=supervision, batch=batch))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop(timeout_s=10)


def harmful(value):
    rows = random_rows(CONFIG, [5, 2])
    rows[1][0, 0] = value
    return packed(rows)


async def submit_all(pool, batches, harm=None):
    """The answers of all batches, with one that does harm among them."""
    tasks = [asyncio.ensure_future(pool.submit(packed(rows))) for rows in batches]
    if harm is not None:
        tasks.insert(len(tasks) // 2, asyncio.ensure_future(pool.submit(harmful(harm))))
    return await asyncio.gather(*tasks, return_exceptions=True)


def assert_right(artefacts, batches, answers):
    for rows, answer in zip(batches, answers, strict=True):
        assert answer.failures == ()
        expected = scores_by_hand(artefacts.model, rows)
        np.testing.assert_allclose(answer.scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)


@pytest.mark.parametrize(
    ("harm", "supervision"),
    [(gpu_worker.FAULTS_THE_GPU, QUICK), (gpu_worker.HANGS_THE_GPU, IMPATIENT)],
    ids=["fault", "hang"],
)
async def test_row_that_breaks_the_gpu_costs_no_other_row_its_answer(artefacts, harm, supervision):
    """Rows of a CUDA fault, or of a kernel without end, are tried twice; all others are scored."""
    batches = [random_rows(CONFIG, [7, 1, 30], seed=seed) for seed in range(12)]
    async with running(artefacts, supervision=supervision) as pool:
        answers = await submit_all(pool, batches, harm)
        later = await submit_all(pool, batches)
        while pool.snapshot().replicas_alive < 2:
            await asyncio.sleep(0.05)
        restarts = pool.snapshot().counts.restarts

    broken = answers.pop(6)
    assert isinstance(broken, ReplicaError), broken
    assert_right(artefacts, batches, answers)
    assert_right(artefacts, batches, later)
    assert restarts == 2


async def test_gpu_with_little_memory_scores_in_smaller_batches(artefacts):
    """A device that is fuller than it was at the start makes batches smaller, and no errors."""
    batches = [random_rows(CONFIG, [4096] * 16, seed=seed) for seed in range(4)]
    batch = BatchLimits(max_timesteps=1 << 17, target_s=10)
    async with running(artefacts, replicas=1, batch=batch, memory_bytes=80 << 20) as pool:
        answers = await submit_all(pool, batches)
        counts = pool.snapshot().counts
        most = pool._replicas[0]._puller.limits.max_timesteps

    assert_right(artefacts, batches, answers)
    assert counts.restarts == 0
    assert counts.timesteps == 4 * 16 * 4096
    assert most < batch.max_timesteps


def call_until(stop, target, artefacts, seed):
    """Predict again and again; rows without a right answer, and how many calls there were."""
    rows = random_rows(CONFIG, [1 + (seed * 7 + k * k) % 60 for k in range(20)], seed=seed)
    expected = scores_by_hand(artefacts.model, rows)
    wrong = calls = 0
    with Client(target, timeout_s=60) as client:
        while not stop.is_set():
            outputs = np.concatenate(client.predict("model", rows).outputs)
            wrong += int((~np.isclose(outputs, expected, rtol=0, atol=FLOAT32_MAX_ABS)).sum())
            calls += 1
    return wrong, calls


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_harmed_replica_of_a_gpu_server_costs_no_caller_an_answer(artefacts, tmp_path, harm):
    """One of two replicas of a GPU is killed or stopped under load; it is back, no row is lost."""
    options = ("--device", "cuda:0,cuda:0", "--hang-timeout-s", 4, "--restart-wait-s", 0.05)
    stop, pause = threading.Event(), threading.Event()
    with (
        server_process(artefacts.paths["native"], tmp_path / "log", *options) as server,
        concurrent.futures.ThreadPoolExecutor(4) as callers,
    ):
        tasks = [
            callers.submit(call_until, stop, server.target, artefacts, seed) for seed in range(4)
        ]
        try:
            replicas = psutil.Process(server.process.pid).children()
            pause.wait(1.0)
            os.kill(replicas[0].pid, harm)
            while server.log.count("warm device=cuda:0") < 3 and not tasks[0].done():
                pause.wait(0.1)
            pause.wait(0.5)
        finally:
            stop.set()
        ends = [task.result() for task in tasks]
        status = server.stop()

    assert len(replicas) == 2
    assert [wrong for wrong, _ in ends] == [0] * 4
    assert min(calls for _, calls in ends) > 3
    assert status == 0, server.log
