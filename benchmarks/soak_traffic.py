"""The callers of the soak: each sends rows of its own and knows what the model scores them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import torch

from qrnn_client import AsyncClient, CallError, Client, RetryPolicy
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_serve import SequenceModel
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS

MODEL = "soak"
PREDICT = "/qrnn_serve.v1.PredictionService/Predict"
_ENDS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.DEADLINE_EXCEEDED: "late",
}
ROWS_EACH = 64
LENGTHS = (1, 2, 7, 30, 61, 200)
LONG_LENGTH = 9000
"""Of one row in each caller's hand: longer than a batch, so it goes in pieces."""


@dataclass(frozen=True)
class Hand:
    """The rows of one caller, and of nobody else.

    Attributes:
        rows: Features [T, I].
        scores: By version, the score of each by the model alone, [C].
    """

    rows: list[np.ndarray]
    scores: Mapping[str, np.ndarray]


def deal(models: Mapping[str, SequenceModel], callers: int, seed: int) -> list[Hand]:
    """Rows for each caller; the first feature of all is a number that no other row has.

    Raises:
        RuntimeError: Two rows have scores so near that one could pass for the other.
    """
    random = np.random.default_rng(seed)
    hands: list[Hand] = []
    width = next(iter(models.values())).config.qrnn.input_size
    for _ in range(callers):
        lengths = [*random.choice(LENGTHS, ROWS_EACH - 1), LONG_LENGTH]
        rows = [random.standard_normal((n, width)).astype(np.float32) for n in lengths]
        for row in rows:
            row[:, 0] = random.uniform(-1, 1)
        scores = {v: np.array([alone(m, row) for row in rows]) for v, m in models.items()}
        hands.append(Hand(rows, scores))
    everything = np.concatenate([s for hand in hands for s in hand.scores.values()])
    # Half a million pairs; the nearest two, by the largest difference of their numbers.
    nearest = min(
        float(np.partition(np.abs(everything - score).max(axis=1), 1)[1]) for score in everything
    )
    if nearest < 4 * FLOAT32_MAX_ABS:
        raise RuntimeError(f"two rows have scores only {nearest} apart; take another seed")
    return hands


def alone(model: SequenceModel, row: np.ndarray) -> np.ndarray:
    """The score of one row by the model itself, in a batch of one."""
    with torch.inference_mode():
        return model(torch.from_numpy(row)[None])[0][0].numpy()


@dataclass
class Tally:
    """What became of rows and calls, of all callers together.

    Attributes:
        calls: Calls that ended.
        right: Rows with the score of the model alone.
        wrong: What was wrong with the others that came: the fact to find.
        row_errors: Rows with an error of their own, by code.
        call_errors: Calls that failed as a whole, by code.
        retried: Attempts beyond the first of calls.
        most_error: Largest difference of a right score.
    """

    calls: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    row_errors: Counter[str] = field(default_factory=Counter)
    call_errors: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    most_error: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def as_json(self) -> dict[str, Any]:
        """Its figures."""
        return {
            "calls": self.calls,
            "rows right": self.right,
            "rows wrong": len(self.wrong),
            "row errors": dict(self.row_errors),
            "call errors": dict(self.call_errors),
            "retried attempts": self.retried,
            "largest difference": self.most_error,
        }


