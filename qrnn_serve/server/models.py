"""Which models are served, by name and version."""

from __future__ import annotations

from dataclasses import dataclass

from qrnn_serve.core.errors import ModelNotFoundError, UnavailableError
from qrnn_serve.engine.pool import ReplicaPool
from qrnn_serve.server.codec import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is ready, and the pool that scores with it."""

    identity: ModelIdentity
    pool: ReplicaPool


class Models:
    """The served models. Written in the event loop, read by any thread."""

    def __init__(self) -> None:
        self._served: dict[str, ServedModel] = {}

    def serve(self, model: ServedModel) -> None:
        """Make a model available under its name, in place of another version of it."""
        self._served[model.identity.name] = model

    def all(self) -> tuple[ServedModel, ...]:
        """Every served model, by name.

        Raises:
            UnavailableError: Nothing is served yet.
        """
        self._check_started()
        return tuple(self._served[name] for name in sorted(self._served))

    def find(self, name: str, version: str) -> ServedModel:
        """The model that a request asks for; empty text asks for the only one and what serves now.

        Raises:
            ModelNotFoundError: It is not served; the message has what is.
            UnavailableError: Nothing is served yet.
        """
        self._check_started()
        served = self._served
        if not name and len(served) > 1:
            raise ModelNotFoundError(f"model: expected one of {sorted(served)}, got no name")
        model = next(iter(served.values())) if not name else served.get(name)
        if model is None:
            raise ModelNotFoundError(f"model: expected one of {sorted(served)}, got {name[:100]!r}")
        if version not in {"", model.identity.version}:
            raise ModelNotFoundError(
                f"version of {model.identity.name!r}: expected {model.identity.version!r}, "
                f"got {version[:100]!r}"
            )
        return model

    def _check_started(self) -> None:
        if not self._served:
            raise UnavailableError("the server is starting and has no model yet; try again later")
