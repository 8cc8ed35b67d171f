"""A replica's process: loads a model and scores the batches that its server puts into memory.

Started by process.py. It ends when its server closes the socket, and the kernel ends it when its
server dies, even in the middle of a batch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from qrnn_serve.core.child_process import end_with_parent
from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.engine.types import PackedRows, ScoredRows, Scorer, ScorerLoader, StageTimes
from qrnn_serve.scorers.batch_memory import BatchLayout, BatchMemory
from qrnn_serve.scorers.loader import ScorerSpec, load_checked
from qrnn_serve.scorers.packets import Channel, Kind, Packet, failed


@runtime_checkable
class InPlaceScorer(Scorer, Protocol):
    """A Scorer whose device writes the answers into the shared memory by itself."""

    def pin(self, memory: mmap.mmap) -> Callable[[], None]:
        """Let the device use this memory; returns what ends that, before it is unmapped."""
        ...

    def score_into(self, rows: PackedRows, place: ScoredRows) -> ScoredRows:
        """`score`, with the answers in the arrays of `place`."""
        ...


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
    end_with_parent()
    for fd in (socket_fd, memory_fd):
        # They are for this process, not for programs that it may start.
        os.set_inheritable(fd, False)
    end = socket.socket(fileno=socket_fd)
    # The server asks for nothing yet: what can be read by now is its end, before this one's start.
    if not select.select([end], [], [], 0)[0]:
        # Later it may have ended when it is to be told.
        with contextlib.suppress(ConnectionError):
            _serve(load, Channel(end), memory_fd)
    logging.shutdown()
    # Device libraries take long to unload, and some fail at it.
    os._exit(0)


def _serve(load: ScorerLoader, channel: Channel, memory_fd: int) -> None:
    try:
        scorer = load()
    except Exception as error:  # whatever it is, it is told to whoever started the replica
        channel.send(failed(error))
        return
    memory = BatchMemory(memory_fd, scorer.pin if isinstance(scorer, InPlaceScorer) else None)
    channel.send(_ready(scorer))
    while (packet := channel.receive()) is not None:
        channel.send(_answer(packet, scorer, memory))


def _ready(scorer: Scorer) -> Packet:
    facts = {
        "schema": to_mapping(scorer.schema),
        "device": scorer.device,
        "engine": scorer.engine,
        "max_timesteps": scorer.max_timesteps,
        "stages": [to_mapping(stage) for stage in scorer.stages],
    }
    return Packet(Kind.READY, text=json.dumps(facts))


def _answer(packet: Packet, scorer: Scorer, memory: BatchMemory) -> Packet:
    try:
        layout = BatchLayout.of(packet, scorer.schema)
        scored = _score(scorer, layout, memory.map(packet.memory_bytes))
    except Exception as error:  # the server decides what it means for the rows
        return failed(error, packet.batch)
    return replace(
        packet,
        kind=Kind.SCORED,
        graphs=scored.graphs,
        replayed=scored.replayed,
        padded_timesteps=scored.padded_timesteps,
        upload_s=scored.times.upload_s,
        compute_s=scored.times.compute_s,
        download_s=scored.times.download_s,
        text=json.dumps([stage.busy_s for stage in scorer.stages]) if scorer.stages else "",
    )


def _score(scorer: Scorer, layout: BatchLayout, shared: mmap.mmap) -> ScoredRows:
    rows = layout.rows_in(shared)
    if isinstance(scorer, InPlaceScorer):
        return scorer.score_into(rows, layout.place_in(shared))
    scored = scorer.score(rows)
    scored_s = time.monotonic()
    layout.put_scores(scored, shared)
    copying = StageTimes(download_s=time.monotonic() - scored_s)
    return replace(scored, times=scored.times + copying)


if __name__ == "__main__":
    main(sys.argv[1:])