class Traffic:
    """Callers in threads, from `with` to its end."""

    def __init__(
        self, target: str, hands: Sequence[Hand], seed: int, on_call: Callable[[int], None]
    ) -> None:
        """`on_call` is told after each call how many there were."""
        self._on_call = on_call
        self.tally = Tally()
        self._target = target
        self._hands = hands
        self._seed = seed
        self._stopping = threading.Event()

    def __enter__(self) -> Traffic:
        self._threads = ThreadPoolExecutor(len(self._hands))
        self._running = [
            self._threads.submit(self._call_on, hand, number)
            for number, hand in enumerate(self._hands)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._threads.shutdown()

    def check(self) -> None:
        """Raise what ended a caller: nothing may."""
        for caller in self._running:
            if caller.done():
                caller.result()

    def _call_on(self, hand: Hand, number: int) -> None:
        random = np.random.default_rng([self._seed, number])
        with Client(self._target, retry=RetryPolicy(total_s=300)) as client:
            while not self._stopping.is_set():
                count = int(random.integers(1, 13))
                # The long row now and then, it takes as long as a hundred others.
                most = ROWS_EACH if random.random() < 0.01 else ROWS_EACH - 1
                chosen = random.choice(most, count, replace=False)
                patience_s = 0.05 if random.random() < 0.05 else 60.0
                self._call(client, hand, chosen, patience_s)

    def _call(self, client: Client, hand: Hand, chosen: np.ndarray, patience_s: float) -> None:
        rows = [hand.rows[row] for row in chosen]
        tally = self.tally
        self._on_call(tally.calls)
        try:
            answer = client.predict(MODEL, rows, timeout_s=patience_s, on_error="return")
        except CallError as error:
            with tally.lock:
                tally.calls += 1
                tally.call_errors[error.call.code.name] += 1
            return
        errors = {error.row: error for error in answer.errors}
        with tally.lock:
            tally.calls += 1
            tally.retried += answer.timing.attempts - answer.timing.calls
            for place, output in enumerate(answer.outputs):
                if (output is None) != (place in errors):
                    tally.wrong.append(f"row {place}: not exactly one of answer and error")
                elif output is None:
                    tally.row_errors[errors[place].code] += 1
                else:
                    expected = hand.scores[answer.version][chosen[place]]
                    difference = float(np.abs(output - expected).max())
                    if difference > FLOAT32_MAX_ABS:
                        tally.wrong.append(f"row {place}: off by {difference}, {output}")
                    else:
                        tally.right += 1
                        tally.most_error = max(tally.most_error, difference)


@dataclass(frozen=True, kw_only=True)
class FloodReport:
    """A flood of calls of one row, each with a deadline.

    Attributes:
        capacity: Calls a second that callers who wait for their answers get.
        offered: Calls a second that came.
        scored: Calls a second with the right score.
        refused: Share of the calls that was refused.
        late: Share that was accepted and told later that it is too late.
        wrong: Scores that were wrong.
        p99_s: 99th percentile of the seconds to the answer of those that were scored or late.
        refused_p99_s: And of those that were refused.
        health_p99_s: And of health checks meanwhile.
    """

    capacity: float
    offered: float
    scored: float
    refused: float
    late: float
    wrong: int
    p99_s: float
    refused_p99_s: float
    health_p99_s: float


async def flood(
    target: str, row: np.ndarray, score: Mapping[str, np.ndarray], patience_s: float, seconds: float
) -> FloodReport:
    """Ten times the calls that can be scored, at random moments.

    Sent as bytes: the client's own work on each would take the processor from the server.
    """
    random, wrong, message = np.random.default_rng(0), 0, message_of([row])
    took: dict[str, list[float]] = {"scored": [], "refused": [], "late": [], "health": []}

    async def call(predict: Any, timeout_s: float) -> None:
        nonlocal wrong
        started_s = time.monotonic()
        try:
            reply = pb.PredictResponse.FromString(await predict(message, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            end = _ENDS[error.code()]
        else:
            end = "scored"
            output = np.frombuffer(reply.output.data, np.float32)
            difference = np.abs(output - score[reply.version]).max(initial=0.0)
            wrong += int(len(output) == 0 or difference > FLOAT32_MAX_ABS)
        took[end].append(time.monotonic() - started_s)

    async def calls_in_turn(predict: Any, stop_s: float) -> None:
        while time.monotonic() < stop_s:
            await call(predict, 60.0)

    async with grpc.aio.insecure_channel(target) as channel, AsyncClient(target) as client:
        predict = channel.unary_unary(PREDICT)
        await asyncio.gather(call(predict, 60.0), client.health())
        took["scored"].clear()
        stop_s = time.monotonic() + seconds / 2
        await asyncio.gather(*(calls_in_turn(predict, stop_s) for _ in range(16)))
        capacity = len(took["scored"]) / (seconds / 2)
        took["scored"].clear()
        next_s = started_s = time.monotonic()
        health_s, tasks = started_s, set[asyncio.Task[None]]()
        while (now_s := time.monotonic()) < started_s + seconds:
            while next_s <= now_s:
                next_s += random.exponential(1 / (10 * capacity))
                task = asyncio.create_task(call(predict, patience_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if now_s >= health_s:
                health_s = now_s + 0.1
                await client.health()
                took["health"].append(time.monotonic() - now_s)
            await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
        await asyncio.gather(*tasks)
    offered = sum(len(took[end]) for end in ("scored", "refused", "late"))
    return FloodReport(
        capacity=capacity,
        offered=offered / seconds,
        scored=len(took["scored"]) / seconds,
        refused=len(took["refused"]) / offered,
        late=len(took["late"]) / offered,
        wrong=wrong,
        p99_s=_p99(took["scored"] + took["late"]),
        refused_p99_s=_p99(took["refused"]),
        health_p99_s=_p99(took["health"]),
    )


def message_of(rows: Sequence[np.ndarray]) -> bytes:
    """A request of those rows."""
    values, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
    return pb.PredictRequest(
        model=MODEL,
        values=pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=values.shape, data=values.tobytes()),
        lengths=pb.Tensor(dtype=pb.DATA_TYPE_INT64, shape=lengths.shape, data=lengths.tobytes()),
    ).SerializeToString()


def _p99(seconds: list[float]) -> float:
    return float(np.quantile(seconds or [0.0], 0.99))
