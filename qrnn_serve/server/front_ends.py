"""The processes that take calls for this one, which has the models, the queue and the replicas.

Each is front_end.py over a Link. It decodes and checks requests and encodes replies; packed rows
come here, go through the one queue, and scores go back. What a front end must know of the models
and of health is told to it at every change. It says when none of its calls uses a version any more;
until then, or until it ends, the version counts as in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from qrnn_serve.core import errors
from qrnn_serve.core.config import to_mapping
from qrnn_serve.core.errors import OverloadedError, QRNNError, UnavailableError
from qrnn_serve.engine.pool import ReplicaPool
from qrnn_serve.engine.request import ScoredRequest
from qrnn_serve.engine.supervision import Restarts
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.front import cannot_listen
from qrnn_serve.server.health import Health
from qrnn_serve.server.lifecycle import LocalModel
from qrnn_serve.server.link import Array, Facts, Link, allow_many_files
from qrnn_serve.server.models import Models
from qrnn_serve.server.service import Control

Answer = tuple[Facts, list[Array]]

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_INTERNAL = "internal error; the server's log has it"

logger = logging.getLogger(__name__)


class FrontEnds:
    """Several front ends on one port. Used in one event loop.

    Attributes:
        health: What their health services say, after `publish`.
        restarts: Front ends that were started again.
    """

    def __init__(self, config: ServerConfig, models: Models[ReplicaPool], control: Control) -> None:
        self.health = Health()
        self.restarts = 0
        self._config = config
        self._models = models
        self._control = control
        self._port = socket.socket()
        self._links: set[FrontEndLink] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._given_up = 0
        self._failed = asyncio.Event()

    @property
    def alive(self) -> int:
        """Front ends that take calls now."""
        return sum(link.ready.done() for link in self._links)

    async def start(self) -> int:
        """Start all, wait until they listen; returns the port.

        Raises:
            ConfigError: The address cannot be listened on.
            UnavailableError: A front end did not start; the log has why.
        """
        allow_many_files()
        port = self._reserve_port()
        self._config = replace(self._config, port=port)
        started = [
            asyncio.get_running_loop().create_future() for _ in range(self._config.front_ends)
        ]
        self._tasks = [
            asyncio.create_task(self._keep(number, future)) for number, future in enumerate(started)
        ]
        await asyncio.gather(*started)
        return port

    def publish(self) -> None:
        """Tell all what is served and what health says now."""
        for link in self._links:
            link.publish(self._models, self.health)

    async def failed(self) -> None:
        """Return when the last front end was given up."""
        await self._failed.wait()

    async def drain(self) -> None:
        """Have all refuse new calls from now on; wait until the running ones have ended."""
        self._stopping.set()
        self.publish()
        await asyncio.gather(*(link.drain() for link in self._links))

    async def stop(self, grace_s: float) -> None:
        """End all; replies on their way get `grace_s` seconds."""
        self._stopping.set()
        for link in self._links:
            link.end(grace_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s + _END_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._port.close()

    def _reserve_port(self) -> int:
        """A port that is ours: no other program can listen on it while this socket is open."""
        host = self._config.host
        address = self._config.address(self._config.port)
        try:
            family, *_, place = socket.getaddrinfo(
                host, self._config.port, type=socket.SOCK_STREAM
            )[0]
            # Fails where anyone listens, as two servers on one port would share its connections.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
                place = probe.getsockname()
            self._port.close()
            self._port = socket.socket(family)
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._port.bind(place)
        except OSError as error:
            raise cannot_listen(address) from error
        return self._port.getsockname()[1]

    async def _keep(self, number: int, started: asyncio.Future[None]) -> None:
        """Run one front end, and start it again when it ends, until the server stops."""
        restarts = Restarts(self._config.pool_config.supervision)
        while not self._stopping.is_set():
            try:
                status = await self._run(number, restarts, started)
            except Exception as error:  # whatever it is, the other front ends go on
                status = str(error)
            if self._stopping.is_set():
                return
            if not started.done():
                message = f"front end {number} did not start: {status}; the log has what it said"
                started.set_exception(UnavailableError(message))
                return
            logger.error("front end lost number=%d: %s", number, status)
            wait_s = restarts.wait_s()
            if wait_s is None:
                logger.error("front end given up number=%d", number)
                self._given_up += 1
                if self._given_up == self._config.front_ends:
                    self._failed.set()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
            self.restarts += 1

    async def _run(self, number: int, restarts: Restarts, started: asyncio.Future[None]) -> str:
        """Run one front end to its end; how it ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = FrontEndLink(ours, self._models, self._control)
        try:
            with theirs:
                process = await _spawn(self._config, theirs.fileno())
            try:
                await self._serve_with(link, restarts, started)
            finally:
                link.close()
                status = await _end(process)
        finally:
            link.close()
        return f"exit status {status}" if status >= 0 else f"killed by signal {-status}"

    async def _serve_with(
        self, link: FrontEndLink, restarts: Restarts, started: asyncio.Future[None]
    ) -> None:
        """Wait until a front end listens, and then until it ends, or for the first too long."""
        self._links.add(link)
        try:
            link.publish(self._models, self.health)
            await asyncio.wait(
                (link.ready, link.ended),
                timeout=_START_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if link.ready.done():
                restarts.serving()
                if not started.done():
                    started.set_result(None)
                await link.ended
        finally:
            self._links.discard(link)


class FrontEndLink:
    """The engine's side of one front end.

    Attributes:
        ready: Done when it listens.
        ended: Done when it has ended, or was told to.
    """

    def __init__(self, end: socket.socket, models: Models[ReplicaPool], control: Control) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._models = models
        self._control = control
        self._calls: dict[int, asyncio.Task[None]] = {}
        # By number, each model that it may still use: it counts as in use until it is released.
        self._held: dict[int, tuple[LocalModel, contextlib.ExitStack]] = {}
        self._link = Link(end, self._receive, self._on_end)

    def publish(self, models: Models[ReplicaPool], health: Health) -> None:
        """Tell it what is served, and what health says."""
        served = models.all()
        for model in served:
            if model.number not in self._held:
                using = contextlib.ExitStack()
                using.enter_context(model.in_use())
                self._held[model.number] = model, using
        told = [
            {
                "number": model.number,
                "name": model.identity.name,
                "version": model.identity.version,
                "schema": to_mapping(model.identity.schema),
                "max_row_timesteps": model.pool.max_row_timesteps,
            }
            for model in served
        ]
        self._link.send(
            {"kind": "state", "models": told, "health": health.statuses, "started": models.started}
        )

    async def drain(self) -> None:
        """Have it refuse new calls; wait until its running ones have ended, or it has."""
        self._link.send({"kind": "drain"})
        await asyncio.wait((self._drained, self.ended), return_when="FIRST_COMPLETED")

    def end(self, grace_s: float) -> None:
        """Have it end; replies on their way get `grace_s` seconds."""
        self._link.send({"kind": "stop", "grace_s": grace_s})

    def close(self) -> None:
        """Forget it, and its calls."""
        self._link.close()

    def _on_end(self) -> None:
        for task in self._calls.values():
            task.cancel()
        for number in tuple(self._held):
            self._release(number)
        if not self.ended.done():
            self.ended.set_result(None)

    def _receive(self, facts: Facts, arrays: list[Array]) -> None:
        kind, call = facts["kind"], facts.get("call", 0)
        if kind == "submit":
            self._begin(call, partial(self._submit, facts, arrays))
        elif kind == "control":
            self._begin(call, partial(self._answer, facts, arrays))
        elif kind == "cancel":
            if call in self._calls:
                self._calls[call].cancel()
        elif kind == "stages":
            model, _ = self._held[facts["number"]]
            model.stages.merge(facts["counts"], facts["sums_s"])
        elif kind == "released":
            self._release(facts["number"])
        else:
            if kind == "ready":
                logger.info("front end serves pid=%d", facts["pid"])
            known = {"ready": self.ready, "drained": self._drained}[kind]
            if not known.done():
                known.set_result(None)

    def _begin(self, call: int, work: Callable[[], Awaitable[Answer]]) -> None:
        task = asyncio.create_task(self._told(call, work))
        self._calls[call] = task
        task.add_done_callback(lambda _: self._calls.pop(call, None))

    async def _told(self, call: int, work: Callable[[], Awaitable[Answer]]) -> None:
        try:
            facts, arrays = await work()
            self._link.send(facts | {"call": call}, arrays)
        except Exception as error:  # whatever it is, the caller must hear of it
            self._link.send({"kind": "error", "call": call, "error": _error_facts(error)})

    async def _submit(self, facts: Facts, arrays: list[Array]) -> Answer:
        model, _ = self._held[facts["number"]]
        values, lengths, *state = arrays
        rows = PackedRows(values=values, lengths=lengths, state=state[0] if state else None)
        answer = await model.pool.submit(rows, deadline_s=facts["deadline_s"])
        return _answer_facts(answer), _answer_arrays(answer)

    async def _answer(self, facts: Facts, arrays: list[Array]) -> Answer:
        reply = await self._control.answer(facts["method"], arrays[0].tobytes())
        return {"kind": "answer"}, [np.frombuffer(reply, np.uint8)]

    def _release(self, number: int) -> None:
        _, using = self._held.pop(number)
        using.close()


def _answer_facts(answer: ScoredRequest) -> Facts:
    return {
        "kind": "answer",
        "timing": asdict(answer.timing),
        "device": answer.device,
        "engine": answer.engine,
        "failures": [(failure.row, _error_facts(failure.error)) for failure in answer.failures],
    }


def _answer_arrays(answer: ScoredRequest) -> list[Array]:
    scored = answer.scored
    return [answer.rows, *(() if scored is None else (scored.output, scored.state))]


def _error_facts(error: Exception) -> Facts:
    if not isinstance(error, QRNNError):
        logger.error("unexpected error", exc_info=error)
        return {"class": "QRNNError", "message": _INTERNAL}
    known = next(k.__name__ for k in type(error).__mro__ if vars(errors).get(k.__name__) is k)
    facts: Facts = {"class": known, "message": str(error)}
    if isinstance(error, OverloadedError):
        facts["retry_after_s"] = error.retry_after_s
    return facts


async def _spawn(config: ServerConfig, fd: int) -> asyncio.subprocess.Process:
    level = logging.getLogger().getEffectiveLevel()
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "qrnn_serve.server.front_end"),
        *(json.dumps(to_mapping(config)), str(level), str(fd)),
        stdin=asyncio.subprocess.DEVNULL,
        # The server's standard output has its ready line and nothing else.
        stdout=2,
        pass_fds=(fd,),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C goes to the process group of the terminal; the server alone decides on the end.
        start_new_session=True,
    )


async def _end(process: asyncio.subprocess.Process) -> int:
    """Wait for a process whose link is closed, and which ends for that; its exit status."""
    try:
        return await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        return await process.wait()
