"""How the seconds of requests are spread, stage by stage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, get_args

from qrnn_serve.engine.request import BatchTiming

Stage = Literal["decode", "queue", "upload", "compute", "download", "encode"]
STAGES: tuple[Stage, ...] = get_args(Stage)
BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
"""Upper ends of the buckets of a histogram, beside infinity."""


class StageHistograms:
    """A histogram a stage, for one model. Written in the event loop, read by any thread.

    prometheus_client is optional, and only reads these.
    """

    def __init__(self) -> None:
        self._counts: dict[Stage, list[int]]
        self._sums_s: dict[Stage, float]
        self._reset()

    def _reset(self) -> None:
        self._counts = {s: [0] * (len(BOUNDS_S) + 1) for s in STAGES}
        self._sums_s = dict.fromkeys(STAGES, 0.0)

    def add(self, decode_s: float, timing: BatchTiming | None, encode_s: float) -> None:
        """Count a request; `timing` is None when none of its rows could be scored."""
        self._observe("decode", decode_s)
        if timing is not None:
            self._observe("queue", timing.queue_s)
            self._observe("upload", timing.upload_s)
            self._observe("compute", timing.compute_s)
            self._observe("download", timing.download_s)
        self._observe("encode", encode_s)

    def take(self) -> tuple[dict[Stage, list[int]], dict[Stage, float]] | None:
        """What was counted since the last call, for `merge`; None for nothing."""
        if not any(self._counts["encode"]):
            return None
        taken = self._counts, self._sums_s
        self._reset()
        return taken

    def merge(self, counts: Mapping[Stage, Sequence[int]], sums_s: Mapping[Stage, float]) -> None:
        """Add what another process has counted."""
        for stage in STAGES:
            own = self._counts[stage]
            self._counts[stage] = [a + b for a, b in zip(own, counts[stage], strict=True)]
            self._sums_s[stage] += sums_s[stage]

    def cumulative(self, stage: Stage) -> list[int]:
        """How many requests took at most each bound, and last how many there were."""
        return list(accumulate(self._counts[stage]))

    def sum_s(self, stage: Stage) -> float:
        """Seconds of all requests together."""
        return self._sums_s[stage]

    def _observe(self, stage: Stage, seconds: float) -> None:
        self._counts[stage][bisect_left(BOUNDS_S, seconds)] += 1
        self._sums_s[stage] += seconds
