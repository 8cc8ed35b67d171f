"""Keeps what is served in step with a repository: its newest versions that can be loaded."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from qrnn_serve.core.errors import ArtefactError, ConfigError, ModelNotFoundError, QRNNError
from qrnn_serve.engine.types import Scorer, ScorerLoader
from qrnn_serve.server.lifecycle import LocalModel, ModelLifecycle, ModelSource
from qrnn_serve.server.repository import StoredVersion, is_unchanged, scan

LoadersOf = Callable[[Path], Sequence[ScorerLoader]]
"""What loads the model file at a path."""

logger = logging.getLogger(__name__)


class Keeper:
    """Serves, of every model, the highest version that loads. Used in one event loop.

    A version that failed is tried again when its files change. One that is still being copied is
    not touched: its files must be the same at two looks in a row, and fit their proof.
    """

    def __init__(self, folder: Path, loaders_of: LoadersOf, lifecycle: ModelLifecycle) -> None:
        self._folder = folder
        self._loaders_of = loaders_of
        self._lifecycle = lifecycle
        self._served: dict[str, StoredVersion] = {}
        self._failed: dict[tuple[str, str], StoredVersion] = {}
        self._seen: set[StoredVersion] = set()

    async def start(self) -> None:
        """Load every model of the repository.

        Raises:
            ConfigError: The folder cannot be read, or no version of a model can be loaded.
        """
        stored = await asyncio.to_thread(scan, self._folder)
        self._seen = _all_of(stored)
        await self._follow(stored)
        lost = sorted(stored.keys() - self._served.keys())
        if lost:
            reasons = [
                f"{status.model} version {status.version}: {status.error}"
                for status in self._lifecycle.statuses()
                if status.model in lost
            ]
            raise ConfigError(
                f"no version of {', '.join(lost)} can be served: {'; '.join(reasons) or 'none'}"
            )

    async def watch(self, interval_s: float) -> None:
        """Look at the folder for ever, and load and unload what has changed."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                stored = await asyncio.to_thread(scan, self._folder)
            except ConfigError as error:
                # A network drive may come back; what is loaded needs it no more.
                logger.warning("%s; what is served stays", error)
                continue
            seen = _all_of(stored)
            settled = seen & self._seen
            self._seen = seen
            await self._follow(
                {name: [v for v in versions if v in settled] for name, versions in stored.items()},
                present={(version.model, version.version) for version in seen},
            )

    async def load(self, name: str, version: str) -> LocalModel:
        """Load one version now; an empty one is the highest.

        Raises:
            ModelNotFoundError: The repository has none of that name and version.
            QRNNError: It cannot be loaded.
        """
        stored = await asyncio.to_thread(scan, self._folder)
        found = [v for v in stored.get(name, []) if version in {"", v.version}]
        if not found:
            known = [v.version for v in stored.get(name, [])] or sorted(stored)
            raise ModelNotFoundError(
                f"model {name[:100]!r} version {version[:100] or 'any'}: not in the repository, "
                f"which has {known}"
            )
        return await self._load(found[0])

    async def unload(self, name: str) -> None:
        """Take a model out of service.

        Raises:
            ModelNotFoundError: It does not serve.
        """
        self._served.pop(name, None)
        if not await self._lifecycle.unload(name):
            raise ModelNotFoundError(f"model {name[:100]!r} is not served")

    async def _follow(
        self,
        stored: dict[str, list[StoredVersion]],
        present: set[tuple[str, str]] | None = None,
    ) -> None:
        """Serve the best of `stored`; `present` are also the versions that may still change."""
        if present is None:
            present = {(v.model, v.version) for versions in stored.values() for v in versions}
        for key in self._failed.keys() - present:
            del self._failed[key]
            self._lifecycle.forget_failures(*key)
        for name in sorted(stored.keys() | self._served.keys()):
            await self._serve_best(stored.get(name, []), self._served.get(name), present)
            if name in self._served and not any(model == name for model, _ in present):
                await self.unload(name)

    async def _serve_best(
        self,
        versions: list[StoredVersion],
        served: StoredVersion | None,
        present: set[tuple[str, str]],
    ) -> None:
        for version in versions:
            if version == served:
                return
            kept = served is not None and (served.model, served.version) in present
            if kept and served is not None and version.number < served.number:
                return
            if self._failed.get((version.model, version.version)) == version:
                continue
            try:
                await self._load(version)
            except QRNNError as error:
                self._note_failure(version)
                logger.error(
                    "cannot load model=%r version=%r: %s", version.model, version.version, error
                )
            except Exception:  # whatever a damaged file makes a library raise: the others serve on
                self._note_failure(version)
                logger.exception("cannot load model=%r version=%r", version.model, version.version)
            else:
                return

    def _note_failure(self, version: StoredVersion) -> None:
        self._failed[version.model, version.version] = version

    async def _load(self, version: StoredVersion) -> LocalModel:
        def loaders() -> Sequence[ScorerLoader]:
            if version.artefact is None:
                raise ArtefactError(version.problem)
            loaders = self._loaders_of(version.artefact)
            return [functools.partial(self._load_unchanged, version, load) for load in loaders]

        source = ModelSource(
            name=version.model, version=version.version, loaders=loaders, nbytes=version.nbytes
        )
        model = await self._lifecycle.load(source)
        self._served[version.model] = version
        self._failed.pop((version.model, version.version), None)
        return model

    def _load_unchanged(self, version: StoredVersion, load: ScorerLoader) -> Scorer:
        """Load a replica, at the start or after it failed, but never of other files than before."""
        if not is_unchanged(version, self._folder):
            raise ArtefactError(
                f"{version.artefact}: changed since version {version.version} of "
                f"{version.model!r} was found; the changed files are loaded as a new version"
            )
        return load()


def _all_of(stored: dict[str, list[StoredVersion]]) -> set[StoredVersion]:
    return {version for versions in stored.values() for version in versions}
