"""The standard health service, Check and Watch.

The servicer of grpcio-health-checking forgets the other watchers of a service when one of them
leaves, so they would never hear of a shutdown; and its watches hold up the end of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE_SERVER = ""

Status = health_pb2.HealthCheckResponse.ServingStatus
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """Status of each named service; used in one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {WHOLE_SERVER: NOT_SERVING}
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def names(self) -> set[str]:
        """The services that are known."""
        return set(self._statuses)

    @property
    def statuses(self) -> dict[str, Status]:
        """What each service that is known has."""
        return dict(self._statuses)

    def set(self, service: str, status: Status) -> None:
        """Change one service and tell its watchers."""
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            self._announce()

    def set_all(self, status: Status) -> None:
        """Change every service that is known."""
        self._statuses = dict.fromkeys(self._statuses, status)
        self._announce()

    def close(self) -> None:
        """End all watches, after they have told the last change."""
        self._closed = True
        self._announce()

    async def Check(  # noqa: N802  the name of the method in health.proto
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The status of one service now."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of that name")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802  the name of the method in health.proto
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of one service now and after every change."""
        told: Status | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != told:
                yield health_pb2.HealthCheckResponse(status=status)
                told = status
                continue
            if self._closed:
                return
            await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
