"""A replica's process: loads a model and scores the batches that its server puts into memory.

Started by process.py. It ends when its server closes the socket, and the kernel ends it when its
server dies, even in the middle of a batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.engine.types import Scorer, ScorerLoader
from qrnn_serve.scorers.batch_memory import BatchLayout, BatchMemory
from qrnn_serve.scorers.loader import ScorerSpec, load_checked
from qrnn_serve.scorers.packets import Channel, Kind, Packet, failed

# Of prctl(2).
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Serve one replica: SPEC as JSON, the level of logging, and two inherited descriptors."""
    text, log_level, socket_fd, memory_fd = arguments
    logging.basicConfig(
        level=int(log_level),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    keep_freed_memory()
    spec = from_mapping(ScorerSpec, json.loads(text))
    serve_scorer(lambda: load_checked(spec), int(socket_fd), int(memory_fd))


def serve_scorer(load: ScorerLoader, socket_fd: int, memory_fd: int) -> None:
    """Load, say what was loaded, then answer batches until the server closes the socket."""
    _end_with_the_server()
    for fd in (socket_fd, memory_fd):
        # They are for this process, not for programs that it may start.
        os.set_inheritable(fd, False)
    end = socket.socket(fileno=socket_fd)
    # The server asks for nothing yet: what can be read by now is its end, before this one's start.
    if not select.select([end], [], [], 0)[0]:
        # Later it may have ended when it is to be told.
        with contextlib.suppress(ConnectionError):
            _serve(load, Channel(end), BatchMemory(memory_fd))
    logging.shutdown()
    # Device libraries take long to unload, and some fail at it.
    os._exit(0)


def _serve(load: ScorerLoader, channel: Channel, memory: BatchMemory) -> None:
    try:
        scorer = load()
    except Exception as error:  # whatever it is, it is told to whoever started the replica
        channel.send(failed(error))
        return
    channel.send(_ready(scorer))
    while (packet := channel.receive()) is not None:
        channel.send(_answer(packet, scorer, memory))


def _ready(scorer: Scorer) -> Packet:
    facts = {
        "schema": to_mapping(scorer.schema),
        "device": scorer.device,
        "engine": scorer.engine,
        "max_timesteps": scorer.max_timesteps,
    }
    return Packet(Kind.READY, text=json.dumps(facts))


def _answer(packet: Packet, scorer: Scorer, memory: BatchMemory) -> Packet:
    try:
        layout = BatchLayout.of(packet, scorer.schema)
        shared = memory.map(packet.memory_bytes)
        scored = scorer.score(layout.rows_in(shared))
        scored_s = time.monotonic()
        layout.put_scores(scored, shared)
    except Exception as error:  # the server decides what it means for the rows
        return failed(error, packet.batch)
    return replace(
        packet,
        kind=Kind.SCORED,
        padded_timesteps=scored.padded_timesteps,
        upload_s=scored.times.upload_s,
        compute_s=scored.times.compute_s,
        download_s=scored.times.download_s + time.monotonic() - scored_s,
    )


def _end_with_the_server() -> None:
    # SIGTERM and SIGINT may go to all processes of a container or a terminal; the server drains
    # first and then closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
