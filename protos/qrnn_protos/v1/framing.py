"""Messages with large tensors to bytes and back, each number copied once at most.

protobuf's own way copies the data of a tensor two to four times, and its arena is kept until the
message is gone. Here the data alone are framed and found by hand; all else is left to protobuf.
Framing is three rules of the wire format (https://protobuf.dev/programming-guides/encoding): a
field is its key, its length, its bytes; a key is the field's number and the wire type 2; both are
varints.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qrnn_protos.v1 import prediction_pb2 as pb

Buffer = Any  # of the buffer protocol

_VARINT, _EIGHT_BYTES, _LENGTH_DELIMITED, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_DATA = pb.Tensor.DATA_FIELD_NUMBER
_MAX_FIELDS = 64
"""Of one message. No client of ours writes so many, and each costs a microsecond."""


def tensor_field(
    number: int, header: pb.Tensor, data: Sequence[Buffer], nbytes: int
) -> list[Buffer]:
    """The pieces of a Tensor field, to be joined.

    Args:
        number: Of the field in its message.
        header: The tensor without data.
        data: Its data, which lie end to end.
        nbytes: How many bytes they are.
    """
    head = header.SerializeToString()
    if not nbytes:
        return [_key(number), _varint(len(head)), head]
    data_head = _key(_DATA) + _varint(nbytes)
    return [_key(number), _varint(len(head) + len(data_head) + nbytes), head, data_head, *data]


def lift_data(
    message: bytes, tensors: Collection[int]
) -> tuple[bytes, dict[int, memoryview]] | None:
    """Take the data of the tensors out of a message.

    Args:
        message: A serialized message.
        tensors: Numbers of its fields that are a Tensor.

    Returns:
        The message without the data, for protobuf to parse, and views of the data by field number.
        None when it is framed in any way that our clients do not use, or not well: protobuf must
        read it as a whole, and say whether it is right.
    """
    view = memoryview(message)
    rest: list[Buffer] = []
    data: dict[int, memoryview] = {}
    kept_to = 0
    seen: set[int] = set()
    try:
        for field in _fields(view, 0, len(view)):
            if field.number not in tensors:
                continue
            _expect(field.length_delimited and field.number not in seen)
            seen.add(field.number)
            inner = _data_field(view, field)
            if inner is None:
                continue
            shorter = field.end - field.start - (inner.end - inner.at)
            rest += [view[kept_to : field.at], _key(field.number), _varint(shorter)]
            rest += [view[field.start : inner.at], view[inner.end : field.end]]
            kept_to = field.end
            data[field.number] = view[inner.start : inner.end]
    except _UnusualError:
        return None
    return b"".join([*rest, view[kept_to:]]), data


class _UnusualError(Exception):
    """The bytes are not framed as our clients do."""


@dataclass(slots=True, frozen=True)
class _Field:
    """Where a field is: `at` its key, `start` to `end` its value."""

    number: int
    length_delimited: bool
    at: int
    start: int
    end: int


def _data_field(view: memoryview, tensor: _Field) -> _Field | None:
    """The one field of a tensor that holds its data."""
    found = [field for field in _fields(view, tensor.start, tensor.end) if field.number == _DATA]
    if not found:
        return None
    _expect(len(found) == 1 and found[0].length_delimited)
    return found[0]


def _fields(view: memoryview, at: int, end: int) -> Iterator[_Field]:
    for _ in range(_MAX_FIELDS):
        if at == end:
            return
        # A key of more bytes has a number that no tensor of ours has; those fields are small.
        key, start = _read_varint(view, at, end)
        wire_type = key & 7
        if wire_type == _LENGTH_DELIMITED:
            length, start = _read_varint(view, start, end)
            stop = start + length
        elif wire_type == _VARINT:
            _, stop = _read_varint(view, start, end)
        else:
            _expect(wire_type in _FIXED_BYTES)
            stop = start + _FIXED_BYTES[wire_type]
        _expect(stop <= end)
        yield _Field(key >> 3, wire_type == _LENGTH_DELIMITED, at, start, stop)
        at = stop
    raise _UnusualError


def _read_varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """A varint written in its shortest form, and the place after it."""
    value = shift = 0
    while at < end and shift < 7 * 10:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            _expect(byte != 0 or shift == 0)
            return value, at
        shift += 7
    raise _UnusualError


def _expect(usual: bool) -> None:
    if not usual:
        raise _UnusualError


@functools.cache
def _key(number: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    """`value` in groups of seven bits, lowest first, each but the last marked by bit 7."""
    if value <= 0x7F:
        return bytes((value,))
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
