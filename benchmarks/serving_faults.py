"""What happens to the other callers: a wrong call among them, callers that vanish, SIGTERM."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from qrnn_serve import SequenceModel
from serving_cases import WIDTH, inputs_of
from serving_load import Inputs
from serving_servers import Server
from serving_wire import AnswerError, Call, Wire

_IN_FLIGHT = 16
_TRIES = 5
_VANISHING = 256
# Of the time that all answers take: long enough for the calls to arrive, and most is still to do.
_UNDER_WAY = 1 / 3
_SETTLE_S = 2.0
_GIVE_UP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInputs:
    """Calls for the faults.

    Attributes:
        usual: Sequences of 128.
        long: Sequences of 1024, so that 16 of them are under way for long.
    """

    usual: Inputs
    long: Inputs


def fault_inputs(model: SequenceModel) -> FaultInputs:
    """Seeded calls."""
    return FaultInputs(
        usual=inputs_of(model, (128,) * _IN_FLIGHT, 1),
        long=inputs_of(model, (1024,) * _IN_FLIGHT, 1),
    )


def poisons(good: np.ndarray) -> dict[str, np.ndarray]:
    """Wrong calls, each made from a good one."""
    not_a_number = good.copy()
    not_a_number[0, len(good[0]) // 2, 3] = np.nan
    return {
        "a feature missing": good[:, :, : WIDTH - 1],
        "no timestep": good[:, :0],
        "a NaN": not_a_number,
    }


async def bad_neighbour(
    wire: Wire, port: int, inputs: Inputs, poison: np.ndarray
) -> dict[str, Any]:
    """Sixteen calls at once of which one is wrong: who else is harmed, and is the wrong one told?

    Which calls share a batch is up to chance, so this is the worst of several tries.
    """
    messages = [wire.encode(values) for values in inputs.values]
    messages[_IN_FLIGHT // 2] = wire.encode(poison)
    fewest, refused = _IN_FLIGHT, True
    for _ in range(_TRIES):
        connections = await wire.connect(port, _IN_FLIGHT)
        try:
            answers = await _all_answers(connections.calls, messages)
        finally:
            await connections.close()
        refused &= not _is_answer(wire, answers.pop(_IN_FLIGHT // 2))
        numbers = [n for n in range(_IN_FLIGHT) if n != _IN_FLIGHT // 2]
        right = sum(_is_right(wire, inputs, n, a) for n, a in zip(numbers, answers, strict=True))
        fewest = min(fewest, right)
    return {"neighbours answered": fewest, "of": _IN_FLIGHT - 1, "refused": refused}


async def vanishing_callers(server: Server, inputs: Inputs) -> dict[str, Any]:
    """Many calls whose callers leave after a third of the time that the answers would take.

    "work done" is the processor time that they cost beside that of answering them all: about a
    third where all that waits is dropped, 1 where nothing is.
    """
    wire = server.peer.wire
    messages = [wire.encode(values) for values in inputs.values]
    calls = [messages[number % len(messages)] for number in range(_VANISHING)]

    before_s = server.cpu_s()
    took_s = await _seconds_of(server, calls)
    await asyncio.sleep(_SETTLE_S)
    answered_s = server.cpu_s() - before_s

    before_s = server.cpu_s()
    connections = await wire.connect(server.port, _VANISHING)
    waiting = asyncio.ensure_future(_all_answers(connections.calls, calls))
    await asyncio.sleep(took_s * _UNDER_WAY)
    await connections.close()
    started = time.perf_counter()
    next_caller = await wire.connect(server.port, 1)
    answer = (await _all_answers(next_caller.calls, messages[:1]))[0]
    waited_s = time.perf_counter() - started
    if not _is_right(wire, inputs, 0, answer):
        raise AnswerError(f"the caller after those that vanished was not answered: {answer!r}")
    await waiting
    await next_caller.close()
    await asyncio.sleep(_SETTLE_S)
    return {
        "work done": (server.cpu_s() - before_s) / answered_s,
        "next caller ms": waited_s * 1e3,
    }


async def terminated(server: Server, inputs: Inputs) -> dict[str, Any]:
    """SIGTERM with sixteen calls under way: how many are answered."""
    wire = server.peer.wire
    messages = [wire.encode(values) for values in inputs.values]
    took_s = await _seconds_of(server, messages)
    connections = await wire.connect(server.port, _IN_FLIGHT)
    waiting = asyncio.ensure_future(_all_answers(connections.calls, messages))
    await asyncio.sleep(took_s * _UNDER_WAY)
    server.terminate()
    answers = await waiting
    await connections.close()
    right = sum(_is_right(wire, inputs, number, answer) for number, answer in enumerate(answers))
    return {"answered": right, "of": _IN_FLIGHT}


async def _seconds_of(server: Server, messages: list[bytes]) -> float:
    """How long all answers take when nothing is wrong."""
    connections = await server.peer.wire.connect(server.port, len(messages))
    started = time.perf_counter()
    await _all_answers(connections.calls, messages)
    took_s = time.perf_counter() - started
    await connections.close()
    return took_s


async def _all_answers(calls: list[Call], messages: list[bytes]) -> list[bytes | BaseException]:
    """What each caller got: an answer or an exception."""
    pairs = zip(calls, messages, strict=True)
    tries = (asyncio.wait_for(call(message), _GIVE_UP_S) for call, message in pairs)
    return await asyncio.gather(*tries, return_exceptions=True)


def _is_answer(wire: Wire, answer: bytes | BaseException) -> bool:
    if isinstance(answer, BaseException):
        return False
    try:
        wire.decode(answer)
    except AnswerError:
        return False
    return True


def _is_right(wire: Wire, inputs: Inputs, number: int, answer: bytes | BaseException) -> bool:
    """Whether it is scores; they must be the model's."""
    if isinstance(answer, BaseException):
        return False
    try:
        scores = wire.decode(answer)
    except AnswerError:
        return False
    inputs.check(number, scores)
    return True
