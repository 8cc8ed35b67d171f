"""What the engine's process and a front end's say to each other: facts and arrays, in order.

A message is one packet of a socket pair (AF_UNIX, SOCK_SEQPACKET). It starts with a header of 32
bytes, little-endian:

    offset  type  field
         0  4s    magic, "QRNF"
         4  u16   version, 1
         6  u16   zero
         8  u64   bytes of the payload
        16  u64   bytes of the facts, which the payload begins with
        24  8x    zero

The payload is the facts, a JSON object, and then the arrays, each in C order from a multiple of 64
bytes; "arrays" of the facts has the dtype and the shape of each. A small payload follows the
header. A large one lies in an anonymous shared file (memfd) that comes with the packet: the one
side writes it once, the other maps it and reads it in place, and the kernel frees it with the last
array.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import mmap
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import ReplicaError

Array = npt.NDArray[Any]
Facts = dict[str, Any]
Receiver = Callable[[Facts, list[Array]], None]

logger = logging.getLogger(__name__)

_MAGIC = b"QRNF"
_VERSION = 1
_HEADER = struct.Struct("<4sHHQQ8x")
_ALIGNMENT = 64
_INLINE_BYTES = 32 << 10
"""Of a payload. Making and mapping a file takes as long as copying about this much four times."""


class Link:
    """One end. Used in one event loop; what it cannot send at once waits here, in order."""

    def __init__(
        self, end: socket.socket, on_message: Receiver, on_end: Callable[[], None]
    ) -> None:
        """Begin to receive.

        Args:
            end: The socket.
            on_message: Called with the facts of each message, and its arrays, which are read-only.
            on_end: Called once, when the other side has ended or this one was closed.
        """
        end.setblocking(False)
        self._socket: socket.socket | None = end
        self._on_message = on_message
        self._on_end = on_end
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._receive)

    def send(self, facts: Facts, arrays: Sequence[Array] = ()) -> None:
        """Send a message; one to a side that has ended is dropped.

        Raises:
            MemoryError: The machine has no memory for it.
        """
        if self._socket is None:
            return
        packet, fd = _pack(facts, arrays)
        self._waiting.append((packet, fd))
        if len(self._waiting) == 1:
            self._flush()

    def close(self) -> None:
        """End this side; the other is told after what was sent before, if that is not waiting."""
        end, self._socket = self._socket, None
        if end is None:
            return
        self._loop.remove_reader(end)
        self._loop.remove_writer(end)
        end.close()
        for _, fd in self._waiting:
            if fd is not None:
                os.close(fd)
        self._waiting.clear()
        self._on_end()

    def _flush(self) -> None:
        while self._waiting and self._socket is not None:
            packet, fd = self._waiting[0]
            try:
                socket.send_fds(self._socket, [packet], [] if fd is None else [fd])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except ConnectionError:
                self.close()
                return
            self._waiting.popleft()
            if fd is not None:
                os.close(fd)
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        # One message a turn of the loop, so that a busy link holds up nothing else.
        if self._socket is None:
            return
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size + _INLINE_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self.close()
            return
        try:
            message = _unpack(data, fds[0] if fds else None)
        except (ReplicaError, OSError) as error:
            # A call whose message is lost would wait for ever.
            logger.error("link ends: %s", error)
            self.close()
            return
        self._on_message(*message)


def allow_many_files() -> None:
    """Take as many descriptors as may be: each large message that is in use has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _pack(facts: Facts, arrays: Sequence[Array]) -> tuple[bytes, int | None]:
    """A packet, and the file to send with it."""
    told = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps(facts | {"arrays": told}).encode()
    starts: list[int] = []
    size = len(text)
    for array in arrays:
        starts.append(_aligned(size))
        size = starts[-1] + array.nbytes
    header = _HEADER.pack(_MAGIC, _VERSION, 0, size, len(text))
    if size <= _INLINE_BYTES:
        return header + _written(bytearray(size), text, arrays, starts), None
    fd = os.memfd_create("qrnn-serve-call")
    try:
        # Takes the memory now: later, a write that finds none would end the process.
        os.posix_fallocate(fd, 0, size)
        _written(mmap.mmap(fd, size), text, arrays, starts)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"{size} bytes of shared memory for a call: {error}") from error
    return header, fd


def _written(room: Any, text: bytes, arrays: Sequence[Array], starts: Sequence[int]) -> Any:
    room[: len(text)] = text
    for array, start in zip(arrays, starts, strict=True):
        if array.nbytes:
            np.copyto(np.ndarray(array.shape, array.dtype, room, start), array)
    return room


def _unpack(data: bytes, fd: int | None) -> tuple[Facts, list[Array]]:
    """The facts and arrays of a packet; its file is closed.

    Raises:
        ReplicaError: It is none of this version.
    """
    try:
        if len(data) < _HEADER.size or data[:6] != _HEADER.pack(_MAGIC, _VERSION, 0, 0, 0)[:6]:
            raise ReplicaError(f"expected a message of version {_VERSION}, got {data[:8]!r}")
        *_, size, text_size = _HEADER.unpack_from(data)
        payload: Any = memoryview(data)[_HEADER.size :]
        if fd is not None:
            payload = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    finally:
        if fd is not None:
            os.close(fd)
    if len(payload) != size:
        raise ReplicaError(f"expected {size} bytes, got {len(payload)}: is `ulimit -n` too low?")
    facts = json.loads(bytes(payload[:text_size]))
    arrays: list[Array] = []
    at = text_size
    for dtype, shape in facts.pop("arrays"):
        start = _aligned(at)
        at = start + math.prod(shape) * np.dtype(dtype).itemsize
        empty = start == at
        # numpy makes no view of no bytes.
        array = np.frombuffer(bytes(1) if empty else payload[start:at], np.uint8)[: at - start]
        arrays.append(array.view(dtype).reshape(shape))
    return facts, arrays


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT
