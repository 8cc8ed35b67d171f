"""How the queue shares work: among idle devices, and in time for rows longer than a batch."""

from __future__ import annotations

import numpy as np
import pytest

from qrnn_serve.core.errors import ReplicaError
from qrnn_serve.engine.request import Outcome
from support.scheduling import puller_of, queue_of, request_of, scored_piece


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
