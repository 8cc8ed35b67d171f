"""The queue as a state machine: no timestep is lost or handed out twice, whatever happens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qrnn_serve.core.errors import OverloadedError, ReplicaError, UnavailableError
from qrnn_serve.engine.queue import STRETCH
from qrnn_serve.engine.request import Outcome
from support.scheduling import FakeClock, puller_of, queue_of, request_of, scored_piece


class QueueMachine(RuleBasedStateMachine):
    """The queue against a plain set of timesteps, each (request, row, timestep)."""

    MAX_TIMESTEPS = 40

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.pullers = [
            puller_of(
                per_timestep=0.05,
                fixed=0.05,
                target_s=0.5,
                max_timesteps=most,
                max_rows=5,
                device=device,
                cuts_in_time=True,
            )
            for device, most in (("cuda:0", 7), ("cuda:1", 12))
        ]
        self.queue = queue_of(*self.pullers, clock=self.clock, max_timesteps=self.MAX_TIMESTEPS)
        self.waiting = set()
        self.in_flight = []
        self.over_limit = 0
        self.closed = False

    def ready(self):
        """(request, row) of what waits for nothing but a replica."""
        in_flight = {(p.request, p.first) for parts in self.in_flight for p in parts if p.end}
        return {(request, row) for request, row, _ in self.waiting} - in_flight

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
        patience_s=st.none() | st.integers(1, 5),
    )
    def put(self, lengths, patience_s):
        now_s = self.clock.now_s
        deadline_s = None if patience_s is None else now_s + patience_s
        request = request_of(lengths, submitted_s=now_s, deadline_s=deadline_s)
        fits = len(self.waiting) + sum(lengths) <= self.MAX_TIMESTEPS
        refusal = None
        try:
            self.queue.put(request)
        except (UnavailableError, OverloadedError) as error:
            refusal = error
        if refusal is None:
            assert fits
            self.waiting |= {(request, r, t) for r, n in enumerate(lengths) for t in range(n)}
        elif isinstance(refusal, OverloadedError):
            assert not fits or deadline_s is not None
            assert 0 < refusal.retry_after_s <= 60 or sum(lengths) > self.MAX_TIMESTEPS
        assert isinstance(refusal, UnavailableError) <= self.closed
        assert refusal is not None or not self.closed

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 1))
    def take(self, which):
        puller = self.pullers[which]
        batch = self.queue.take(puller)
        for request in batch.expired:
            assert request.deadline_s is not None
            self.waiting = {step for step in self.waiting if step[0] is not request}
        steps = steps_of(batch.parts)
        assert set(steps) <= self.waiting, "a timestep was handed out twice"
        assert len(set(steps)) == len(steps)
        self.waiting -= set(steps)
        assert steps or batch.expired
        self.check_limits(batch, puller)
        self.check_order(steps)
        self.in_flight.append(batch.parts)
        self.over_limit = min(self.over_limit, len(self.waiting))

    def check_limits(self, batch, puller):
        assert sum(part.timesteps for part in batch.parts) == batch.launch.timesteps
        assert batch.launch.timesteps <= puller.limits.max_timesteps
        assert batch.launch.rows <= puller.limits.max_rows
        if batch.launch.rows > 1:
            assert batch.launch.seconds <= puller.budget_s * (1 + 1e-9)

    def check_order(self, steps):
        """Rows keep their order, and nothing overtakes what was due before it came."""
        for request, row in self.ready():
            for other, other_row, _ in steps:
                if other is not request:
                    assert other.submitted_s <= request.submitted_s + STRETCH * request.work_s
                elif not request.moved:
                    assert other_row <= row

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), fails=st.booleans())
    def batch_ends(self, data, fails):
        parts = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        for part in parts:
            if part.ends_row:
                continue
            outcome = scored_piece(part, part.end)
            if fails:
                outcome = Outcome(part=part, result=ReplicaError("broken"))
                self.waiting = {s for s in self.waiting if s[:2] != (part.request, part.first)}
            self.queue.resume(outcome)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def replica_dies(self, data):
        parts = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        for part in parts:
            part.request.moved = True
        assert self.queue.put_back(parts) is not self.closed
        if not self.closed:
            self.waiting |= set(steps_of(parts))
            self.over_limit = max(self.over_limit, len(self.waiting))
        else:
            # The pool gives up on such requests.
            for part in parts:
                self.leave(part.request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def caller_leaves(self, data):
        requests = sorted({request for request, _, _ in self.waiting}, key=lambda r: r.number)
        self.leave(data.draw(st.sampled_from(requests)))

    def leave(self, request):
        self.queue.discard(request)
        self.waiting = {step for step in self.waiting if step[0] is not request}

    @rule(seconds=st.sampled_from([0.1, 1, 3]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def close(self):
        self.queue.close("closing", drop=False)
        self.closed = True

    @invariant()
    def counts_are_those_of_the_waiting_timesteps(self):
        depth = self.queue.depth()
        assert depth.timesteps == len(self.waiting)
        assert depth.requests == len({request for request, _, _ in self.waiting})
        assert depth.timesteps <= max(self.MAX_TIMESTEPS, self.over_limit)
        if not self.waiting:
            assert depth.nbytes == 0

    def teardown(self):
        # By the queue's own count: after a failure the set may differ, and take would wait.
        for parts in self.in_flight:
            for part in parts:
                self.queue.discard(part.request)
        while self.queue.depth().requests:
            for part in self.queue.take(self.pullers[0]).parts:
                if not part.ends_row:
                    self.queue.resume(scored_piece(part))
        self.queue.close("done", drop=False)
        assert self.queue.take(self.pullers[0]) is None


def steps_of(parts):
    """(request, row, timestep) of every timestep, in order."""
    steps = []
    for part in parts:
        lengths = part.request.rows.lengths
        for row in range(part.first, part.last):
            end = int(lengths[row]) if part.end is None else part.end
            steps += [(part.request, row, t) for t in range(part.begin, end)]
    return steps


TestQueueMachine = QueueMachine.TestCase


TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
