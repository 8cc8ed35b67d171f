"""The queue: bounds, order, cuts, expiry, and a state machine over all of them."""

from __future__ import annotations

import math
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qrnn_serve.core.errors import (
    ConfigError,
    OverloadedError,
    ReplicaError,
    UnavailableError,
)
from qrnn_serve.engine.queue import STRETCH, QueueConfig, RequestQueue
from qrnn_serve.engine.request import Outcome
from qrnn_serve.engine.types import ScoredRows
from support.scheduling import FakeClock, puller_of, request_of


def queue_of(*pullers, clock=None, **config):
    """A queue and the replicas that it counts on."""
    queue = RequestQueue(QueueConfig(**config), clock=clock or FakeClock())
    for puller in pullers:
        queue.add_puller(puller)
    return queue


def scored_piece(part, value=1.0):
    """The outcome of a piece: one output a timestep, and a state of one value."""
    return Outcome(
        part=part,
        result=ScoredRows(
            output=np.zeros((part.timesteps, 2), np.float32),
            state=np.full((1, 2), value, np.float32),
        ),
    )


def test_put_refuses_past_the_timestep_limit_with_a_computed_wait():
    """A full queue refuses at once and says how long two replicas take for the excess."""
    queue = queue_of(
        puller_of(per_timestep=0.02, device="cuda:0"),
        puller_of(per_timestep=0.02, device="cuda:1"),
        max_timesteps=10,
    )
    queue.put(request_of([4, 4]))

    with pytest.raises(OverloadedError) as refused:
        queue.put(request_of([5]))

    assert refused.value.retry_after_s == pytest.approx(3 * 0.02 / 2)
    assert queue.depth().timesteps == 8


def test_retry_hint_has_bounds():
    """However much is in excess, a caller is told to wait from 10 ms to a minute."""
    hints = []
    for per_timestep in (1e-9, 1e9):
        queue = queue_of(puller_of(per_timestep=per_timestep), max_timesteps=10)
        queue.put(request_of([9]))
        with pytest.raises(OverloadedError) as refused:
            queue.put(request_of([5]))
        hints.append(refused.value.retry_after_s)

    assert hints == [0.01, 60.0]


def test_put_refuses_past_the_byte_limit():
    """Wide features fill the queue by bytes before they fill it by timesteps."""
    one = request_of([10])
    queue = RequestQueue(QueueConfig(max_timesteps=1000, max_bytes=one.whole().nbytes * 2))
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

    puller = puller_of(max_timesteps=9, max_rows=100)
    first, second = queue.take(puller), queue.take(puller)

    assert [part.request for part in first.parts] == requests[:2]
    assert [part.request for part in second.parts] == requests[2:]


def test_take_cuts_a_large_request_by_rows_in_order():
    """A request larger than a batch leaves in runs of rows, each within the limits, none lost."""
    queue = RequestQueue(QueueConfig())
    request = request_of([3, 3, 3, 7, 1, 1])
    queue.put(request)
    puller = puller_of(max_timesteps=6, max_rows=3)

    runs = [queue.take(puller).parts[0] for _ in range(4)]

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

    batch = queue.take(puller_of(max_timesteps=5))

    assert batch.expired == (late,)
    assert [part.request for part in batch.parts] == [live]


def test_discard_frees_the_room_of_a_cancelled_request():
    """What a caller no longer waits for makes room at once and is never taken."""
    queue = RequestQueue(QueueConfig(max_timesteps=10))
    gone, live = request_of([6]), request_of([6])
    queue.put(gone)
    queue.discard(gone)
    queue.put(live)

    batch = queue.take(puller_of())

    assert [part.request for part in batch.parts] == [live]


def test_take_wakes_an_idle_replica_without_polling():
    """A replica that waits in take gets a request as soon as it is put."""
    queue = RequestQueue(QueueConfig())
    batches = []
    thread = threading.Thread(target=lambda: batches.append(queue.take(puller_of())))
    thread.start()
    request = request_of([1])
    queue.put(request)
    thread.join(timeout=10)

    assert [part.request for part in batches[0].parts] == [request]


