"""Loads models beside the ones that serve, switches between them, and drains what was replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.pool import ReplicaPool
from qrnn_serve.engine.types import ScorerLoader
from qrnn_serve.scorers.memory import free_host_bytes
from qrnn_serve.server.codec import ModelIdentity
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.models import Models, ServedModel

LocalModel = ServedModel[ReplicaPool]
"""A model whose replicas this process owns."""

logger = logging.getLogger(__name__)


class State(IntEnum):
    """Of a version; the numbers of the wire."""

    LOADING = pb.VERSION_STATE_LOADING
    SERVING = pb.VERSION_STATE_SERVING
    DRAINING = pb.VERSION_STATE_DRAINING
    FAILED = pb.VERSION_STATE_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A version of a model that can be loaded.

    Attributes:
        name: The model's.
        version: Its own.
        loaders: Makes what loads it, one loader a replica. Raises what keeps it from being loaded.
        nbytes: Memory that a replica of it is counted with: the size of its files.
    """

    name: str
    version: str
    loaders: Callable[[], Sequence[ScorerLoader]]
    nbytes: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class VersionStatus:
    """What became of a version. Read by any thread.

    Attributes:
        model: The model's name.
        version: Its version.
        state: Where it is in its life.
        error: Why it failed, or "".
        nbytes: Memory that it is counted with while a pool of it exists.
    """

    model: str
    version: str
    state: State
    error: str = ""
    nbytes: int = 0


class ModelLifecycle:
    """Owns the pools of all models. Used in one event loop.

    Attributes:
        failed: Set when every served model has lost its last replica for good.
    """

    def __init__(
        self, models: Models[ReplicaPool], config: ServerConfig, on_serving: Callable[[], None]
    ) -> None:
        """`on_serving` is told when any model begins or ceases to serve."""
        self._models = models
        self._config = config
        self._on_serving = on_serving
        self._statuses: list[VersionStatus] = []
        self._pools: dict[ReplicaPool, VersionStatus] = {}
        self._failures: dict[ReplicaPool, asyncio.Task[None]] = {}
        self._able: set[ReplicaPool] = set()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()

    def statuses(self) -> list[VersionStatus]:
        """Every version that is loaded, on its way in or out, or failed last."""
        return list(self._statuses)

    def serves(self, name: str) -> bool:
        """Whether at least one replica of that model scores."""
        model = self._models.serving(name)
        return model is not None and model.pool in self._able

    async def load(self, source: ModelSource) -> LocalModel:
        """Load, warm up and check a version, then put it in the place of the one that serves.

        Raises:
            ConfigError: There is no memory for it, or the settings do not fit it.
            Exception: What its file or its device raised. The version before serves on.
        """
        async with self._changing:
            self.forget_failures(source.name, source.version)
            status = self._add(source)
            started_s = time.monotonic()
            pool = None
            try:
                self._check_memory(source)
                pool = ReplicaPool(
                    await asyncio.to_thread(source.loaders),
                    self._config.pool_config,
                    on_serving=lambda serving: self._follow(pool, serving),
                )
                self._pools[pool] = status
                await pool.start()
            except BaseException as error:
                status.state, status.error = State.FAILED, str(error)
                status.nbytes = 0
                if pool is not None:
                    await self._end(pool)
                raise
            model = self._switch(source, status, pool)
        logger.info(
            "serving model=%r version=%r engine=%s devices=%s start_s=%.3f",
            source.name,
            source.version,
            pool.engine,
            ",".join(pool.devices),
            time.monotonic() - started_s,
        )
        return model

    async def unload(self, name: str) -> bool:
        """Take a model out of service; returns, once it is gone, whether it did serve."""
        async with self._changing:
            self.forget_failures(name)
            model = self._models.withdraw(name)
            self._on_serving()
        if model is None:
            return False
        await self._retire(model)
        return True

    async def stop(self) -> bool:
        """End every pool; whether none was busy any more."""
        for task in self._tasks:
            task.cancel()
        return all(await asyncio.gather(*(pool.stop() for pool in tuple(self._pools))))

    def forget_failures(self, name: str, version: str | None = None) -> None:
        """Report no more that a version, or any of a model, failed."""
        self._statuses = [
            status
            for status in self._statuses
            if status.state is not State.FAILED
            or status.model != name
            or version not in {None, status.version}
        ]

    def _switch(self, source: ModelSource, status: VersionStatus, pool: ReplicaPool) -> LocalModel:
        identity = ModelIdentity(name=source.name, version=source.version, schema=pool.schema)
        model = ServedModel(identity, pool)
        replaced = self._models.serve(model)
        status.state = State.SERVING
        self._able.add(pool)
        self.forget_failures(source.name, source.version)
        self._failures[pool] = self._in_background(self._await_failure(pool, status))
        if replaced is not None:
            self._in_background(self._retire(replaced))
        self._on_serving()
        return model

    async def _retire(self, model: LocalModel) -> None:
        status = self._pools[model.pool]
        status.state = State.DRAINING
        await model.unused()
        await self._end(model.pool)
        self._statuses = [other for other in self._statuses if other is not status]
        logger.info("ended model=%r version=%r", status.model, status.version)

    async def _end(self, pool: ReplicaPool) -> None:
        if pool in self._failures:
            # It would wait, and keep the pool, for ever.
            self._failures.pop(pool).cancel()
        await pool.stop()
        self._able.discard(pool)
        self._pools.pop(pool, None)

    async def _await_failure(self, pool: ReplicaPool, status: VersionStatus) -> None:
        await pool.failed.wait()
        if status.state is State.SERVING:
            status.state, status.error = State.FAILED, "its last replica was given up"
            logger.error("failed model=%r version=%r", status.model, status.version)
            if all(model.pool.failed.is_set() for model in self._models.all()):
                self.failed.set()

    def _follow(self, pool: ReplicaPool | None, serving: bool) -> None:
        """A pool has its first replica, or has lost its last."""
        if pool is not None:
            (self._able.add if serving else self._able.discard)(pool)
            self._on_serving()

    def _check_memory(self, source: ModelSource) -> None:
        """Check that a version fits beside all that is loaded."""
        counted = self._config.bytes_on_a_device
        needed = counted(source.nbytes)
        cap = self._config.model_memory_bytes
        taken = sum(counted(status.nbytes) for status in self._pools.values())
        if cap is not None:
            room, place = cap - taken, f"{taken} of --model-memory-bytes {cap} are taken"
        elif "cpu" in self._config.devices:
            room = free_host_bytes()
            place = f"{room} are free on this machine"
        else:
            return
        if needed > room:
            loaded = ", ".join(f"{s.model} version {s.version}" for s in self._pools.values())
            raise ConfigError(
                f"model {source.name!r} version {source.version}: needs {needed} bytes of memory "
                f"on a device, {place}, {needed - room} bytes are missing. "
                f"Loaded: {loaded or 'none'}. Unload one, or give more memory"
            )

    def _add(self, source: ModelSource) -> VersionStatus:
        status = VersionStatus(
            model=source.name, version=source.version, state=State.LOADING, nbytes=source.nbytes
        )
        self._statuses = [*self._statuses, status]
        return status

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
