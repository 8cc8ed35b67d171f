"""The stages of a placed model, and how they run on CPUs: a thread each, with queues between them.

Letters: B rows, N timesteps of a batch, C output width of a stage, S columns of its state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qrnn_serve.engine.types import PackedRows
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers.pieces import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """The layers of a stage on their device.

    Attributes:
        model: They, as a model of its own.
        device: Where they are.
        columns: Their part of the whole model's state.
    """

    model: SequenceModel
    device: torch.device
    columns: slice

    def run(self, values: Tensor, offsets: Tensor, state: Tensor, piece: Piece) -> Tensor:
        """Run one piece, from and to the rows' state.

        Args:
            values: Of the piece: what the model takes, or what the stage before gave.
            offsets: Of the piece, on the device.
            state: Of all rows of the batch, [B, S]; written.
            piece: It.

        Returns:
            One vector a timestep, or one a row or part of a row.
        """
        rows = slice(piece.first_row, piece.stop_row)
        output, state[rows] = self.model.forward_packed(values, offsets, state[rows], piece.longest)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesRun:
    """What came of a batch.

    Attributes:
        output: [N, C], or [B, C].
        state: Of each stage, [B, S].
        busy_s: Seconds that each stage worked.
    """

    output: npt.NDArray[np.generic]
    state: list[npt.NDArray[np.generic]]
    busy_s: list[float]


class Stages(Protocol):
    """All stages of one model. Used by one thread at a time."""

    def run(self, rows: PackedRows, pieces: Sequence[Piece]) -> StagesRun:
        """Score a batch that was cut into these pieces.

        Raises:
            Exception: What the first stage that failed raised; none works on then.
        """
        ...

    def seconds_alone(self, rows: PackedRows, piece: Piece) -> list[float]:
        """Seconds that each stage takes for a batch of one piece, one after another."""
        ...

    def close(self) -> None:
        """Let go of the models."""
        ...


class CpuStages:
    """Stages on CPUs.

    Args:
        stages: In their order.
        threads: CPU threads of each, in the matrix products and kernels.
    """

    def __init__(self, stages: Sequence[StageModel], threads: int) -> None:
        self._stages = list(stages)
        self._threads = threads
        self._workers = ThreadPoolExecutor(len(stages), thread_name_prefix="stage")

    def run(self, rows: PackedRows, pieces: Sequence[Piece]) -> StagesRun:
        """Score a batch; with one piece there is nothing to overlap, and no thread is asked."""
        batch = _CpuBatch(self._stages, rows, pieces)
        if len(pieces) == 1:
            torch.set_num_threads(self._threads)
            for number in range(len(self._stages)):
                batch.work(number)
        else:
            numbers = range(len(self._stages))
            works = [self._workers.submit(self._work, batch, number) for number in numbers]
            errors = [work.exception() for work in works]
            if error := next(filter(None, errors), None):
                raise error
        return batch.result()

    def seconds_alone(self, rows: PackedRows, piece: Piece) -> list[float]:
        """Seconds that each stage takes for a batch of one piece, one after another."""
        return self.run(rows, [piece]).busy_s

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown()
        self._stages.clear()

    def _work(self, batch: _CpuBatch, number: int) -> None:
        # Both hold for the thread that sets them.
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            batch.work(number)


class _CpuBatch:
    """A batch on its way through the stages."""

    def __init__(
        self, stages: Sequence[StageModel], rows: PackedRows, pieces: Sequence[Piece]
    ) -> None:
        self._stages, self._pieces = stages, pieces
        # torch has no read-only tensors, so what lies in a message is copied once.
        values = torch.from_numpy(np.require(rows.values, requirements=["C", "W"]))
        self._offsets = [torch.from_numpy(piece.offsets) for piece in pieces]
        self._states = [torch.from_numpy(state_of(stage, rows)) for stage in stages]
        # What each stage takes, and at the end what the last one gives; None after a failure.
        self._between: list[SimpleQueue[Tensor | None]] = [SimpleQueue() for _ in stages]
        for piece in pieces:
            self._between[0].put(values[piece.start : piece.stop])
        self._outputs: list[Tensor] = []
        self._failed = False
        self._busy_s = [0.0] * len(stages)

    def work(self, number: int) -> None:
        """One stage's part in all pieces."""
        stage, is_last = self._stages[number], number == len(self._stages) - 1
        try:
            for piece, offsets in zip(self._pieces, self._offsets, strict=True):
                values = self._between[number].get()
                if values is None or self._failed:
                    break
                started_s = time.perf_counter()
                output = stage.run(values, offsets, self._states[number], piece)
                self._busy_s[number] += time.perf_counter() - started_s
                if is_last:
                    self._outputs.append(output)
                else:
                    self._between[number + 1].put(output)
        except BaseException:
            self._failed = True
            raise
        finally:
            if not is_last:
                self._between[number + 1].put(None)

    def result(self) -> StagesRun:
        """What came of it."""
        per_timestep = self._stages[-1].model.config.pooling == "none"
        outputs = self._outputs
        if not per_timestep:
            # A row that goes on in the next piece has its output there.
            outputs = [o[: p.ended_rows] for o, p in zip(outputs, self._pieces, strict=True)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return StagesRun(
            output=output.numpy(),
            state=[state.numpy() for state in self._states],
            busy_s=self._busy_s,
        )


def state_of(stage: StageModel, rows: PackedRows) -> npt.NDArray[np.generic]:
    """A copy of the stage's columns of the state, or zeros."""
    if rows.state is not None:
        return np.array(rows.state[:, stage.columns], order="C")
    dtype = str(stage.model.edge_dtype()).removeprefix("torch.")
    return np.zeros((rows.rows, stage.model.state_size), dtype)
