"""The rule of the queue, proven by simulations: replicas, callers and time without threads."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from qrnn_serve.core.errors import OverloadedError
from qrnn_serve.engine.queue import STRETCH, QueueConfig, RequestQueue
from qrnn_serve.engine.request import Outcome, Request
from qrnn_serve.engine.types import ScoredRows
from support.scheduling import FakeClock, puller_of, request_of

PER_TIMESTEP_S = 0.001
BUDGET_S = 0.05


@dataclass
class Simulation:
    """Replicas that pull whenever they are free, and what became of every request.

    Attributes:
        arrivals: (second, row lengths, seconds of patience or None), in any order.
        replicas: How many, each of another device.
        slower: Batches take that much longer than predicted.
        launch_s: What a batch costs beside its timesteps.
    """

    arrivals: list
    replicas: int = 1
    slower: float = 1.0
    launch_s: float = 0.0
    max_timesteps: int = 1000
    done_s: dict = field(default_factory=dict)
    refused: list = field(default_factory=list)
    expired: list = field(default_factory=list)
    steps: dict = field(default_factory=dict)
    busy_s: float = 0.0

    def run(self):
        self.clock = FakeClock()
        self.queue = RequestQueue(QueueConfig(max_timesteps=self.max_timesteps), clock=self.clock)
        self.free = [
            puller_of(
                per_timestep=PER_TIMESTEP_S,
                fixed=self.launch_s,
                target_s=BUDGET_S,
                max_timesteps=80,
                device=f"cuda:{number}",
                cuts_in_time=True,
            )
            for number in range(self.replicas)
        ]
        for puller in self.free:
            self.queue.add_puller(puller)
        order = itertools.count()
        events = [(start_s + 100.0, next(order), arrival) for start_s, *arrival in self.arrivals]
        heapq.heapify(events)
        while events:
            self.clock.now_s, _, event = heapq.heappop(events)
            if isinstance(event, list):
                self.arrive(*event)
            else:
                self.end(*event)
            while self.free and self.queue._line:  # take would wait for ever
                puller = self.free.pop()
                batch = self.queue.take(puller)
                self.expired += batch.expired
                if not batch.parts:
                    self.free.append(puller)
                    continue
                seconds = batch.launch.seconds * self.slower
                self.busy_s += seconds
                heapq.heappush(
                    events, (self.clock.now_s + seconds, next(order), (puller, batch.parts))
                )
        return self

    def arrive(self, lengths, patience_s):
        now_s = self.clock.now_s
        deadline_s = None if patience_s is None else now_s + patience_s
        request = request_of(lengths, submitted_s=now_s, deadline_s=deadline_s)
        try:
            self.queue.put(request)
        except OverloadedError:
            self.refused.append(request)
        else:
            self.steps[request] = []

    def end(self, puller, parts):
        self.free.append(puller)
        for part in parts:
            lengths = part.request.rows.lengths
            for row in range(part.first, part.last):
                end = int(lengths[row]) if part.end is None else part.end
                self.steps[part.request] += [(row, step) for step in range(part.begin, end)]
            self.done_s[part.request] = self.clock.now_s
            if not part.ends_row:
                state = np.zeros((1, 2), np.float32)
                self.queue.resume(Outcome(part=part, result=ScoredRows(output=state, state=state)))
        # Idle for the queue from now on, not only from its next take.
        puller.busy_until_s = None


def latency_s(simulation: Simulation, request: Request) -> float:
    return simulation.done_s[request] - request.submitted_s


arrivals = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.lists(st.integers(1, 120), min_size=1, max_size=12),
        st.none() | st.floats(0.01, 3),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 3), st.sampled_from([0.5, 1.0, 2.0]))
def test_every_timestep_is_scored_once_or_its_request_is_told(arrivals, replicas, slower):
    """Whatever comes, on any number of replicas, with a wrong prediction or a right one."""
    simulation = Simulation(arrivals, replicas, slower).run()

    assert len(simulation.refused) + len(simulation.steps) == len(arrivals)
    for request, steps in simulation.steps.items():
        all_steps = [(r, t) for r, n in enumerate(request.rows.lengths) for t in range(n)]
        assert len(set(steps)) == len(steps)
        if request in simulation.expired:
            assert request.deadline_s is not None
        else:
            assert sorted(steps) == all_steps
        for row in range(request.rows.rows):
            of_row = [step for step in steps if step[0] == row]
            assert of_row == sorted(of_row)
    assert simulation.queue.depth().timesteps == simulation.queue.depth().nbytes == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),
            st.lists(st.integers(1, 50), min_size=1, max_size=12),
            st.none(),
        ),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_waiting_is_bounded(arrivals, replicas):
    """A request is done by its due time, 4 x its work, and what the full queue held then."""
    simulation = Simulation(arrivals, replicas).run()

    full_s = simulation.max_timesteps * PER_TIMESTEP_S / replicas
    for request in simulation.steps:
        due_s = STRETCH * request.work_s
        # And the batch that ran at the due time, and its own last.
        assert latency_s(simulation, request) <= due_s + 2 * full_s + 2 * BUDGET_S + 1e-6


@pytest.mark.parametrize("replicas", [1, 2])
def test_nobody_starves_behind_a_stream_of_short_requests(replicas):
    """With twice the work that fits, all of it short, a long request still gets its quarter."""
    random = np.random.default_rng(3)
    shorts = [(at, [5, 5], None) for at in random.uniform(0, 6, 1200 * replicas)]
    simulation = Simulation([(0.0, [20] * 40, None), *shorts], replicas).run()
    long = next(r for r in simulation.steps if r.rows.rows == 40)

    assert latency_s(simulation, long) < STRETCH * 0.8 + 1.0 / replicas + 2 * BUDGET_S
    assert len(simulation.refused) > 300


def test_short_requests_are_not_stuck_behind_a_long_one():
    """While 0.9 s of one caller's work runs, short requests wait for at most two batches."""
    random = np.random.default_rng(4)
    shorts = [(at, [5], None) for at in random.uniform(0, 1.5, 100)]
    simulation = Simulation([(0.0, [20] * 45, None), *shorts]).run()
    latencies = {r: latency_s(simulation, r) for r in simulation.steps}
    long = next(r for r in simulation.steps if r.rows.rows == 45)

    assert max(s for r, s in latencies.items() if r is not long) < 2 * BUDGET_S + 0.005
    assert latencies[long] < 1.5


