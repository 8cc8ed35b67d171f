"""Rows cut into calls that fit the server, and the answers joined in the caller's order. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qrnn_client._dtypes import dtype_of_name
from qrnn_client._errors import InputError
from qrnn_client._models import Catalogue, ModelInfo
from qrnn_client._prediction import RowError
from qrnn_client._rows import Indices, RowSet

# Room for everything in a message that is not counted by row: names, tensor headers, row errors.
_MESSAGE_OVERHEAD_BYTES = 4 * 1024 * 1024
# Of one row: its length or index as int64, in each direction.
_ROW_OVERHEAD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How rows are cut into calls, and how many calls are under way at a time.

    A row is never cut; one that is larger than these limits travels alone, up to the server's.

    Attributes:
        max_bytes: Most bytes of one call, in either direction. Larger calls save nothing; smaller
            ones spread over server and replicas sooner.
        max_timesteps: Most timesteps of one call, so that a call ends well within its timeout.
        max_rows: Most rows of one call.
        in_flight: Calls under way at a time.
    """

    max_bytes: int = 4 * 1024 * 1024
    max_timesteps: int = 32_768
    max_rows: int = 8_192
    in_flight: int = 4

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_timesteps", "max_rows", "in_flight"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")


def request_bytes(rows: RowSet) -> Indices:
    """Return the size of each row in a request, [K]."""
    state_bytes = 0 if rows.states is None else rows.states.itemsize * rows.states.shape[1]
    return rows.lengths * rows.bytes_per_timestep + (state_bytes + _ROW_OVERHEAD_BYTES)


def reply_bytes(rows: RowSet, info: ModelInfo, *, return_state: bool) -> Indices:
    """Return the size of each row in a reply, [K]."""
    itemsize = dtype_of_name(info.dtype).itemsize
    output_itemsize = dtype_of_name(info.wire_dtype).itemsize
    vectors = rows.lengths if info.output_per_timestep else np.ones_like(rows.lengths)
    state_size = info.state_size if return_state else 0
    # A per-timestep reply also holds the row's length.
    numbers_bytes = vectors * info.output_size * output_itemsize + state_size * itemsize
    return numbers_bytes + 2 * _ROW_OVERHEAD_BYTES


def refuse_oversized(rows: RowSet, sizes: Indices, catalogue: Catalogue) -> RowSet:
    """Return `rows` without those that fit into no request, each of which gets an error.

    Args:
        rows: The rows to send.
        sizes: [K] bytes of each row, the larger of request and reply.
        catalogue: The server's limits.
    """
    max_bytes = _payload_bytes(catalogue)
    max_timesteps = catalogue.max_request_timesteps or np.iinfo(np.int64).max
    places = np.flatnonzero((sizes > max_bytes) | (rows.lengths > max_timesteps))
    errors = [
        _oversized_error(int(rows.index[place]), int(sizes[place]), max_bytes)
        if sizes[place] > max_bytes
        else _too_long_error(int(rows.index[place]), int(rows.lengths[place]), max_timesteps)
        for place in places
    ]
    return rows.without(places, errors)


def cut(sizes: Indices, timesteps: Indices, batching: Batching) -> Iterator[slice]:
    """Yield the rows of each call, in order: every row once, each call as full as the limits allow.

    Args:
        sizes: [K] bytes of each row.
        timesteps: [K] timesteps of each row.
        batching: The limits; a row above them is a call of its own.
    """
    size_ends, timestep_ends = np.cumsum(sizes), np.cumsum(timesteps)
    start, sent_bytes, sent_timesteps = 0, 0, 0
    while start < len(sizes):
        by_bytes = np.searchsorted(size_ends, sent_bytes + batching.max_bytes, side="right")
        by_timesteps = np.searchsorted(
            timestep_ends, sent_timesteps + batching.max_timesteps, side="right"
        )
        stop = max(min(int(by_bytes), int(by_timesteps), start + batching.max_rows), start + 1)
        yield slice(start, stop)
        start = stop
        sent_bytes, sent_timesteps = int(size_ends[stop - 1]), int(timestep_ends[stop - 1])


def server_batching(batching: Batching, catalogue: Catalogue) -> Batching:
    """Return `batching` within the server's limits."""
    return Batching(
        max_bytes=min(batching.max_bytes, _payload_bytes(catalogue)),
        max_timesteps=min(
            batching.max_timesteps, catalogue.max_request_timesteps or batching.max_timesteps
        ),
        max_rows=batching.max_rows,
        in_flight=batching.in_flight,
    )


def _payload_bytes(catalogue: Catalogue) -> int:
    limit = catalogue.max_message_bytes
    return limit - min(_MESSAGE_OVERHEAD_BYTES, limit // 8)


def _oversized_error(row: int, size: int, limit: int) -> RowError:
    return _limit_error(row, f"at most {limit:,} bytes in one message", f"{size:,} bytes")


def _too_long_error(row: int, timesteps: int, limit: int) -> RowError:
    return _limit_error(
        row, f"at most {limit:,} timesteps in one request", f"{timesteps:,} timesteps"
    )


def _limit_error(row: int, expected: str, got: str) -> RowError:
    return RowError(
        row=row,
        code="INVALID_ARGUMENT",
        message=f"values: expected {expected}, got {got}; cut the row and carry its state over",
        field="values",
        expected=expected,
        got=got,
    )
