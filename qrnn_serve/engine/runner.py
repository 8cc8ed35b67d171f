"""Scores one batch so that a failure costs only the rows that cause it.

A batch that fails is cut in halves and tried again, down to single rows, within a bound on extra
launches. A scorer that cannot even score a row known to be good is dead: a failed CUDA context
answers nothing but errors, and trying on would blame every row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from qrnn_serve.core.errors import OverloadedError, QRNNError, ReplicaError
from qrnn_serve.engine.collate import collate, halve, split
from qrnn_serve.engine.request import Outcome, Part
from qrnn_serve.engine.types import PackedRows, Scorer, ScorerDeadError, StageTimes

_MAX_EXTRA_LAUNCHES = 64

logger = logging.getLogger(__name__)


class BatchRunner:
    """Runs batches on one scorer. Used by one thread.

    Attributes:
        padded_timesteps: Padding computed in the batch of the last `run`.
        times: Where the time of its launches went, but for those that failed.
        graphs: CUDA graphs that the scorer had after its last launch.
        replayed: Launches of the last `run` that were replays of one.
        out_of_memory: Whether the batch of the last `run` did not fit the device's memory.
        failed: Whether any launch of the last `run` failed, so that its time says little.
    """

    def __init__(self, scorer: Scorer, probe: PackedRows) -> None:
        """`probe` is a row that the scorer was seen to score."""
        self._scorer = scorer
        self._probe = probe
        self._launches_left = 0
        self.padded_timesteps = self.graphs = self.replayed = 0
        self.times = StageTimes()
        self.out_of_memory = self.failed = False

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """Score the parts of one batch; every row of them is in exactly one outcome.

        Raises:
            ScorerDeadError: The scorer is unusable; no row was answered.
        """
        self._launches_left = _MAX_EXTRA_LAUNCHES
        self.padded_timesteps = self.replayed = 0
        self.times = StageTimes()
        self.out_of_memory = self.failed = False
        return self._run(parts)

    def _run(self, parts: Sequence[Part]) -> list[Outcome]:
        rows = sum(part.rows for part in parts)
        try:
            return self._launch(parts)
        except ScorerDeadError:
            raise
        except MemoryError as error:
            self.out_of_memory = True
            logger.warning("out of memory device=%s rows=%d: %s", self._scorer.device, rows, error)
            failure: QRNNError = OverloadedError(
                "the rows do not fit the memory of the device; send shorter ones, or fewer a call",
                retry_after_s=1.0,
            )
        except Exception:  # the batch step: whatever a model raises must not stop the replica
            logger.exception("batch failed device=%s rows=%d", self._scorer.device, rows)
            self._check_alive()
            failure = ReplicaError(
                "the model failed on this row, or on one next to it; the server's log says why"
            )
        self.failed = True
        if rows == 1 or self._launches_left < 2:
            return [Outcome(part=part, result=failure) for part in parts]
        self._launches_left -= 2
        left, right = halve(parts)
        return self._run(left) + self._run(right)

    def _launch(self, parts: Sequence[Part]) -> list[Outcome]:
        started_s = time.monotonic()
        batch = collate(parts)
        joined_s = time.monotonic()
        scored = self._scorer.score(batch)
        scored_s = time.monotonic()
        outcomes = split(scored, parts, self._scorer.schema)
        self.times = StageTimes(
            upload_s=self.times.upload_s + scored.times.upload_s + joined_s - started_s,
            compute_s=self.times.compute_s + scored.times.compute_s,
            download_s=self.times.download_s
            + scored.times.download_s
            + time.monotonic()
            - scored_s,
        )
        self.padded_timesteps += scored.padded_timesteps
        self.graphs = scored.graphs
        self.replayed += scored.replayed
        return outcomes

    def _check_alive(self) -> None:
        try:
            self._scorer.score(self._probe)
        except Exception as error:
            raise ScorerDeadError(
                f"the scorer on {self._scorer.device} fails on a row that it scored before"
            ) from error
