"""Statistics of samples, and how they are taken on a made-up device."""

from __future__ import annotations

import pytest
import torch

from kernel_timing import (
    LEAST_SAMPLES,
    MOST_CALLS_PER_SAMPLE,
    MOST_SAMPLES,
    GpuBench,
    Timing,
    Work,
    ratio,
    short_error,
)


def test_timing():
    """The median and the tenth parts at both ends, in any order of samples."""
    timing = Timing.of([float(us) for us in (9, 1, 2, 3, 4, 5, 6, 7, 8, 100, 0)], 4)

    assert (timing.p10_us, timing.median_us, timing.p90_us) == (1.0, 5.0, 9.0)
    assert (timing.samples, timing.calls_per_sample) == (11, 4)


def test_timing_of_one_sample():
    """One sample is all three."""
    timing = Timing.of([7.0], 1)

    assert (timing.p10_us, timing.median_us, timing.p90_us) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("above", "below", "expected"), [(6.0, 3.0, 2.0), (None, 3.0, None), (6.0, None, None)]
)
def test_ratio(above, below, expected):
    """A missing side gives no ratio."""
    assert ratio(above, below) == expected


def test_short_error():
    """One line, short."""
    assert short_error(ValueError("first\nsecond")) == "ValueError: first"
    assert short_error(ValueError()) == "ValueError: "
    assert len(short_error(ValueError("x" * 900))) < 250


class FakeDevice:
    """A device whose clock moves by what the calls say they cost."""

    def __init__(self):
        self.now_us = 0.0
        self.order = []
        self.capturing = None

    def call(self, name, cost_us):
        def run():
            if self.capturing is not None:
                self.capturing.append((name, cost_us))
            else:
                self.spend(name, cost_us)

        return run

    def spend(self, name, cost_us):
        self.now_us += cost_us
        self.order.append(name)


@pytest.fixture
def device(monkeypatch):
    """torch.cuda with events, graphs and streams of a made-up device."""
    fake = FakeDevice()

    class Event:
        def __init__(self, enable_timing):
            self.at_us = 0.0

        def record(self, stream):
            self.at_us = fake.now_us

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return (later.at_us - self.at_us) / 1e3

    class Graph:
        def capture_begin(self):
            fake.capturing = self.nodes = []

        def capture_end(self):
            fake.capturing = None

        def replay(self):
            for node in self.nodes:
                fake.spend(*node)

    for name, value in {
        **{"Event": Event, "CUDAGraph": Graph, "Stream": object},
        **{"set_stream": lambda stream: None, "synchronize": lambda: None},
        "_sleep": lambda cycles: fake.spend("sleep", 100.0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cost_us", [5.0, 300.0, 90_000.0])
def test_gpu_bench(device, graph, cost_us):
    """The median is the cost of one call, from enough samples of enough calls."""
    calls = [device.call("one", cost_us), device.call("other", cost_us)]

    timing = GpuBench(0.05).measure({"ours": Work(calls, graph=graph)}).times["ours"]

    assert timing.median_us == pytest.approx(cost_us)
    assert LEAST_SAMPLES <= timing.samples <= MOST_SAMPLES
    assert 2 <= timing.calls_per_sample <= MOST_CALLS_PER_SAMPLE


def test_sides_take_turns(device):
    """Samples of both sides are interleaved, so that a slow moment meets both."""
    works = {
        name: Work([device.call(name, 5000.0)], calls_per_sample=1) for name in ("ours", "peer")
    }

    GpuBench(0.05).measure(works)

    assert device.order[-6:] == ["ours", "peer"] * 3


def test_queued_samples_hold_no_waiting(device):
    """What keeps the device busy is before the first event."""
    work = Work([device.call("ours", 7.0)], calls_per_sample=1, queued=True)

    timing = GpuBench(0.01).measure({"ours": work}).times["ours"]

    assert "sleep" in device.order
    assert timing.median_us == pytest.approx(7.0)


def test_a_side_that_fails_leaves_the_others(device):
    """In the first call, in the capture, or in a sample."""
    counted = iter(range(1000))

    def later():
        if next(counted) == 40:
            raise RuntimeError("in a sample")
        device.spend("later", 3000.0)

    def captured():
        if device.capturing is not None:
            raise RuntimeError("in the capture")
        device.spend("captured", 3000.0)

    def first():
        raise RuntimeError("in the first call")

    measured = GpuBench(0.5).measure(
        {
            "later": Work([later], graph=False),
            "captured": Work([captured]),
            "first": Work([first]),
            "ours": Work([device.call("ours", 3000.0)]),
        }
    )

    assert measured.us("ours") == pytest.approx(3000.0)
    assert measured.errors == {
        name: f"RuntimeError: in {place}"
        for name, place in (
            ("later", "a sample"),
            ("captured", "the capture"),
            ("first", "the first call"),
        )
    }
    assert device.capturing is None
