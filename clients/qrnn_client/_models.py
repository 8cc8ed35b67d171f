"""What the server says about its models and limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import grpc

from qrnn_client._dtypes import wire_name
from qrnn_client._errors import FailedCall, InputError, ModelNotFoundError
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES


class Health(StrEnum):
    """What the server's health service says of itself or of one model."""

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    SERVICE_UNKNOWN = "SERVICE_UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One loaded model: its name, what it takes and what it gives.

    Attributes:
        name: Name to give to `predict`.
        version: The version that is loaded.
        takes_ids: True for rows of token ids, False for rows of features [T, input_size].
        input_size: Features, or ids, per timestep; 0 for ids, one a timestep.
        vocabulary_size: Ids must be below it; 0 for features.
        dtype: numpy name of features, outputs and state, for example "float32".
        output_name: "logits" or "output".
        output_size: Width C of an output.
        output_per_timestep: True for outputs [T, C], False for [C].
        state_size: Width S of the state that one row carries.
        engine: "native", "torchscript" or "onnx".
        devices: Where it runs, for example ("cuda:0", "cuda:1").
        weights_sha256: Identity of the weights.
        half: Whether this client sends features and asks for outputs as float16.
    """

    name: str
    version: str
    takes_ids: bool
    input_size: int
    vocabulary_size: int
    dtype: str
    output_name: str
    output_size: int
    output_per_timestep: bool
    state_size: int
    engine: str
    devices: tuple[str, ...]
    weights_sha256: str
    half: bool = False

    @property
    def wire_dtype(self) -> str:
        """Numpy name of features and outputs on the wire; states keep `dtype`."""
        return "float16" if self.half and self.dtype == "float32" else self.dtype

    @property
    def expects(self) -> str:
        """The shape and type of a row, for messages."""
        shape = ", ".join(("T", *map(str, self.timestep_shape)))
        return (
            f"token ids [{shape}] int64" if self.takes_ids else f"features [{shape}] {self.dtype}"
        )

    @property
    def timestep_shape(self) -> tuple[int, ...]:
        """The shape of one timestep: () or (input_size,)."""
        return (self.input_size,) if self.input_size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The answer of ListModels.

    Attributes:
        models: The loaded models.
        max_message_bytes: The largest message that both sides take.
        max_request_timesteps: The most timesteps in one request; 0 for no limit.
    """

    models: tuple[ModelInfo, ...]
    max_message_bytes: int
    max_request_timesteps: int

    def find(self, name: str, version: str) -> ModelInfo | None:
        """Return the model, or None. An empty name is the only model; an empty version is any."""
        if not name and len({model.name for model in self.models}) > 1:
            names = sorted({model.name for model in self.models})
            raise InputError(f"model: the server has several, name one of {names}")
        for model in self.models:
            if name in ("", model.name) and version in ("", model.version):
                return model
        return None

    def not_found(self, name: str, version: str, target: str) -> ModelNotFoundError:
        """Return the error for a model that `find` does not know, which names those it does."""
        loaded = [f"{model.name!r} version {model.version!r}" for model in self.models]
        wanted = f"model {name!r}" + (f" version {version!r}" if version else "")
        details = f"no {wanted}; loaded: {', '.join(loaded) or 'none'}"
        return ModelNotFoundError(
            FailedCall(
                target=target,
                code=grpc.StatusCode.NOT_FOUND,
                details=details,
                attempts=1,
                elapsed_s=0.0,
            )
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A model, and the catalogue that names it."""

    info: ModelInfo
    catalogue: Catalogue


def read_catalogue(response: pb.ListModelsResponse) -> Catalogue:
    """Return the reply of ListModels as values."""
    return Catalogue(
        models=tuple(_read_models(response.models)),
        max_message_bytes=min(response.max_message_bytes or MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        max_request_timesteps=response.max_request_timesteps,
    )


def _read_models(models: Iterable[pb.ModelInfo]) -> Iterable[ModelInfo]:
    for model in models:
        yield ModelInfo(
            name=model.name,
            version=model.version,
            takes_ids=model.takes_ids,
            input_size=model.input_size,
            vocabulary_size=model.vocabulary_size,
            dtype=wire_name(model.dtype),
            output_name=model.output_name,
            output_size=model.output_size,
            output_per_timestep=model.output_per_timestep,
            state_size=model.state_size,
            engine=model.engine,
            devices=tuple(model.devices),
            weights_sha256=model.weights_sha256,
        )
