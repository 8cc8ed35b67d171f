"""What the server and a replica's process say to each other over their socket.

A packet is a header of 96 bytes, little-endian, and for `ready`, `failed`, and `scored` by a placed
model a JSON text. The
arrays of a batch are not in it: they lie in shared memory (batch_memory.py).

    offset  type  field
         0  4s    magic, "QRNX"
         4  u16   version of packets and memory, 2
         6  u8    kind: 1 ready, 2 score, 3 scored, 4 failed
         7  u8    dtype of features, states and outputs: 1 float16, 2 float32, 3 float64
         8  u8    flags: 1 values are ids, 2 rows have a state, 4 one output a timestep
         9  7x    zero
        16  u64   number of the batch, the same in its answer
        24  u64   bytes of the shared memory
        32  u64   B, rows
        40  u64   N, timesteps of all rows
        48  u32   I, features or ids a timestep, 0 for a single id
        52  u32   C, width of an output
        56  u32   S, width of a state
        60  u16   CUDA graphs that the process has, in `scored`
        62  u16   1 when the batch was the replay of one, in `scored`
        64  u64   timesteps of padding computed, in `scored`
        72  f64   seconds of upload, in `scored`
        80  f64   seconds of compute, in `scored`
        88  f64   seconds of download, in `scored`
"""

from __future__ import annotations

import json
import socket
import struct
import traceback
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter

from qrnn_serve.core import errors
from qrnn_serve.core.errors import QRNNError, ReplicaError

_MAGIC = b"QRNX"
_VERSION = 2
_HEADER = struct.Struct("<4sHBBB7xQQQQIIIHHQddd")
_MAX_TEXT_BYTES = 64 << 10
# JSON writes a character in at most 6 bytes.
_MAX_ERROR_CHARACTERS = 4000


class Kind(IntEnum):
    """What a packet says."""

    READY = 1
    SCORE = 2
    SCORED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Packet:
    """What varies in a packet, in the order of the module's table."""

    kind: Kind
    dtype: int = 0
    flags: int = 0
    batch: int = 0
    memory_bytes: int = 0
    rows: int = 0
    timesteps: int = 0
    input_size: int = 0
    output_size: int = 0
    state_size: int = 0
    graphs: int = 0
    replayed: int = 0
    padded_timesteps: int = 0
    upload_s: float = 0.0
    compute_s: float = 0.0
    download_s: float = 0.0
    text: str = ""


# dataclasses.astuple copies each value, which takes longer than all else about a packet.
_NUMBERS = attrgetter(*(field.name for field in fields(Packet) if field.name != "text"))


class Channel:
    """One end of the socket (AF_UNIX, SOCK_SEQPACKET). Not for several threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, packet: Packet) -> None:
        """Send one packet.

        Raises:
            ConnectionError: The other side has ended.
        """
        numbers = _NUMBERS(packet)
        self._socket.send(_HEADER.pack(_MAGIC, _VERSION, *numbers) + packet.text.encode())

    def receive(self, timeout_s: float | None = None) -> Packet | None:
        """Wait for a packet; None when the other side has ended.

        Raises:
            TimeoutError: Nothing came in time.
            ReplicaError: It is not a packet of this version.
        """
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_HEADER.size + _MAX_TEXT_BYTES)
        except ConnectionError:
            return None
        if not data:
            return None
        # First, as a packet of another version may have another length.
        version = int.from_bytes(data[4:6], "little")
        if data[:4] == _MAGIC and version != _VERSION:
            raise ReplicaError(
                f"expected packets of version {_VERSION}, got {version}: the package was changed "
                "while the server was running; start the server again"
            )
        if data[:4] != _MAGIC or len(data) < _HEADER.size:
            raise ReplicaError(f"expected a packet, got {data[:16]!r}. This is a bug.")
        _, _, kind, *numbers = _HEADER.unpack_from(data)
        return Packet(Kind(kind), *numbers, text=data[_HEADER.size :].decode())

    def close(self) -> None:
        """Let the other side know that this one ends."""
        self._socket.close()


_KNOWN_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    # It needs more than a message, and no scorer raises it.
    if isinstance(kind, type) and issubclass(kind, QRNNError) and name != "OverloadedError"
}
_KNOWN_ERRORS |= {kind.__name__: kind for kind in (MemoryError, OSError)}


def failed(error: BaseException, batch: int = 0) -> Packet:
    """The packet that tells of an error, at the start or with a batch."""
    names = [kind.__name__ for kind in type(error).__mro__]
    known = next((name for name in names if name in _KNOWN_ERRORS), "")
    message = str(error) if known else f"{names[0]}: {error}"
    told = {
        "error": known,
        "message": message[:_MAX_ERROR_CHARACTERS],
        # Which library is not installed.
        "module": error.name if isinstance(error, ModuleNotFoundError) else None,
        "traceback": "".join(traceback.format_exception(error))[-_MAX_ERROR_CHARACTERS:],
    }
    return Packet(Kind.FAILED, batch=batch, text=json.dumps(told))


def error_of(packet: Packet) -> Exception:
    """The error that a `failed` packet tells of: of its class or the nearest one of ours.

    What has none, such as a RuntimeError of torch, becomes a ReplicaError.
    """
    told = json.loads(packet.text)
    error: Exception
    if told["module"] is not None:
        error = ModuleNotFoundError(told["message"], name=told["module"])
    else:
        error = _KNOWN_ERRORS.get(told["error"], ReplicaError)(told["message"])
    error.add_note(f"In the replica's process:\n{told['traceback']}")
    return error
