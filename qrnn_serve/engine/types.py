"""What travels between the server, the queue, the replicas and the scorers. Knows no QRNN, no gRPC.

Letters: B rows (sequences), N timesteps of all rows together, I input width, C output width,
S state width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qrnn_serve.core.errors import ReplicaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSchema:
    """What a model takes and gives, for validation on the host before anything reaches a device.

    Attributes:
        takes_ids: True for token ids, [N] or [N, I], False for features [N, I].
        input_size: I; 0 for ids, one a timestep.
        vocabulary_size: Ids must be below it; 0 for features.
        dtype: numpy name of the features and outputs, for example "float32".
        output_name: "logits" or "output".
        output_size: C.
        output_per_timestep: True for output [N, C], False for [B, C].
        state_size: S, the width of one row's carried state.
        weights_sha256: Identity of the weights.
        cuts_in_time: Whether a row may be scored in pieces, each from the state after the one
            before: the model reads in one direction and an output sees one timestep's state.
    """

    takes_ids: bool
    input_size: int
    vocabulary_size: int
    dtype: str
    output_name: str
    output_size: int
    output_per_timestep: bool
    state_size: int
    weights_sha256: str
    cuts_in_time: bool = False

    @property
    def timestep_shape(self) -> tuple[int, ...]:
        """Shape of one timestep of input: () or (I,)."""
        return (self.input_size,) if self.input_size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Valid rows laid end to end.

    Attributes:
        values: [N, I] of the schema's dtype, or int64 ids, [N] or [N, I]. Read-only.
        lengths: [B] int64, each at least 1, summing to N.
        state: [B, S] of the schema's dtype, or None when every row starts fresh.
    """

    values: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]
    state: npt.NDArray[np.generic] | None = None

    @property
    def rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def timesteps(self) -> int:
        """N."""
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the time of a batch went, in seconds.

    Attributes:
        upload_s: Until the rows are on the device: joining them and every copy on the way.
        compute_s: The model itself.
        download_s: From there until the caller's thread has the answers.
    """

    upload_s: float = 0.0
    compute_s: float = 0.0
    download_s: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        """The times of both."""
        return StageTimes(
            upload_s=self.upload_s + other.upload_s,
            compute_s=self.compute_s + other.compute_s,
            download_s=self.download_s + other.download_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The answers for the rows of one PackedRows, in its order.

    Attributes:
        output: [B, C], or [N, C] for a model with one vector a timestep.
        state: [B, S], the state after each row's last timestep.
        padded_timesteps: Timesteps of padding computed beside the rows' own; 0 when packed.
        times: Where the scorer's time went.
        graphs: CUDA graphs that the scorer has now.
        replayed: 1 when the batch was the replay of one.
    """

    output: npt.NDArray[np.generic]
    state: npt.NDArray[np.generic]
    padded_timesteps: int = 0
    times: StageTimes = StageTimes()
    graphs: int = 0
    replayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A part of a model that is placed on several devices.

    Attributes:
        device: Where it is.
        layers: Which part, for people: "0-3".
        weight_bytes: Size of its weights.
        copies_by_host: Whether what it takes comes through the host's memory, since direct copies
            to its device deliver other data than was sent.
        busy_s: Seconds that it has worked since it was loaded.
    """

    device: str
    layers: str
    weight_bytes: int
    copies_by_host: bool = False
    busy_s: float = 0.0


class ScorerDeadError(ReplicaError):
    """The scorer fails on everything, or its process ended."""


class Scorer(Protocol):
    """A loaded model on one device, or placed on a group. Used by one thread at a time."""

    @property
    def schema(self) -> ModelSchema:
        """What the model takes and gives."""
        ...

    @property
    def device(self) -> str:
        """Where it really runs, for example "cpu", "cuda:0" or, placed, "cuda:0+cuda:1"."""
        ...

    @property
    def stages(self) -> tuple[StageFacts, ...]:
        """The parts of a placed model in their order; empty for a model on one device."""
        ...

    @property
    def engine(self) -> str:
        """How it runs: "native", "torchscript" or "onnx"."""
        ...

    @property
    def alive(self) -> bool:
        """False once it will never score again, as far as that can be told without a batch."""
        ...

    @property
    def max_timesteps(self) -> int:
        """The most timesteps of one batch, and so of one row, that its memory holds."""
        ...

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: The device has no room for the batch; a smaller one may fit.
            ScorerDeadError: It will never score again.
        """
        ...

    def interrupt(self) -> bool:
        """Make a `score` that hangs in another thread raise ScorerDeadError.

        Returns:
            False where that cannot be done: a thread cannot be killed, a process can.
        """
        ...

    def close(self) -> None:
        """Give back the device's memory."""
        ...


ScorerLoader = Callable[[], Scorer]
"""Loads the model on one device. Called in the thread that will use the scorer, at the start and
again after a scorer died; raises what keeps it from serving."""
