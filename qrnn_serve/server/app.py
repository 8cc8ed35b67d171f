"""The one place that wires models, what takes calls, health and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qrnn_serve.engine.pool import PoolSnapshot, ReplicaPool
from qrnn_serve.server import health, service
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.control import LocalControl
from qrnn_serve.server.front import GrpcFront
from qrnn_serve.server.front_ends import FrontEnds
from qrnn_serve.server.keeper import Keeper, LoadersOf
from qrnn_serve.server.lifecycle import ModelLifecycle, ModelSource
from qrnn_serve.server.models import Models
from qrnn_serve.server.prometheus import PrometheusExporter

EXIT_OK = 0
EXIT_FAILED = 1

# For the errors that end the calls left after the grace period, and last health messages.
_FLUSH_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A folder of models to serve.

    Attributes:
        folder: It holds NAME/VERSION/ARTEFACT.
        loaders_of: What loads an artefact.
    """

    folder: Path
    loaders_of: LoadersOf


class Server:
    """Serves one model, or those of a repository. Used in one event loop.

    What takes calls is this process, or with `--front-ends` several others.

    Attributes:
        port: The port it listens on, after `start`.
    """

    def __init__(self, config: ServerConfig, served: ModelSource | Repository) -> None:
        self._config = config
        self._served = served
        self._models: Models[ReplicaPool] = Models()
        self._lifecycle = ModelLifecycle(self._models, config, self._follow_models)
        self._keeper: Keeper | None = None
        if isinstance(served, Repository):
            self._keeper = Keeper(served.folder, served.loaders_of, self._lifecycle)
        control = LocalControl(
            self._models,
            self._lifecycle,
            self._keeper if config.model_control == "rpc" else None,
            config.queue_timesteps,
        )
        front = GrpcFront if config.front_ends == 1 else FrontEnds
        self._front = front(config, self._models, control)
        self._watch: asyncio.Task[None] | None = None
        self._accepting = False
        self._exporter: PrometheusExporter | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, load the models, warm them up, and say that they serve.

        Health checks are answered from the first moment, with NOT_SERVING until the end.

        Raises:
            ConfigError: The address cannot be listened on.
            QRNNError: A model cannot be loaded or does not pass its warm-up.
        """
        config = self._config
        self._front.health.set(service.SERVICE_NAME, health.NOT_SERVING)
        if isinstance(self._served, ModelSource):
            self._front.health.set(self._served.name, health.NOT_SERVING)
        self.port = await self._front.start()
        if config.prometheus_port is not None:
            self._exporter = PrometheusExporter(
                config.host,
                config.prometheus_port,
                self._models.all,
                self._lifecycle.statuses,
                self._front if isinstance(self._front, FrontEnds) else None,
            )
            logger.info("metrics port=%d", self._exporter.port)
        if isinstance(self._served, ModelSource):
            await self._lifecycle.load(self._served)
        elif self._keeper is not None:
            await self._keeper.start()
            if config.model_control == "watch":
                self._watch = asyncio.create_task(self._keeper.watch(config.watch_s))
        self._models.started = self._accepting = True
        self._follow_models()

    def snapshot(self) -> PoolSnapshot:
        """Queue depth and counts of the only model now."""
        return self._models.find("", "").pool.snapshot()

    async def failed(self) -> None:
        """Return when no model can be served any more, or no call taken."""
        ends = (self._lifecycle.failed.wait(), self._front.failed())
        tasks = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self, grace_s: float) -> bool:
        """Say NOT_SERVING, refuse new calls, let the running ones end for `grace_s` seconds, stop.

        Returns:
            Whether every running call was answered and no replica was busy any more.
        """
        deadline_s = time.monotonic() + grace_s
        self._accepting = False
        if self._watch is not None:
            self._watch.cancel()
        self._front.health.set_all(health.NOT_SERVING)
        drained = await _within(grace_s, self._front.drain())
        if not drained:
            logger.warning("grace period ended with calls still running grace_s=%g", grace_s)
        # Calls that are left get UNAVAILABLE from here.
        ended = await self._lifecycle.stop()
        await _within(_FLUSH_S, self._front.drain())
        # A reply of megabytes is still on its way when its call has ended here, for as long as the
        # client takes to read it. gRPC returns as soon as all are sent.
        left_s = deadline_s - time.monotonic() if drained else 0.0
        await self._front.stop(max(left_s, _FLUSH_S))
        if self._exporter is not None:
            self._exporter.close()
        return drained and ended

    def _follow_models(self) -> None:
        """Health between start and stop: SERVING is a model with a replica, and a server with one.

        A repository without models serves, as far as it can.
        """
        self._follow_health()
        self._front.publish()

    def _follow_health(self) -> None:
        if not self._accepting:
            return
        serving = {
            m.identity.name: self._lifecycle.serves(m.identity.name) for m in self._models.all()
        }
        whole = any(serving.values()) or not serving
        known = self._front.health
        for name in known.names - serving.keys():
            known.set(name, health.NOT_SERVING)
        for name, is_serving in {
            **serving,
            health.WHOLE_SERVER: whole,
            service.SERVICE_NAME: whole,
        }.items():
            known.set(name, health.SERVING if is_serving else health.NOT_SERVING)


async def serve(
    config: ServerConfig, served: ModelSource | Repository, announce: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT, or until no model can be served.

    Args:
        config: The settings.
        served: A model, or a repository of them.
        announce: Told HOST:PORT once they serve.

    Returns:
        The exit status: 0 after an orderly shutdown, 1 when calls were lost or every model failed.

    Raises:
        QRNNError: The server could not start.
    """
    server = Server(config, served)
    async with _stop_signals() as stopping:
        try:
            if not await _finishes_before(stopping, server.start()):
                await server.stop(grace_s=0)
                return EXIT_OK
        except BaseException:
            await server.stop(grace_s=0)
            raise
        announce(config.address(server.port))
        if await _finishes_before(stopping, server.failed()):
            logger.error("the model failed; the process ends so that it can be started again")
            await server.stop(config.grace_s)
            return EXIT_FAILED
        logger.info("stopping grace_s=%g", config.grace_s)
        in_order = await server.stop(config.grace_s)
        return EXIT_OK if in_order else EXIT_FAILED


@contextlib.asynccontextmanager
async def _stop_signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _finishes_before(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Wait for `work` or `stop`; whether `work` came first. Else it is cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def _within(timeout_s: float, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` ended in time; it gets to run once even when there is none."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    await asyncio.wait((task,), timeout=timeout_s)
    task.cancel()
    return task.done()
