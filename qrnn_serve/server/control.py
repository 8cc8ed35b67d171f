"""Answers what callers ask of the server beside predictions: which models it has, load, unload."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import InputError, NotAllowedError
from qrnn_serve.engine.pool import ReplicaPool
from qrnn_serve.server import codec
from qrnn_serve.server.keeper import Keeper
from qrnn_serve.server.lifecycle import LocalModel, ModelLifecycle
from qrnn_serve.server.models import Models

Message = TypeVar("Message", pb.LoadModelRequest, pb.UnloadModelRequest)


class LocalControl:
    """A Control over the models of this process."""

    def __init__(
        self,
        models: Models[ReplicaPool],
        lifecycle: ModelLifecycle,
        keeper: Keeper | None,
        max_request_timesteps: int,
    ) -> None:
        """`keeper` loads and unloads models for callers; None where they may not ask for that."""
        self._models = models
        self._lifecycle = lifecycle
        self._keeper = keeper
        self._max_request_timesteps = max_request_timesteps

    async def answer(self, method: str, message: bytes) -> bytes:
        """Answer ListModels, LoadModel or UnloadModel.

        Raises:
            UnavailableError: The server is starting.
            InputError: The message is not one of the method.
            NotAllowedError: It is to load or unload, and the server was not started for that.
            ModelNotFoundError: The repository does not have the model, or it does not serve.
            QRNNError: It cannot be loaded; what served before serves on.
        """
        self._models.check_started()
        if method == "ListModels":
            return self._list().SerializeToString()
        if method == "LoadModel":
            return await self._load(message)
        return await self._unload(message)

    def _list(self) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(
            models=[_info(model) for model in self._models.all()],
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_request_timesteps=self._max_request_timesteps,
            versions=[
                pb.VersionStatus(
                    model=status.model,
                    version=status.version,
                    state=f"VERSION_STATE_{status.state.name}",
                    error=status.error,
                )
                for status in self._lifecycle.statuses()
            ],
        )

    async def _load(self, message: bytes) -> bytes:
        keeper = self._allowed_keeper()
        request = _parsed(pb.LoadModelRequest, message)
        model = await keeper.load(request.model, request.version)
        return pb.LoadModelResponse(model=_info(model)).SerializeToString()

    async def _unload(self, message: bytes) -> bytes:
        keeper = self._allowed_keeper()
        await keeper.unload(_parsed(pb.UnloadModelRequest, message).model)
        return pb.UnloadModelResponse().SerializeToString()

    def _allowed_keeper(self) -> Keeper:
        if self._keeper is None:
            raise NotAllowedError(
                "models are loaded and unloaded by calls only if the server was started on a "
                "repository with --model-control rpc"
            )
        return self._keeper


def _info(model: LocalModel) -> pb.ModelInfo:
    return codec.model_info(model.identity, model.pool.engine, model.pool.snapshot().replicas)


def _parsed(kind: type[Message], message: bytes) -> Message:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InputError(f"the message is not a {kind.DESCRIPTOR.full_name}") from error
