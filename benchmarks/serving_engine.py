"""The engine without a server, in a process of its own: what no server can pass."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from qrnn_serve.engine.types import PackedRows
from serving_cases import Case
from serving_load import Inputs
from serving_servers import on_core

_MAX_ROWS = 32
"""Calls of one sequence that are scored together, as the peers do."""


class Engine:
    """Scores batches one after the other on one core."""

    def __init__(self, model: Path, core: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(model, theirs), daemon=True)
        with on_core(core):
            self._process.start()

    def rate(self, case: Case, inputs: Inputs, seconds: float) -> float:
        """Sequences a second of a case; their scores are checked first."""
        calls = min(case.callers, _MAX_ROWS) if case.rows == 1 else 1
        lengths = [array.shape[1] for array in inputs.values[:calls] for _ in array]
        values = np.concatenate([a.reshape(-1, a.shape[-1]) for a in inputs.values[:calls]])
        self._pipe.send((values, np.array(lengths), seconds))
        scores, batches_per_s = self._pipe.recv()
        for number, part in enumerate(np.split(scores, calls)):
            inputs.check(number, part)
        return batches_per_s * len(lengths)

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _serve(model: Path, pipe: Connection[Any, Any]) -> None:
    from qrnn_serve.core.malloc import keep_freed_memory
    from qrnn_serve.scorers import load_scorer

    # As the server does.
    keep_freed_memory()
    scorer = load_scorer(model, threads=1)
    while True:
        values, lengths, seconds = pipe.recv()
        # What comes in a message cannot be written to, and is copied once.
        values.flags.writeable = False
        rows = PackedRows(values=values, lengths=lengths)
        output = scorer.score(rows).output
        started, batches = time.perf_counter(), 0
        while (took_s := time.perf_counter() - started) < seconds or batches == 0:
            scorer.score(rows)
            batches += 1
        pipe.send((output, batches / took_s))
