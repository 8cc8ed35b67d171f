"""The model, the calls, and what the model says of them in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qrnn_export import ExportOptions, export
from qrnn_serve import SequenceModel, save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from serving_load import Inputs
from serving_wire import CLASSES

WIDTH = 256
_DIFFERENT_CALLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        name: For people.
        lengths: Timesteps of the sequences of each different call.
        rows: Sequences of a call.
        callers: How many send at once.
    """

    name: str
    lengths: tuple[int, ...]
    rows: int
    callers: int


def _one(timesteps: int, callers: int) -> Case:
    return Case(
        name=f"T {timesteps}, {callers} caller{'s' if callers > 1 else ''}",
        lengths=(timesteps,) * _DIFFERENT_CALLS,
        rows=1,
        callers=callers,
    )


def _many(rows: int, callers: int) -> Case:
    return Case(
        name=f"{rows} sequences a call, T 32, {callers} callers",
        lengths=(32,) * 2,
        rows=rows,
        callers=callers,
    )


CASES = (
    *(_one(timesteps, callers) for timesteps in (32, 128) for callers in (1, 8, 64)),
    Case(
        name="T 1 to 256, 64 callers",
        # Every fourth length; the order is mixed, the same in each run.
        lengths=tuple(np.random.default_rng(0).permutation(np.linspace(1, 256, 64, dtype=int))),
        rows=1,
        callers=64,
    ),
    _many(128, 4),
    _many(1024, 2),
)


def make_model(folder: Path) -> tuple[SequenceModel, Path]:
    """A seeded model of two layers of 256, and its TorchScript file."""
    torch.manual_seed(0)
    config = SequenceModelConfig(
        qrnn=QRNNConfig(input_size=WIDTH, layers=(LayerConfig(hidden_size=256),) * 2),
        pooling="mean",
        head_size=CLASSES,
    )
    model = SequenceModel(config).eval()
    save(model, folder / "model.pt")
    export(folder / "model.pt", folder, ExportOptions(formats=("torchscript",)))
    return model, folder / "model.ts.pt"


def inputs_of(model: SequenceModel, lengths: tuple[int, ...], rows: int) -> Inputs:
    """Seeded sequences, one call for each length, and the eager model's scores."""
    random = np.random.default_rng(0)
    values = [random.standard_normal((rows, length, WIDTH), np.float32) for length in lengths]
    with torch.inference_mode():
        scores = [model(torch.from_numpy(array))[0].numpy() for array in values]
    return Inputs(values=values, scores=scores)
