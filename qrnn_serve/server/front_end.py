"""A process that takes calls: gRPC, decoding, checks and encoding; rows go to the engine's process.

Started by front_ends.py. It ends when the link to the engine's process closes, and the kernel ends
it when that process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from qrnn_serve.core import errors
from qrnn_serve.core.child_process import end_with_parent
from qrnn_serve.core.config import from_mapping
from qrnn_serve.core.errors import OverloadedError, QRNNError, UnavailableError
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.engine.request import BatchTiming, RowFailure, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows
from qrnn_serve.server.codec import ModelIdentity
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.event_loop import run
from qrnn_serve.server.front import GrpcFront
from qrnn_serve.server.link import Array, Facts, Link, allow_many_files
from qrnn_serve.server.models import Models, ServedModel

_STAGES_INTERVAL_S = 1.0
_ENDED = "the server ended; try again"

Answer = tuple[Facts, list[Array]]


class EngineLink:
    """The front end's side of the link: calls of the engine, answered in any order.

    Attributes:
        ended: Set when the engine's process has ended, or has told this one to.
        grace_s: Seconds for replies on their way then.
    """

    def __init__(self, end: socket.socket, front_end: FrontEnd) -> None:
        self.ended = asyncio.Event()
        self.grace_s = 0.0
        self._front_end = front_end
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._link = Link(end, self._receive, self._on_end)

    def send(self, facts: Facts) -> None:
        """Tell the engine something that it does not answer."""
        self._link.send(facts)

    async def ask(self, facts: Facts, arrays: Sequence[Array]) -> Answer:
        """Ask the engine for something.

        Raises:
            QRNNError: What the engine raised.
            UnavailableError: It ended.
        """
        if self.ended.is_set():
            raise UnavailableError(_ENDED)
        call = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        try:
            self._link.send(facts | {"call": call}, arrays)
            return await answer
        except asyncio.CancelledError:
            self._link.send({"kind": "cancel", "call": call})
            raise
        finally:
            del self._answers[call]

    def close(self) -> None:
        """End the link; the engine's process hears of it."""
        self._link.close()

    def _receive(self, facts: Facts, arrays: list[Array]) -> None:
        kind = facts["kind"]
        if kind == "state":
            self._front_end.follow(facts)
        elif kind == "drain":
            self._front_end.begin_to_drain()
        elif kind == "stop":
            self.grace_s = facts["grace_s"]
            self.ended.set()
        else:
            self._answer(facts, arrays)

    def _answer(self, facts: Facts, arrays: list[Array]) -> None:
        # A call that was cancelled may be answered all the same.
        answer = self._answers.get(facts["call"])
        if answer is None or answer.done():
            return
        if facts["kind"] == "error":
            answer.set_exception(_error_of(facts["error"]))
        else:
            answer.set_result((facts, arrays))

    def _on_end(self) -> None:
        self.ended.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UnavailableError(_ENDED))


class RemotePool:
    """Scores rows of one version of a model in the engine's process."""

    def __init__(self, link: EngineLink, number: int, max_row_timesteps: int) -> None:
        """`number` names the model in the engine's process."""
        self._link = link
        self.number = number
        self.max_row_timesteps = max_row_timesteps

    async def submit(self, rows: PackedRows, *, deadline_s: float | None = None) -> ScoredRequest:
        """Score rows that were validated; as `ReplicaPool.submit`.

        The deadline is told as it is: the monotonic clock is one for all processes of a machine.
        """
        question = {"kind": "submit", "number": self.number, "deadline_s": deadline_s}
        state = () if rows.state is None else (rows.state,)
        facts, arrays = await self._link.ask(question, [rows.values, rows.lengths, *state])
        indices, *scored = arrays
        return ScoredRequest(
            rows=indices,
            scored=ScoredRows(output=scored[0], state=scored[1]) if scored else None,
            failures=tuple(
                RowFailure(row=row, error=_error_of(error)) for row, error in facts["failures"]
            ),
            timing=BatchTiming(**facts["timing"]),
            device=facts["device"],
            engine=facts["engine"],
        )


