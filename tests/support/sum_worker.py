"""A replica's process that scores with SumScorer and starts in a fraction of a second.

    python sum_worker.py FAULTS SOCKET_FD MEMORY_FD

A row may do harm, by its first feature:

    KILLS     the process is killed, as the kernel does when memory runs out
    HANGS     its batch never ends
    BREAKS    its batch fails, and all after it: what a broken CUDA context does

FAULTS is JSON: "schema" and "max_timesteps" for SumScorer, "memory_timesteps" for its attribute,
"raises" for the class of ours that loading raises, "exits" for a status with which the process
ends while it loads, "hangs" for a load that never ends, "count" for a file to which each start adds
a line, "in_place" for a scorer that writes its answers itself; "times", "graphs" and "replayed" for
what each batch tells of itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from qrnn_serve.core import errors
from qrnn_serve.core.config import from_mapping
from qrnn_serve.engine.types import ModelSchema, StageTimes
from qrnn_serve.scorers.worker import serve_scorer
from support.scorers import FEATURE_SCHEMA, SumScorer

KILLS, HANGS, BREAKS = 1001.0, 1002.0, 1003.0


def command(**faults) -> list[str]:
    """What runs it."""
    return [sys.executable, __file__, json.dumps(faults)]


class HarmfulScorer(SumScorer):
    def score(self, rows):
        first = rows.values[:, 0] if rows.values.ndim == 2 else rows.values
        if (first == KILLS).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (first == HANGS).any():
            threading.Event().wait()
        if (first == BREAKS).any():
            self.dead = True
        return super().score(rows)


class InPlaceScorer(HarmfulScorer):
    """Writes its answers into memory that it was given to pin, as a GPU does."""

    pinned = None

    def pin(self, memory):
        if self.pinned is not None:
            raise RuntimeError("the memory before was not unpinned")
        self.pinned = memory
        return self.unpin

    def unpin(self):
        self.pinned = None

    def score_into(self, rows, place):
        for array in (rows.values, place.output, place.state):
            base = array
            while isinstance(base, np.ndarray):
                base = base.base
            if base is not self.pinned:
                raise RuntimeError(f"the memory is not the pinned one, but {base!r}")
        scored = self.score(rows)
        place.output[:], place.state[:] = scored.output, scored.state
        return place


def load(faults):
    if "count" in faults:
        with Path(faults["count"]).open("a") as count:
            count.write(f"{os.getpid()}\n")
    if "raises" in faults:
        raise getattr(errors, faults["raises"])("as was asked")
    if "exits" in faults:
        os._exit(faults["exits"])
    if "hangs" in faults:
        threading.Event().wait()
    schema = FEATURE_SCHEMA
    if "schema" in faults:
        schema = from_mapping(ModelSchema, faults["schema"])
    kind = InPlaceScorer if "in_place" in faults else HarmfulScorer
    scorer = kind(schema, max_timesteps=faults.get("max_timesteps", 1 << 20))
    scorer.memory_timesteps = faults.get("memory_timesteps", scorer.memory_timesteps)
    scorer.times = StageTimes(**faults.get("times", {}))
    scorer.graphs, scorer.replayed = faults.get("graphs", 0), faults.get("replayed", 0)
    return scorer


if __name__ == "__main__":
    serve_scorer(lambda: load(json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
