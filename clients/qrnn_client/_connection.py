"""The blocking client's connections to its server, and what an interrupt does to them.

A signal such as Ctrl-C raises its exception in the main thread, between any two steps of Python
code, and gRPC's own are among them: a lock of the channel may then stay held for ever. Any other
thread that used the channel, or only collected it as garbage, would wait on that lock without end.
So the main thread has a channel to itself, which after an interrupt is closed and never let go.
Channels to one server share its connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from qrnn_client._channel import (
    CHANNEL_OPTIONS,
    HEALTH_CHECK,
    LIST_MODELS,
    PREDICT,
    channel_target,
)
from qrnn_client._codec import parse_reply
from qrnn_client._errors import ClientError
from qrnn_client._session import Settings, decode_health_response
from qrnn_protos.v1 import prediction_pb2 as pb

Method = Any  # grpc.UnaryUnaryMultiCallable, of several message types

_DESERIALIZERS: dict[str, Callable[[bytes], Any]] = {
    PREDICT: parse_reply,
    LIST_MODELS: pb.ListModelsResponse.FromString,
    HEALTH_CHECK: decode_health_response,
}

_interrupted_channels: list[grpc.Channel] = []


class Connection:
    """A channel and its methods; requests are bytes."""

    def __init__(self, settings: Settings, credentials: grpc.ChannelCredentials | None) -> None:
        target = channel_target(settings.target)
        if settings.tls is None or credentials is None:
            self.channel = grpc.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            options = (*CHANNEL_OPTIONS, *settings.tls.channel_options)
            self.channel = grpc.secure_channel(target, credentials, options)
        self.methods: dict[str, Method] = {
            name: self.channel.unary_unary(name, response_deserializer=deserializer)
            for name, deserializer in _DESERIALIZERS.items()
        }


class Connections:
    """The main thread's connection and that of all other threads, each made when first needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._credentials = settings.tls.credentials() if settings.tls else None
        self._lock = threading.Lock()
        self._of_main_thread: Connection | None = None
        self._shared: Connection | None = None
        self._closed = False

    def of_this_thread(self) -> Connection:
        """Return the connection that the calling thread may use.

        Raises:
            ClientError: The client was closed.
        """
        if self._closed:
            raise ClientError("this client is closed; make a new one")
        if threading.current_thread() is threading.main_thread():
            self._of_main_thread = self._of_main_thread or self._open()
            return self._of_main_thread
        with self._lock:
            self._shared = self._shared or self._open()
            return self._shared

    def leave_interrupted(self) -> None:
        """Cancel what an interrupted call of the main thread left behind, and connect anew."""
        if self._of_main_thread is None or self._closed:
            return
        channel = self._of_main_thread.channel
        self._of_main_thread = None
        _interrupted_channels.append(channel)
        channel.close()

    def close(self) -> None:
        """Close both; calls under way are cancelled."""
        self._closed = True
        for connection in (self._of_main_thread, self._shared):
            if connection is not None:
                connection.channel.close()

    def _open(self) -> Connection:
        return Connection(self._settings, self._credentials)
