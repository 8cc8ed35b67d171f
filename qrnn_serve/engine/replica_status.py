"""What a replica tells of itself: how it is, and what its batches cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qrnn_serve.engine.cost_model import CostTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCost:
    """What a replica's cost model says now.

    Attributes:
        device: Where the replica runs.
        terms: Of the predicted seconds of a batch.
        budget_s: Seconds that a batch should take.
        budget_timesteps: Timesteps of such a batch, of rows of 64 timesteps.
        graphs: CUDA graphs that it had after its last batch.
    """

    device: str
    terms: CostTerms
    budget_s: float
    budget_timesteps: int
    graphs: int


class ReplicaState(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """How a replica is.

    Attributes:
        device: Where it runs, or ran last; "" before its model was loaded for the first time.
        state: Starting again after a failure counts as starting.
        restarts: How often it was started again.
        last_error: What it failed of last; "" if it never did.
    """

    device: str
    state: ReplicaState
    restarts: int
    last_error: str