class RemoteControl:
    """A Control of the engine's process."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    async def answer(self, method: str, message: bytes) -> bytes:
        """Answer one of the service's other methods."""
        question = {"kind": "control", "method": method}
        _, arrays = await self._link.ask(question, [np.frombuffer(message, np.uint8)])
        return arrays[0].tobytes()


class FrontEnd:
    """One front end. Used in one event loop."""

    def __init__(self, config: ServerConfig, end: socket.socket) -> None:
        self._link = EngineLink(end, self)
        self._models: Models[RemotePool] = Models()
        control = RemoteControl(self._link)
        self._grpc = GrpcFront(config, self._models, control, shares_port=True)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Take calls until the engine's process says stop, or ends.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        await self._grpc.start()
        self._link.send({"kind": "ready", "pid": os.getpid()})
        while not self._link.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._link.ended.wait(), _STAGES_INTERVAL_S)
            self._tell_stages(*self._models.all())
        await self._grpc.stop(self._link.grace_s)
        self._link.close()

    def follow(self, state: Facts) -> None:
        """Take over what is served and what health says."""
        told_names = {told["name"] for told in state["models"]}
        known = {model.pool.number for model in self._models.all()}
        for model in self._models.all():
            if model.identity.name not in told_names:
                self._retire(self._models.withdraw(model.identity.name))
        for told in state["models"]:
            if told["number"] in known:
                continue
            identity = ModelIdentity(
                name=told["name"],
                version=told["version"],
                schema=from_mapping(ModelSchema, told["schema"]),
            )
            pool = RemotePool(self._link, told["number"], told["max_row_timesteps"])
            self._retire(self._models.serve(ServedModel(identity, pool)))
        self._models.started = state["started"]
        for service, status in state["health"].items():
            self._grpc.health.set(service, status)

    def begin_to_drain(self) -> None:
        """Refuse new calls, and tell the engine's process when the running ones have ended."""

        async def drain() -> None:
            await self._grpc.drain()
            self._tell_stages(*self._models.all())
            self._link.send({"kind": "drained"})

        self._in_background(drain())

    def _retire(self, model: ServedModel[RemotePool] | None) -> None:
        """Tell the engine's process when no call here uses a version any more."""
        if model is None:
            return

        async def release(model: ServedModel[RemotePool]) -> None:
            await model.unused()
            self._tell_stages(model)
            self._link.send({"kind": "released", "number": model.pool.number})

        self._in_background(release(model))

    def _tell_stages(self, *models: ServedModel[RemotePool]) -> None:
        for model in models:
            counted = model.stages.take()
            if counted is not None:
                counts, sums_s = counted
                facts = {"kind": "stages", "number": model.pool.number}
                self._link.send(facts | {"counts": counts, "sums_s": sums_s})

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main(arguments: Sequence[str]) -> None:
    """Serve as one front end: ServerConfig as JSON, the level of logging, the link's descriptor."""
    text, log_level, fd = arguments
    logging.basicConfig(
        level=int(log_level),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    end_with_parent()
    keep_freed_memory()
    allow_many_files()
    os.set_inheritable(int(fd), False)
    config = from_mapping(ServerConfig, json.loads(text))

    async def serve() -> None:
        await FrontEnd(config, socket.socket(fileno=int(fd))).serve()

    run(serve(), config.event_loop)


def _error_of(facts: Facts) -> QRNNError:
    """The error that the engine's process told of."""
    kind = getattr(errors, facts["class"])
    if kind is OverloadedError:
        return OverloadedError(facts["message"], retry_after_s=facts["retry_after_s"])
    return kind(facts["message"])


if __name__ == "__main__":
    main(sys.argv[1:])
