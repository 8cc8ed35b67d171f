"""The link between processes: every array to the bit, order, full buffers, ends, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.server.link import Link, _unpack

DTYPES = ("<f2", "<f4", "<f8", "<i8", "|u1")


class Side:
    """One end that keeps what came."""

    def __init__(self, end):
        self.messages = asyncio.Queue()
        self.ended = asyncio.Event()
        self.link = Link(end, lambda *message: self.messages.put_nowait(message), self.ended.set)

    async def next(self):
        return await asyncio.wait_for(self.messages.get(), 20)


@contextlib.contextmanager
def sides():
    pair = [Side(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    try:
        yield pair
    finally:
        for side in pair:
            side.link.close()


def open_files():
    return set(os.listdir("/proc/self/fd"))


arrays = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), min_size=1, max_size=3)),
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=arrays, seed=st.integers(0, 99))
def test_arrays_cross_to_the_bit(shapes, seed):
    """Arrays of any dtype and shape, empty and strided ones too, small and large together."""
    random = np.random.default_rng(seed)
    sent = [
        np.frombuffer(random.bytes(2 * np.dtype(d).itemsize * int(np.prod(s))), d).reshape(
            2 * s[0], *s[1:]
        )[::2]
        for d, s in shapes
    ]

    async def cross():
        with sides() as (here, there):
            here.link.send({"kind": "x", "number": seed}, sent)
            return await there.next()

    facts, got = asyncio.run(cross())

    assert facts == {"kind": "x", "number": seed}
    for before, after in zip(sent, got, strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert after.tobytes() == before.tobytes()
        assert not after.flags.writeable


async def test_messages_keep_their_order_when_the_socket_is_full():
    """Thousands of messages, every tenth in a file, before the other side reads the first."""
    with sides() as (here, there):
        for number in range(3000):
            size = 100_000 if number % 10 == 0 else 100
            here.link.send({"number": number}, [np.full(size, number % 100, np.uint8)])
        for number in range(3000):
            facts, (array,) = await there.next()
            assert facts["number"] == number
            assert (array == number % 100).all()


async def test_no_descriptor_is_left():
    """After large messages, received or never read, and both ends, as many files as before."""
    gc.collect()
    before = open_files()
    with sides() as (here, there):
        for _ in range(500):
            here.link.send({}, [np.zeros(1 << 20, np.uint8)])
        await there.next()
        there.link.close()
        await asyncio.wait_for(here.ended.wait(), 20)
        here.link.send({}, [np.zeros(1 << 20, np.uint8)])
    del there, here
    gc.collect()

    assert open_files() <= before


async def test_other_side_hears_of_the_end_after_what_was_sent():
    """What was sent before the end arrives, then the end, once."""
    with sides() as (here, there):
        here.link.send({"last": True})
        here.link.close()
        here.link.close()
        facts, _ = await there.next()
        await asyncio.wait_for(there.ended.wait(), 20)

    assert facts == {"last": True}


@pytest.mark.parametrize("data", [b"QRNF\x02\x00".ljust(32, b"\0"), b"NOPE".ljust(32, b"\0")])
def test_other_versions_are_refused(data):
    """A message of another version, or of another program, is an error that says so."""
    with pytest.raises(ReplicaError, match="version 1"):
        _unpack(data, None)


async def test_a_message_that_cannot_be_read_ends_the_link(caplog):
    """Bytes of another program, and a large message whose file did not come, end it, logged."""
    header = b"QRNF" + (1).to_bytes(2, "little") + bytes(2) + (1 << 20).to_bytes(8, "little")
    for data in (b"garbage", header.ljust(32, b"\0")):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        side = Side(there)
        with here:
            here.send(data)
            await asyncio.wait_for(side.ended.wait(), 20)
        assert "link ends" in caplog.text
        caplog.clear()
