"""Requests, replicas and a clock for tests of the queue without threads."""

from __future__ import annotations

import asyncio

import numpy as np

from qrnn_serve.engine.batch import BatchLimits, Puller
from qrnn_serve.engine.cost_model import CostModel, CostTerms
from qrnn_serve.engine.queue import QueueConfig, RequestQueue
from qrnn_serve.engine.request import Outcome, Request
from qrnn_serve.engine.types import ScoredRows
from support.scorers import whole_number_rows

LOOP = asyncio.new_event_loop()


class FakeClock:
    """A clock that a test sets."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def request_of(lengths, *, submitted_s=0.0, deadline_s=None):
    """A request of whole numbers with those row lengths."""
    rows = whole_number_rows(lengths)
    return Request(rows, LOOP.create_future(), submitted_s=submitted_s, deadline_s=deadline_s)


def puller_of(*, per_timestep=0.0, fixed=0.0, device="cpu", cuts_in_time=False, **limits):
    """A replica with that cost of a batch; without one, every batch takes no time."""
    terms = CostTerms(fixed=fixed, per_timestep=per_timestep, per_longest=0.0, per_row=0.0)
    return Puller(
        device=device,
        limits=BatchLimits(**limits),
        cost=CostModel(terms),
        cuts_in_time=cuts_in_time,
    )


def rows_of(parts):
    """(request, row) of each row, and of each piece, in order."""
    return [(part.request, row) for part in parts for row in range(part.first, part.last)]


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