def test_long_row_lets_short_requests_pass():
    """A row of ten batches is cut in time; short requests go between its pieces."""
    random = np.random.default_rng(5)
    shorts = [(at, [5], None) for at in random.uniform(0, 0.8, 50)]
    simulation = Simulation([(0.0, [800], None), *shorts]).run()
    latencies = {r: latency_s(simulation, r) for r in simulation.steps}
    long = next(r for r in simulation.steps if r.longest == 800)

    assert max(s for r, s in latencies.items() if r is not long) < 2 * 0.08 + 0.005
    assert len(simulation.steps[long]) == 800


@pytest.mark.parametrize("slower", [1.0, 1.5], ids=["predicted", "slower than predicted"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_flood_keeps_accepted_requests_in_time(replicas, slower):
    """Ten times the load: who is accepted is done in twice the deadline, replicas stay busy."""
    random = np.random.default_rng(6)
    patience_s, seconds = 0.4, 4
    count = int(10 * seconds * replicas / (20 * PER_TIMESTEP_S))
    arrivals = [
        (at, [int(n)], patience_s)
        for at, n in zip(
            random.uniform(0, seconds, count), random.integers(1, 40, count), strict=True
        )
    ]
    simulation = Simulation(arrivals, replicas, slower, max_timesteps=10_000).run()
    done = [r for r in simulation.steps if r not in simulation.expired]
    latencies = [latency_s(simulation, request) for request in done]

    assert np.quantile(latencies, 0.99) < 2 * patience_s
    assert simulation.busy_s > 0.95 * seconds * replicas
    assert len(simulation.expired) < 0.6 * len(simulation.steps)
    if slower == 1.0:
        assert max(latencies) <= patience_s + BUDGET_S
        assert len(simulation.expired) < 0.1 * len(simulation.steps)


@pytest.mark.parametrize("launch_s", [0.002, 0.006])
def test_flood_is_scored_in_full_batches(launch_s):
    """Launches that cost something do not make small batches of a full queue of near deadlines."""
    random = np.random.default_rng(8)
    patience_s, seconds, length = 0.4, 2, 6
    count = int(10 * seconds / (length * PER_TIMESTEP_S))
    arrivals = [(at, [length], patience_s) for at in random.uniform(0, seconds, count)]
    simulation = Simulation(arrivals, launch_s=launch_s, max_timesteps=10_000).run()
    in_time = [r for r in simulation.done_s if latency_s(simulation, r) <= patience_s]

    rows = (BUDGET_S - launch_s) // (length * PER_TIMESTEP_S)
    capacity = seconds * rows / (launch_s + rows * length * PER_TIMESTEP_S)
    assert len(in_time) > 0.95 * capacity
    assert len(simulation.expired) < 0.01 * len(simulation.steps)


def test_shared_batch_is_done_sooner():
    """On four idle replicas a request takes a quarter of the time, within one row."""
    alone, shared = (Simulation([(0.0, [3] * 16, None)], n).run() for n in (1, 4))

    assert max(alone.done_s.values()) - 100.0 == pytest.approx(48 * PER_TIMESTEP_S)
    assert max(shared.done_s.values()) - 100.0 == pytest.approx(12 * PER_TIMESTEP_S)
