"""The gRPC server of one process: our service, health and reflection on a port."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from qrnn_protos.v1.limits import KEEPALIVE_MIN_PING_INTERVAL_S, MAX_MESSAGE_BYTES
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.server import health, service
from qrnn_serve.server.calls import CallGuard
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.health import Health
from qrnn_serve.server.models import Models

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The default allows a ping every five minutes and closes the connection of a client that checks
    # more often whether a long call is alive.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MIN_PING_INTERVAL_S * 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MIN_PING_INTERVAL_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class GrpcFront:
    """Takes calls. Used in one event loop.

    Attributes:
        health: What the health service says.
    """

    def __init__(
        self,
        config: ServerConfig,
        models: Models[Any],
        control: service.Control,
        *,
        shares_port: bool = False,
    ) -> None:
        """`shares_port` lets others listen on the port too; the kernel deals out connections."""
        self.health = Health()
        self._config = config
        self._guard = CallGuard(-(-config.max_concurrent_calls // config.front_ends))
        # Else a second server on the same port would share its connections instead of failing.
        port = ("grpc.so_reuseport", int(shares_port))
        self._grpc = grpc.aio.server(options=(*_OPTIONS, port))
        prediction = service.PredictionService(models, self._guard, control)
        self._grpc.add_generic_rpc_handlers((prediction.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._grpc)
        if config.reflects:
            names = (service.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._grpc)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        port = self._bind()
        await self._grpc.start()
        return port

    def publish(self) -> None:
        """Callers here see what changed at once."""

    async def failed(self) -> None:
        """Never returns: it lives as long as its process."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Refuse new calls from now on; wait until the running ones have ended."""
        await self._guard.drain()

    async def stop(self, grace_s: float) -> None:
        """End health watches, then all else; replies on their way get `grace_s` seconds."""
        self.health.close()
        await self._grpc.stop(grace=grace_s)

    def _bind(self) -> int:
        address = self._config.address(self._config.port)
        try:
            port = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise cannot_listen(address) from error
        if port == 0:
            raise cannot_listen(address)
        return port


def cannot_listen(address: str) -> ConfigError:
    """The error of an address that is taken or not ours."""
    return ConfigError(
        f"cannot listen on {address}: is the port in use, or the host not one of this machine? "
        "Choose another with --port and --host; --port 0 picks a free port"
    )
