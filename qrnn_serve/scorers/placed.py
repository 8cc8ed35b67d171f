"""A scorer whose layers lie on several devices: one thread owns all of them.

A batch is cut into pieces, so that each device works on another one at the same time; how many
follows from times that are measured when the model is loaded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.proof_file import ProofFile
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageFacts, StageTimes
from qrnn_serve.engine.warm_up import example_rows
from qrnn_serve.model.parts import can_be_cut, part, weight_bytes
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers import memory
from qrnn_serve.scorers.costs import stage_bytes_per_timestep
from qrnn_serve.scorers.native import native_schema, read_model
from qrnn_serve.scorers.out_of_memory import memory_errors
from qrnn_serve.scorers.peer_copy import broken_pairs
from qrnn_serve.scorers.pieces import PieceTimes, cut_pieces
from qrnn_serve.scorers.placement import Stage, check_stages
from qrnn_serve.scorers.stages import CpuStages, StageModel
from qrnn_serve.scorers.stages_cuda import CudaStages
from qrnn_serve.scorers.torch_scorer import find_device, free_bytes, numpy_dtype_name

logger = logging.getLogger(__name__)

_SMALLEST_PIECE = 64
_LARGEST_PIECE = 16384
_ENOUGH_S = 0.03
"""Pieces are measured up to the size that takes that long, two sizes at least."""
_REPEATS = 3


class PlacedScorer:
    """A Scorer over stages of one model.

    Args:
        stages: Each on its device.
        layers: Which layers each has, for people.
        schema: What the whole model takes and gives.
        threads: CPU threads of a stage.
        max_timesteps: Most timesteps of one batch.
    """

    def __init__(
        self,
        stages: Sequence[StageModel],
        layers: Sequence[Stage],
        schema: ModelSchema,
        *,
        threads: int,
        max_timesteps: int,
    ) -> None:
        devices = [stage.device for stage in stages]
        broken = broken_pairs(pairwise(devices)) if devices[0].type == "cuda" else set()
        self._stages = (
            CudaStages(stages, broken) if devices[0].type == "cuda" else CpuStages(stages, threads)
        )
        # An error may come up on any of them; its message names all.
        self.device = "+".join(map(str, devices))
        self.schema = schema
        self.engine = "native"
        self.max_timesteps = max_timesteps
        self.alive = True
        self.stages = tuple(
            StageFacts(
                device=str(stage.device),
                layers=f"{placed.first}-{placed.last}",
                weight_bytes=weight_bytes(stage.model),
                copies_by_host=pair in broken,
            )
            for stage, placed, pair in zip(
                stages, layers, [(None, None), *pairwise(devices)], strict=True
            )
        )
        self._closed = False
        self._times = self._measured()

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: A device has no room for the batch.
        """
        return self.score_in(rows, self.pieces_for(rows))

    def pieces_for(self, rows: PackedRows) -> int:
        """About how many pieces `score` cuts these rows into."""
        longest = 0 if self.schema.cuts_in_time else int(np.max(rows.lengths, initial=0))
        return self._times.best_count(rows.timesteps, longest)

    def score_in(self, rows: PackedRows, count: int) -> ScoredRows:
        """The same in about `count` pieces; 1 is each stage after the other."""
        if self._closed:
            raise RuntimeError("a closed scorer was used. This is a bug.")
        started_s = time.monotonic()
        pieces = cut_pieces(_offsets(rows), count, in_time=self.schema.cuts_in_time)
        with torch.inference_mode(), memory_errors(self.device):
            run = self._stages.run(rows, pieces)
        self.stages = tuple(
            replace(stage, busy_s=stage.busy_s + busy_s)
            for stage, busy_s in zip(self.stages, run.busy_s, strict=True)
        )
        state = np.concatenate(run.state, axis=1)
        # Copies and stages overlap, so their times are not told apart.
        times = StageTimes(compute_s=time.monotonic() - started_s)
        return ScoredRows(output=run.output, state=state, times=times)

    def interrupt(self) -> bool:
        """A thread in native code cannot be ended."""
        return False

    def close(self) -> None:
        """Let go of the model and give its devices' memory back."""
        self._closed = True
        self._stages.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _measured(self) -> PieceTimes:
        """How long pieces of growing size take in each stage, and whether overlapping them pays."""
        sizes, seconds, launches = [], [], []
        with torch.inference_mode(), memory_errors(self.device):
            for size in _piece_sizes(min(self.max_timesteps, _LARGEST_PIECE)):
                rows = example_rows(self.schema, [size], with_state=True)
                whole = cut_pieces(_offsets(rows), 1, in_time=False)[0]
                self._stages.seconds_alone(rows, whole)
                # The fastest: what else the machine does must not decide how batches are cut.
                runs = [self._stages.seconds_alone(rows, whole) for _ in range(_REPEATS)]
                sizes.append(size)
                seconds.append([min(times) for times in zip(*runs, strict=True)])
                if isinstance(self._stages, CudaStages):
                    launches.append(self._stages.launch_seconds(rows, whole))
                if len(sizes) > 1 and sum(seconds[-1]) > _ENOUGH_S:
                    break
        alone = PieceTimes(
            sizes=np.array(sizes),
            seconds=np.array(seconds).T,
            # Of the smallest piece: starting larger ones may wait for a full queue.
            launch_s=launches[0] if launches else 0.0,
        )
        times = self._with_slowdown(alone, 2 * sizes[-1])
        logger.info(
            "stages devices=%s piece_timesteps=%d stage_s=%s launch_s=%.3g slowdown=%.3g",
            self.device,
            sizes[-1],
            " ".join(f"{second:.3g}" for second in seconds[-1]),
            times.launch_s,
            times.slowdown,
        )
        return times

    def _with_slowdown(self, alone: PieceTimes, timesteps: int) -> PieceTimes:
        """The times corrected by one batch that overlaps."""
        lengths = [_SMALLEST_PIECE] * max(timesteps // _SMALLEST_PIECE, 1)
        count = alone.best_count(sum(lengths), 0)
        if count == 1 or sum(lengths) > self.max_timesteps:
            return alone
        rows = example_rows(self.schema, lengths, with_state=True)
        taken: list[float] = []
        for _ in range(_REPEATS + 1):
            started_s = time.perf_counter()
            self.score_in(rows, count)
            taken.append(time.perf_counter() - started_s)
        predicted = float(alone.predicted(sum(lengths), 0, np.array([count]))[0])
        return PieceTimes(
            sizes=alone.sizes,
            seconds=alone.seconds,
            launch_s=alone.launch_s,
            slowdown=max(min(taken[1:]) / predicted, 1.0),
        )


def load_placed(
    path: Path,
    stages: Sequence[Stage],
    threads: int,
    proof: ProofFile | None,
    kind: str,
) -> PlacedScorer:
    """Load a model and put its layers where a plan says.

    Args:
        path: A checkpoint, or an artefact whose weights our own module can take.
        stages: The plan.
        threads: CPU threads of each stage.
        proof: The artefact's proof; None takes a file that is not proven.
        kind: What the file is: "checkpoint", "torchscript" or "pt2".

    Raises:
        ConfigError: A device is not there, or the stages do not have every layer once.
        ArtefactError: The artefact is damaged or not one of ours.
        CheckpointError: The same of a checkpoint.
        MemoryError: A device has no room for its stage.
    """
    model = read_model(path, torch.device("cpu"), proof, kind)
    return place(model, stages, threads)


def place(model: SequenceModel, stages: Sequence[Stage], threads: int) -> PlacedScorer:
    """Put the layers of a model in CPU memory where a plan says.

    Raises:
        ConfigError: A device is not there, or the stages do not have every layer once.
        MemoryError: A device has no room for its stage.
    """
    if len(stages) > 1 and not can_be_cut(model.config):
        raise ConfigError(
            "placement: the two directions of this model run through all layers before they are "
            "joined, so its layers cannot be placed on several devices; use --placement replicate"
        )
    check_stages(tuple(stages), len(model.config.qrnn.layers), "placement")
    schema = native_schema(model)
    placed: list[StageModel] = []
    column = 0
    for stage in stages:
        device = find_device(stage.device)
        with memory_errors(str(device)):
            on_device = part(model, stage.first, stage.last + 1).to(device)
        columns = slice(column, column + on_device.state_size)
        column = columns.stop
        placed.append(StageModel(model=on_device, device=device, columns=columns))
    return PlacedScorer(
        placed,
        stages,
        schema,
        threads=threads,
        max_timesteps=_max_timesteps(placed),
    )


def _max_timesteps(stages: Sequence[StageModel]) -> int:
    """The most timesteps of one batch that the free memory of every device holds now."""
    each: Counter[torch.device] = Counter()
    for stage in stages:
        dtype = numpy_dtype_name(stage.model.edge_dtype())
        each[stage.device] += stage_bytes_per_timestep(stage.model.config, dtype)
    return min(memory.timesteps_in(free_bytes(device), nbytes) for device, nbytes in each.items())


def _piece_sizes(largest: int) -> list[int]:
    sizes = [min(_SMALLEST_PIECE, largest)]
    while sizes[-1] < largest:
        sizes.append(min(4 * sizes[-1], largest))
    return sizes


def _offsets(rows: PackedRows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    offsets = np.zeros(rows.rows + 1, np.int64)
    np.cumsum(rows.lengths, out=offsets[1:])
    return offsets