def test_take_leaves_the_rest_of_a_cut_request_to_another_idle_replica():
    """One large request wakes as many idle replicas as it has batches."""
    queue = RequestQueue(QueueConfig())
    limits = {"max_timesteps": 4}
    batches = []
    threads = [
        threading.Thread(target=lambda: batches.append(queue.take(puller_of(**limits))))
        for _ in range(3)
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
    thread = threading.Thread(target=lambda: batches.append(queue.take(puller_of())))
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


def test_batch_is_as_large_as_the_target_time_allows():
    """The cost model sets the size: 10 timesteps of 5 ms fill 50 ms, never less than one row."""
    puller = puller_of(per_timestep=0.005, target_s=0.05)
    queue = queue_of(puller)
    queue.put(request_of([4, 4, 4, 30, 1]))

    sizes = [[part.timesteps for part in queue.take(puller).parts] for _ in range(4)]

    assert sizes == [[8], [4], [30], [1]]


def test_batch_holds_at_least_what_an_empty_launch_costs():
    """A launch dearer than the target is not spent on single rows."""
    puller = puller_of(fixed=1.0, per_timestep=0.1, target_s=0.05)
    queue = queue_of(puller)
    queue.put(request_of([1] * 30))

    assert [part.rows for part in queue.take(puller).parts] == [10]


def test_batch_has_a_limit_of_bytes():
    """Rows fill a batch by bytes before they fill it by timesteps."""
    request = request_of([2, 2, 2])
    two_rows = request.whole().cut(2)[0].nbytes
    queue = queue_of()
    queue.put(request)

    assert [p.rows for p in queue.take(puller_of(max_bytes=two_rows)).parts] == [2]


def test_short_request_passes_a_long_one_and_fills_its_batch():
    """A short request that comes second goes first; the long one takes the room beside it."""
    clock = FakeClock()
    puller = puller_of(per_timestep=0.005, target_s=0.05)
    queue = queue_of(puller, clock=clock)
    long = request_of([2] * 100, submitted_s=100.0)
    short = request_of([2], submitted_s=100.1)
    queue.put(long)
    queue.put(short)

    batch = queue.take(puller)

    assert [(part.request, part.rows) for part in batch.parts] == [(short, 1), (long, 4)]


def test_long_request_is_due_in_the_end():
    """What comes after the due time of a waiting part does not pass it: 4 x its work."""
    puller = puller_of(per_timestep=0.005, target_s=0.05)
    queue = queue_of(puller)
    long = request_of([10] * 2, submitted_s=100.0)
    queue.put(long)
    queue.take(puller)
    due_s = 100.0 + STRETCH * 20 * 0.005
    before = request_of([1], submitted_s=due_s - 0.03)
    after = request_of([1], submitted_s=due_s - 0.01)
    for request in (after, before):
        queue.put(request)

    order = [part.request for _ in range(3) for part in queue.take(puller).parts]

    assert order == [before, long, after]


def test_near_deadline_goes_first_and_shortens_its_batch():
    """A request that must start now is taken first, in a batch that ends in time for it."""
    puller = puller_of(per_timestep=0.001, target_s=0.05)
    queue = queue_of(puller)
    patient = request_of([5] * 20, submitted_s=100.0)
    urgent = request_of([10], submitted_s=100.0, deadline_s=100.0205)
    queue.put(patient)
    queue.put(urgent)

    batch = queue.take(puller)

    assert [(part.request, part.rows) for part in batch.parts] == [(urgent, 1), (patient, 2)]


def test_put_refuses_what_cannot_make_its_deadline():
    """1 s of work is due first; a request that needs to be done earlier is refused at once."""
    queue = queue_of(puller_of(per_timestep=0.005, target_s=0.05))
    queue.put(request_of([10] * 20, submitted_s=96.0))

    with pytest.raises(OverloadedError, match="deadline") as refused:
        queue.put(request_of([10], submitted_s=100.0, deadline_s=100.6))

    assert refused.value.retry_after_s == pytest.approx(1.0 + 0.05 - 0.6)


def test_put_takes_a_short_deadline_that_passes_the_long_request():
    """The wait is that for what is due before, not for all that waits."""
    queue = queue_of(puller_of(per_timestep=0.005, target_s=0.05))
    queue.put(request_of([10] * 20, submitted_s=100.0))
    short = request_of([1], submitted_s=100.0, deadline_s=100.1)
    queue.put(short)

    assert queue.depth().requests == 2


def test_take_drops_what_would_be_late_before_it_costs_anything():
    """A request whose predicted end is after its deadline is not started."""
    clock = FakeClock()
    puller = puller_of(per_timestep=0.01, target_s=0.05)
    queue = queue_of(puller, clock=clock)
    late = request_of([10], submitted_s=100.0, deadline_s=100.5)
    live = request_of([10], submitted_s=100.0)
    queue.put(late)
    queue.put(live)
    clock.now_s = 100.45

    batch = queue.take(puller)

    assert batch.expired == (late,)
    assert [part.request for part in batch.parts] == [live]


def test_prediction_does_not_stop_a_request_that_waits_alone():
    """A cost model that is wrong must see a batch to learn from it."""
    puller = puller_of(per_timestep=10.0)
    queue = queue_of(puller)
    request = request_of([10], submitted_s=100.0, deadline_s=101.0)
    queue.put(request)

    batch = queue.take(puller)

    assert batch.expired == ()
    assert [part.request for part in batch.parts] == [request]


def test_idle_replicas_get_equal_shares_by_timesteps():
    """A request of uneven rows goes to three idle devices in equal timesteps, not rows."""
    pullers = [puller_of(per_timestep=0.001, target_s=1.0, device=f"cuda:{n}") for n in range(3)]
    queue = queue_of(*pullers)
    queue.put(request_of([100, 50, 50, *[10] * 10]))

    batches = [queue.take(puller) for puller in pullers]

    assert [sum(part.timesteps for part in batch.parts) for batch in batches] == [100, 100, 100]
    assert [batch.parts[0].rows for batch in batches] == [1, 2, 10]


@pytest.mark.parametrize(
    ("fixed", "timesteps", "devices"),
    [
        pytest.param(0.0, 100, ("cpu", "cpu"), id="one device"),
        pytest.param(0.0, 1, ("cuda:0", "cuda:1"), id="nothing to save"),
        pytest.param(1.0, 100, ("cuda:0", "cuda:1"), id="launches cost more"),
    ],
)
def test_batch_is_not_shared_where_that_does_not_pay(fixed, timesteps, devices):
    """One batch stays one where two would not be faster."""
    pullers = [puller_of(fixed=fixed, per_timestep=0.0005, device=d) for d in devices]
    queue = queue_of(*pullers)
    queue.put(request_of([1] * timesteps))

    assert [part.rows for part in queue.take(pullers[0]).parts] == [timesteps]


def test_busy_replicas_get_no_share():
    """A replica at work is not waited for."""
    pullers = [puller_of(per_timestep=0.001, device=f"cuda:{n}") for n in range(2)]
    queue = queue_of(*pullers)
    queue.put(request_of([1]))
    queue.take(pullers[1])
    queue.put(request_of([1] * 40))

    assert [part.rows for part in queue.take(pullers[0]).parts] == [40]


def test_long_row_goes_in_pieces_each_from_the_state_before():
    """A row of 25 in batches of 10 leaves as 10, 10 and 5, one after the other."""
    puller = puller_of(max_timesteps=10, cuts_in_time=True)
    queue = queue_of(puller)
    request, other = request_of([3, 25, 2]), request_of([4])
    queue.put(request)
    queue.put(other)
    pieces, rows = [], []
    for value in range(5):
        for part in queue.take(puller).parts:
            if part.begin or part.end:
                pieces.append((part.begin, part.timesteps, part.state))
                if not part.ends_row:
                    queue.resume(scored_piece(part, value))
            else:
                rows.append((part.request, part.first))

    assert rows == [(request, 0), (request, 2), (other, 0)]
    assert [(begin, timesteps) for begin, timesteps, _ in pieces] == [(0, 10), (10, 10), (20, 5)]
    assert pieces[0][2] is None
    np.testing.assert_array_equal(pieces[1][2], [[1, 1]])
    np.testing.assert_array_equal(pieces[2][2], [[2, 2]])
    assert queue.depth().timesteps == 0


def test_failed_piece_drops_the_rest_of_its_row():
    """What needs the state of a piece that failed is not scored, and its room is free."""
    puller = puller_of(max_timesteps=10, cuts_in_time=True)
    queue = queue_of(puller)
    queue.put(request_of([25, 3]))
    (piece,) = queue.take(puller).parts
    queue.resume(Outcome(part=piece, result=ReplicaError("broken")))

    assert [(part.first, part.timesteps) for part in queue.take(puller).parts] == [(1, 3)]
    assert queue.depth().timesteps == 0


def test_row_that_cannot_be_cut_is_a_batch_of_its_own():
    """Without a model that allows it, no row is cut in time."""
    puller = puller_of(max_timesteps=10)
    queue = queue_of(puller)
    queue.put(request_of([25]))

    assert [part.timesteps for part in queue.take(puller).parts] == [25]


def test_idle_replica_waits_for_more_only_when_asked_to():
    """With a wait, a batch starts when the wait is over or the batch is full, not before."""
    clock = FakeClock()
    puller = puller_of(per_timestep=0.01, target_s=0.05, wait_s=60.0)
    queue = RequestQueue(QueueConfig(), clock=clock)
    queue.add_puller(puller)
    batches = []
    thread = threading.Thread(target=lambda: batches.append(queue.take(puller)))
    queue.put(request_of([1], submitted_s=100.0))
    thread.start()
    queue.put(request_of([1], submitted_s=100.0))
    thread.join(timeout=0.2)
    assert thread.is_alive()
    queue.put(request_of([4], submitted_s=100.0))
    thread.join(timeout=10)

    assert [part.timesteps for part in batches[0].parts] == [1, 1]


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
