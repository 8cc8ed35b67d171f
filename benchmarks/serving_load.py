"""Callers that each send one call after the other, and the check of every answer."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from serving_wire import AnswerError, Wire


class WrongNumbersError(Exception):
    """A server's scores are not those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Different calls, and what the model in this process says of them.

    Attributes:
        values: For each call, float32 [B, T, I].
        scores: For each call, [B, C].
    """

    values: Sequence[np.ndarray]
    scores: Sequence[np.ndarray]

    def check(self, number: int, scores: np.ndarray) -> None:
        """Compare an answer to one of the calls.

        Raises:
            WrongNumbersError: It has another shape or other numbers.
        """
        expected = self.scores[number]
        if scores.shape != expected.shape:
            raise WrongNumbersError(f"expected scores {expected.shape}, got {scores.shape}")
        difference = float(np.abs(scores - expected).max())
        if not difference <= FLOAT32_MAX_ABS:
            raise WrongNumbersError(f"scores differ from the model's by up to {difference:.3g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What callers saw.

    Attributes:
        calls_per_s: Answers over the time from the first call to the last answer.
        cpu_ms: Processor time of the server for a call, which other programs change little.
        p50_ms: Median of the calls.
        p99_ms: Their 99th percentile.
    """

    calls_per_s: float
    cpu_ms: float
    p50_ms: float
    p99_ms: float


async def load(
    wire: Wire,
    port: int,
    inputs: Inputs,
    *,
    callers: int,
    seconds: float,
    warm_up_s: float = 0.1,
    cpu_s: Callable[[], float] = lambda: 0.0,
) -> Sample:
    """Load a server, check every answer, and only then say how fast it was.

    Args:
        wire: How it is talked to.
        port: Where.
        inputs: The calls, which go around.
        callers: How many send at once, each one call after the other.
        seconds: How long.
        warm_up_s: How long before that.
        cpu_s: Processor time of the server so far.

    Raises:
        AnswerError: A call failed.
        WrongNumbersError: An answer has wrong numbers.
    """
    messages = [wire.encode(values) for values in inputs.values]
    connections = await wire.connect(port, callers)
    numbers = itertools.cycle(range(len(messages)))
    answers: list[tuple[int, bytes]] = []
    times: list[float] = []

    async def caller(index: int, until: float) -> None:
        call = connections.calls[index]
        while True:
            number = next(numbers)
            started = time.perf_counter()
            answer = await call(messages[number])
            ended = time.perf_counter()
            answers.append((number, answer))
            times.append(ended - started)
            if ended >= until:
                return

    async def all_callers(duration_s: float) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(caller(index, started + duration_s) for index in range(callers)))
        return time.perf_counter() - started

    try:
        await all_callers(warm_up_s)
        times.clear()
        cpu_before_s = cpu_s()
        took_s = await all_callers(seconds)
        cpu_took_s = cpu_s() - cpu_before_s
    finally:
        await connections.close()
    for number, answer in answers:
        inputs.check(number, wire.decode(answer))
    times.sort()
    return Sample(
        calls_per_s=len(times) / took_s,
        cpu_ms=cpu_took_s / len(times) * 1e3,
        p50_ms=statistics.median(times) * 1e3,
        p99_ms=times[math.ceil(0.99 * len(times)) - 1] * 1e3,
    )


async def wait_until_serving(wire: Wire, port: int, inputs: Inputs, give_up_s: float) -> bool:
    """Whether it answered a call, rightly, within the time."""
    until = time.monotonic() + give_up_s
    while time.monotonic() < until:
        try:
            await load(wire, port, inputs, callers=1, seconds=0, warm_up_s=0)
        except AnswerError:
            await asyncio.sleep(0.1)
        else:
            return True
    return False
