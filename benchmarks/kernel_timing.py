"""How the GPU is timed: device events, interleaved sides, medians, repeats by a time budget."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

Call = Callable[[], object]

COPY_BYTES = 1 << 30
SAMPLE_US = 2000.0  # long beside the few microseconds that starting a graph takes
MOST_CALLS_PER_SAMPLE = 32
LEAST_SAMPLES = 5
MOST_SAMPLES = 60
MOST_SETS = 24
BUSY_CYCLES = 200_000  # about 0.1 ms, in which the host queues a sample


@dataclass(frozen=True)
class Timing:
    """Time of one call over many samples, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    calls_per_sample: int

    @classmethod
    def of(cls, samples_us: Sequence[float], calls_per_sample: int) -> Timing:
        """Summarise the times of a call.

        Args:
            samples_us: Time of one call in each sample.
            calls_per_sample: Calls over which each was averaged.
        """
        ordered = sorted(samples_us)
        last = len(ordered) - 1
        return cls(
            median_us=statistics.median(ordered),
            p10_us=ordered[round(0.1 * last)],
            p90_us=ordered[round(0.9 * last)],
            samples=len(ordered),
            calls_per_sample=calls_per_sample,
        )


@dataclass(frozen=True)
class Work:
    """One side of a comparison.

    Attributes:
        calls: The same work on one set of inputs each, so that a cycle is larger than the cache.
        graph: Replay it as a CUDA graph; False calls it from Python as a program would.
        calls_per_sample: Calls between two events; None chooses by their time.
        queued: Launch while the device is busy, so that the time holds nothing of the host's.
    """

    calls: Sequence[Call]
    graph: bool = True
    calls_per_sample: int | None = None
    queued: bool = False


@dataclass
class Measured:
    """Times by name, and for the sides that could not run what they said."""

    times: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def us(self, name: str) -> float | None:
        """Median in microseconds; None if that side could not run."""
        return self.times[name].median_us if name in self.times else None

    def as_cell(self) -> dict[str, Any]:
        """The part of a table's cell that every table has."""
        return {
            "times": {name: asdict(timing) for name, timing in self.times.items()},
            "errors": dict(self.errors),
        }


class Bench(Protocol):
    """What a table needs of a device."""

    device: str

    def sets_for(self, set_bytes: int) -> int:
        """How many sets of inputs of `set_bytes` outgrow the cache."""
        ...

    def measure(self, works: dict[str, Work]) -> Measured:
        """Time all sides, their samples taken in turns."""
        ...

    def copy_work(self) -> Work:
        """A device-to-device copy of COPY_BYTES, which moves twice as many bytes."""
        ...


class GpuBench:
    """Times work on the current CUDA device.

    Makes a stream and sets it as the thread's current one: a backward runs in the stream of its
    forward, and torch's default stream cannot be captured.

    Args:
        budget_s: Device time for the samples of one side of a comparison.
    """

    device = "cuda"

    def __init__(self, budget_s: float) -> None:
        self._budget_us = budget_s * 1e6
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)

    def sets_for(self, set_bytes: int) -> int:
        """Enough that the bytes between two uses of a set are three times the L2 cache."""
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        return min(max(2, math.ceil(3 * cache_bytes / set_bytes)), MOST_SETS)

    def copy_work(self) -> Work:
        """Outside any graph, where copies are slower."""
        source, target = self._copy_buffers
        return Work([lambda: target.copy_(source)], graph=False)

    def measure(self, works: dict[str, Work]) -> Measured:
        """Prepare all sides, then take their samples in turns.

        A side that fails is reported and does not stop the others.
        """
        measured = Measured()
        prepared: dict[str, _Prepared] = {}
        for name, work in works.items():
            with _reported(name, measured):
                prepared[name] = self._prepare(work)
        for turn in range(MOST_SAMPLES):
            for name, side in prepared.items():
                if turn < side.wanted and name not in measured.errors:
                    with _reported(name, measured):
                        sample_us = self._sample(side.run, side.queued)
                        side.samples_us.append(sample_us / side.calls)
        for name, side in prepared.items():
            if name not in measured.errors:
                measured.times[name] = Timing.of(side.samples_us, side.calls)
        return measured

    @cached_property
    def _copy_buffers(self) -> tuple[Tensor, Tensor]:
        source = torch.randn(COPY_BYTES // 4, device=self.device)
        return source, torch.empty_like(source)

    def _prepare(self, work: Work) -> _Prepared:
        # Each set keeps its last output, so that outputs do not share a block of memory either.
        kept: list[object] = [None] * len(work.calls)

        def run(calls: int) -> None:
            for number in range(calls):
                kept[number % len(kept)] = work.calls[number % len(kept)]()

        run(len(kept))
        torch.cuda.synchronize()
        pilot_us = self._sample(lambda: run(len(kept))) / len(kept)
        calls = work.calls_per_sample or min(
            max(len(kept), math.ceil(SAMPLE_US / pilot_us)), MOST_CALLS_PER_SAMPLE
        )
        if work.graph:
            graph = _captured(lambda: run(calls))
            replay = graph.replay
        else:
            replay = lambda: run(calls)  # noqa: E731  (one of two ways to run a sample)
        sample_us = min(self._sample(replay) for _ in range(2))
        wanted = min(max(LEAST_SAMPLES, math.ceil(self._budget_us / sample_us)), MOST_SAMPLES)
        return _Prepared(replay, calls, wanted, work.queued)

    def _sample(self, run: Callable[[], object], queued: bool = False) -> float:
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        if queued:
            torch.cuda._sleep(BUSY_CYCLES)
        start.record(self._stream)
        run()
        stop.record(self._stream)
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3


@dataclass
class _Prepared:
    run: Callable[[], object]
    calls: int
    wanted: int
    queued: bool
    samples_us: list[float] = field(default_factory=list)


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    # torch.cuda.graph would empty torch's cache of memory around every capture.
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is broken; the first error says why
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


@contextlib.contextmanager
def _reported(name: str, measured: Measured) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a peer may fail in any way; the cell says how
        measured.errors[name] = short_error(error)


def short_error(error: Exception) -> str:
    """The kind of error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def ratio(above: float | None, below: float | None) -> float | None:
    """Divide; None where a side is missing."""
    return None if above is None or not below else above / below
