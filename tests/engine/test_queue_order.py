"""The order of the queue: due times, deadlines, and how much a batch takes by its cost."""

from __future__ import annotations

import pytest

from qrnn_serve.core.errors import OverloadedError
from qrnn_serve.engine.queue import STRETCH
from support.scheduling import FakeClock, puller_of, queue_of, request_of


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
