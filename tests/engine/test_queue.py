"""The queue: bounds, order, cuts, expiry, and a state machine over all of them."""

from __future__ import annotations

import asyncio
import math
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qrnn_serve.core.errors import ConfigError, OverloadedError, UnavailableError
from qrnn_serve.engine.drain import DrainRate
from qrnn_serve.engine.queue import BatchLimits, QueueConfig, RequestQueue
from qrnn_serve.engine.request import Request
from support.scorers import whole_number_rows


class FakeClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


LOOP = asyncio.new_event_loop()


def request_of(lengths, *, submitted_s=0.0, deadline_s=None):
    rows = whole_number_rows(lengths)
    future = LOOP.create_future()
    return Request(rows, future, submitted_s=submitted_s, deadline_s=deadline_s)


def taken_rows(batch):
    return [(part.request, row) for part in batch.parts for row in range(part.first, part.last)]


def test_put_refuses_past_the_timestep_limit_with_a_computed_wait():
    """A full queue refuses at once and says how long draining the excess takes at the seen rate."""
    clock = FakeClock()
    rate = DrainRate(clock=clock)
    rate.record(timesteps=100, busy_s=2.0)
    queue = RequestQueue(QueueConfig(max_timesteps=10), drain_rate=rate, clock=clock)
    queue.put(request_of([4, 4]))

    with pytest.raises(OverloadedError) as refused:
        queue.put(request_of([5]))

    assert refused.value.retry_after_s == pytest.approx(3 / 50)
    assert queue.depth().timesteps == 8


def test_put_refuses_past_the_byte_limit():
    """Wide features fill the queue by bytes before they fill it by timesteps."""
    one = request_of([10])
    queue = RequestQueue(QueueConfig(max_timesteps=1000, max_bytes=one.nbytes * 2))
    queue.put(one)
    queue.put(request_of([10]))

    with pytest.raises(OverloadedError):
        queue.put(request_of([1]))


def test_put_refuses_a_request_larger_than_the_queue_for_ever():
    """A request that can never fit is told so: the wait is infinite, the text has the limit."""
    queue = RequestQueue(QueueConfig(max_timesteps=10))

    with pytest.raises(OverloadedError, match="at most 10 timesteps") as refused:
        queue.put(request_of([11]))

    assert refused.value.retry_after_s == math.inf


def test_take_joins_waiting_requests_up_to_both_limits():
    """A batch holds whole requests in order of arrival, up to the limits."""
    queue = RequestQueue(QueueConfig())
    requests = [request_of([3, 2]), request_of([4]), request_of([1])]
    for request in requests:
        queue.put(request)

    first = queue.take(BatchLimits(max_timesteps=9, max_rows=100))
    second = queue.take(BatchLimits(max_timesteps=9, max_rows=100))

    assert [part.request for part in first.parts] == requests[:2]
    assert [part.request for part in second.parts] == requests[2:]


def test_take_cuts_a_large_request_by_rows_in_order():
    """A request larger than a batch leaves in runs of rows, each within the limits, none lost."""
    queue = RequestQueue(QueueConfig())
    request = request_of([3, 3, 3, 7, 1, 1])
    queue.put(request)

    runs = [queue.take(BatchLimits(max_timesteps=6, max_rows=3)).parts[0] for _ in range(4)]

    # The row of 7 timesteps cannot be cut: it is a batch of its own.
    assert [(part.first, part.last) for part in runs] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert queue.depth().timesteps == queue.depth().nbytes == 0


def test_take_drops_requests_past_their_deadline():
    """A late request leaves the queue as expired and takes no room in a batch."""
    clock = FakeClock()
    queue = RequestQueue(QueueConfig(), clock=clock)
    late, live = request_of([5], deadline_s=101.0), request_of([2])
    queue.put(late)
    queue.put(live)
    clock.now_s = 101.0

    batch = queue.take(BatchLimits(max_timesteps=5))

    assert batch.expired == (late,)
    assert [part.request for part in batch.parts] == [live]


def test_discard_frees_the_room_of_a_cancelled_request():
    """What a caller no longer waits for makes room at once and is never taken."""
    queue = RequestQueue(QueueConfig(max_timesteps=10))
    gone, live = request_of([6]), request_of([6])
    queue.put(gone)
    queue.discard(gone)
    queue.put(live)

    batch = queue.take(BatchLimits())

    assert [part.request for part in batch.parts] == [live]


def test_take_wakes_an_idle_replica_without_polling():
    """A replica that waits in take gets a request as soon as it is put."""
    queue = RequestQueue(QueueConfig())
    batches = []
    thread = threading.Thread(target=lambda: batches.append(queue.take(BatchLimits())))
    thread.start()
    request = request_of([1])
    queue.put(request)
    thread.join(timeout=10)

    assert [part.request for part in batches[0].parts] == [request]


