"""How the blocking client sends attempts: from the caller's thread, or from several at once."""

from __future__ import annotations

import collections
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol, TypeVar

import grpc

from qrnn_client._connection import Connections

Result = TypeVar("Result")


def next_result(pending: collections.deque[Future[Result]]) -> Result:
    """Return the first future's result and take it off; raise as soon as any of them fails."""
    first, running = pending[0], set(pending)
    while not first.done():
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
    return pending.popleft().result()


class Sender(Protocol):
    """Sends attempts, and waits between them."""

    def send(self, method: str, request: bytes, timeout_s: float) -> Any:
        """Send one attempt and wait for its answer."""
        ...

    def wait(self, wait_s: float) -> bool:
        """Wait; True when nothing more is to be sent."""
        ...


class Alone:
    """Sends from the caller's own thread, one attempt at a time."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def send(self, method: str, request: bytes, timeout_s: float) -> Any:
        connection = self._connections.of_this_thread()
        # gRPC starts a thread for a call that is made through a future while no other is under way.
        try:
            return connection.methods[method](request, timeout=timeout_s)
        except grpc.RpcError:
            raise
        except BaseException:
            if threading.current_thread() is threading.main_thread():
                self._connections.leave_interrupted()
            raise

    def wait(self, wait_s: float) -> bool:
        time.sleep(wait_s)
        return False


class Together:
    """Sends from several threads; all their attempts stop together."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._under_way: set[Any] = set()

    def send(self, method: str, request: bytes, timeout_s: float) -> Any:
        connection = self._connections.of_this_thread()
        future = connection.methods[method].future(request, timeout=timeout_s)
        with self._lock:
            self._under_way.add(future)
        if self._stopped.is_set():
            future.cancel()
        try:
            return future.result()
        finally:
            with self._lock:
                self._under_way.discard(future)

    def wait(self, wait_s: float) -> bool:
        return self._stopped.wait(wait_s)

    def stop(self) -> None:
        """Cancel what is under way and start nothing more."""
        self._stopped.set()
        with self._lock:
            under_way = list(self._under_way)
        for future in under_way:
            future.cancel()
