"""Which models are served, by name and version."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from qrnn_serve.core.errors import ModelNotFoundError, UnavailableError
from qrnn_serve.engine.request import ScoredRequest
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.server.codec import ModelIdentity
from qrnn_serve.server.stages import StageHistograms


class Submitter(Protocol):
    """What scores rows: the replicas of this process, or a way to those of another."""

    @property
    def max_row_timesteps(self) -> int:
        """The longest row that can be scored."""
        ...

    async def submit(self, rows: PackedRows, *, deadline_s: float | None = None) -> ScoredRequest:
        """Score rows that were validated; as `ReplicaPool.submit`."""
        ...


_numbers = itertools.count(1)

PoolT = TypeVar("PoolT", bound=Submitter)


class ServedModel(Generic[PoolT]):
    """A version of a model that is ready, and the pool that scores with it.

    Attributes:
        identity: Its name, version and schema.
        pool: The pool.
        stages: Where the time of its requests went.
        number: Names it among all that this process has served.
    """

    def __init__(self, identity: ModelIdentity, pool: PoolT) -> None:
        self.identity = identity
        self.pool = pool
        self.number = next(_numbers)
        self.stages = StageHistograms()
        self._calls = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Around all that a call does with it: it is not taken away meanwhile."""
        self._calls += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._unused.set()

    async def unused(self) -> None:
        """Wait until no call uses it."""
        await self._unused.wait()


class Models(Generic[PoolT]):
    """The served models, one version of each. Changed in the event loop, read by any thread.

    Attributes:
        started: Whether all that the server should serve at its start was loaded.
    """

    def __init__(self) -> None:
        self._served: dict[str, ServedModel[PoolT]] = {}
        self.started = False

    def serve(self, model: ServedModel[PoolT]) -> ServedModel[PoolT] | None:
        """Make a model available under its name; returns the version of it that did serve."""
        replaced = self._served.get(model.identity.name)
        self._served = self._served | {model.identity.name: model}
        return replaced

    def withdraw(self, name: str) -> ServedModel[PoolT] | None:
        """Make a model unavailable; returns the version of it that did serve."""
        withdrawn = self._served.get(name)
        self._served = {n: model for n, model in self._served.items() if n != name}
        return withdrawn

    def serving(self, name: str) -> ServedModel[PoolT] | None:
        """The version that serves under a name."""
        return self._served.get(name)

    def all(self) -> tuple[ServedModel[PoolT], ...]:
        """Every served model, by name."""
        served = self._served
        return tuple(served[name] for name in sorted(served))

    def find(self, name: str, version: str) -> ServedModel[PoolT]:
        """The model that a request asks for; empty text asks for the only one and what serves now.

        Raises:
            ModelNotFoundError: It is not served; the message has what is.
            UnavailableError: The server is starting.
        """
        self.check_started()
        served = self._served
        if not name and len(served) > 1:
            raise ModelNotFoundError(f"model: expected one of {sorted(served)}, got no name")
        model = next(iter(served.values()), None) if not name else served.get(name)
        if model is None:
            raise ModelNotFoundError(f"model: expected one of {sorted(served)}, got {name[:100]!r}")
        if version not in {"", model.identity.version}:
            raise ModelNotFoundError(
                f"version of {model.identity.name!r}: expected {model.identity.version!r}, "
                f"got {version[:100]!r}"
            )
        return model

    def check_started(self) -> None:
        """Check that the server is not still loading what it should serve.

        Raises:
            UnavailableError: It is.
        """
        if not self.started:
            raise UnavailableError("the server is starting and has no model yet; try again later")