def test_take_leaves_the_rest_of_a_cut_request_to_another_idle_replica():
    """One large request wakes as many idle replicas as it has batches."""
    queue = RequestQueue(QueueConfig())
    limits = BatchLimits(max_timesteps=4)
    batches = []
    threads = [
        threading.Thread(target=lambda: batches.append(queue.take(limits))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    queue.put(request_of([4, 4, 4]))
    for thread in threads:
        thread.join(timeout=10)

    assert sorted(part.first for batch in batches for part in batch.parts) == [0, 1, 2]


def test_close_wakes_waiting_replicas_and_refuses_new_requests():
    """After close, replicas end and callers are told why."""
    queue = RequestQueue(QueueConfig())
    batches = []
    thread = threading.Thread(target=lambda: batches.append(queue.take(BatchLimits())))
    thread.start()
    queue.close("shutting down", drop=True)
    thread.join(timeout=10)

    assert batches == [None]
    with pytest.raises(UnavailableError, match="shutting down"):
        queue.put(request_of([1]))


@pytest.mark.parametrize("field", ["max_timesteps", "max_bytes"])
def test_queue_config_refuses_zero(field):
    """A queue that holds nothing is a mistake in the settings, named by its field."""
    with pytest.raises(ConfigError, match=field):
        QueueConfig(**{field: 0})


def test_drain_rate_counts_replicas_and_forgets_old_batches():
    """The wait is the excess over the rate of all replicas, by batches of the last seconds."""
    clock = FakeClock()
    rate = DrainRate(clock=clock)
    assert rate.seconds_for(1000) == 1.0
    rate.record(timesteps=1000, busy_s=10.0)
    clock.now_s += 1000
    rate.record(timesteps=1000, busy_s=1.0)
    rate.set_replicas(2)

    assert rate.seconds_for(1000) == pytest.approx(0.5)
    assert rate.seconds_for(1) == 0.01
    assert rate.seconds_for(10**9) == 60.0


class QueueMachine(RuleBasedStateMachine):
    """The queue against a plain list of rows."""

    MAX_TIMESTEPS = 40

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.queue = RequestQueue(QueueConfig(max_timesteps=self.MAX_TIMESTEPS), clock=self.clock)
        self.waiting = []
        self.in_flight = []
        self.seen = set()
        self.over_limit = 0
        self.closed = False

    def timesteps(self, rows):
        return sum(int(request.rows.lengths[row]) for request, row in rows)

    @rule(
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
        patience_s=st.none() | st.integers(1, 5),
    )
    def put(self, lengths, patience_s):
        deadline_s = None if patience_s is None else self.clock.now_s + patience_s
        request = request_of(lengths, deadline_s=deadline_s)
        fits = self.timesteps(self.waiting) + sum(lengths) <= self.MAX_TIMESTEPS
        if self.closed and sum(lengths) <= self.MAX_TIMESTEPS:
            with pytest.raises(UnavailableError):
                self.queue.put(request)
        elif not fits:
            with pytest.raises(OverloadedError):
                self.queue.put(request)
        else:
            self.queue.put(request)
            self.waiting += [(request, row) for row in range(len(lengths))]

    @precondition(lambda self: self.waiting)
    @rule(max_timesteps=st.integers(1, 30), max_rows=st.integers(1, 10))
    def take(self, max_timesteps, max_rows):
        batch = self.queue.take(BatchLimits(max_timesteps=max_timesteps, max_rows=max_rows))
        rows = taken_rows(batch)
        late = {
            request
            for request, _ in self.waiting
            if request.deadline_s is not None and request.deadline_s <= self.clock.now_s
        }
        self.waiting = [(r, row) for r, row in self.waiting if r not in batch.expired]
        assert set(batch.expired) <= late
        assert not {request for request, _ in rows} & late
        assert rows == self.waiting[: len(rows)], "rows leave in the order they came"
        assert rows or batch.expired
        if len(rows) > 1:
            assert self.timesteps(rows) <= max_timesteps
            assert len(rows) <= max_rows
        assert not self.seen & set(rows), "a row was handed out twice"
        self.waiting = self.waiting[len(rows) :]
        self.seen |= set(rows)
        self.in_flight.append(batch.parts)
        self.over_limit = min(self.over_limit, self.timesteps(self.waiting))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def replica_dies(self, data):
        parts = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        assert self.queue.put_back(parts) is not self.closed
        if not self.closed:
            rows = [(part.request, row) for part in parts for row in range(part.first, part.last)]
            self.seen -= set(rows)
            self.waiting = rows + self.waiting
            self.over_limit = max(self.over_limit, self.timesteps(self.waiting))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def caller_leaves(self, data):
        request, _ = data.draw(st.sampled_from(self.waiting))
        self.queue.discard(request)
        self.waiting = [(r, row) for r, row in self.waiting if r is not request]

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def close(self):
        self.queue.close("closing", drop=False)
        self.closed = True

    @precondition(lambda self: self.waiting)
    @rule()
    def take_all(self):
        while self.waiting:
            self.take(max_timesteps=1000, max_rows=1000)

    @invariant()
    def counts_are_those_of_the_waiting_rows(self):
        depth = self.queue.depth()
        assert depth.timesteps == self.timesteps(self.waiting)
        assert depth.requests == len({request for request, _ in self.waiting})
        assert depth.timesteps <= max(self.MAX_TIMESTEPS, self.over_limit)
        if not self.waiting:
            assert depth.nbytes == 0

    def teardown(self):
        # By the queue's own count: after a failure the list may differ, and take would wait.
        while self.queue.depth().requests:
            self.queue.take(BatchLimits(max_timesteps=1000, max_rows=1000))
        self.queue.close("done", drop=False)
        assert self.queue.take(BatchLimits()) is None


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
