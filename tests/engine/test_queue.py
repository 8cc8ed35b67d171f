"""The bounds of the queue, what joins in a batch, and who is woken, told and forgotten."""

from __future__ import annotations

import math
import threading

import pytest

from qrnn_serve.core.errors import ConfigError, OverloadedError, UnavailableError
from qrnn_serve.engine.queue import QueueConfig, RequestQueue
from support.scheduling import FakeClock, puller_of, queue_of, request_of


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
