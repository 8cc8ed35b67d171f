"""The models and the rows of benchmarks/scale.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from qrnn_serve import SequenceModel, save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig

VOCABULARY = 1000

Ids = np.ndarray
"""Token ids of one row, [T] int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: a model, how it is placed, and what one caller sends.

    Attributes:
        name: For people.
        placement: As `qrnn-serve --placement` takes it.
        hidden: Width of the layers.
        layers: How many.
        lengths: Timesteps from the first number to the last, drawn evenly, a row.
        rows: Rows of a call.
        callers: Callers that each send call after call.
        calls: Calls of each caller that are timed.
    """

    name: str
    placement: Literal["replicate", "layers"]
    hidden: int
    layers: int
    lengths: tuple[int, int]
    rows: int
    callers: int
    calls: int

    def batch(self, seed: int) -> list[Ids]:
        """The rows of one call."""
        random = np.random.default_rng(seed)
        lengths = random.integers(*self.lengths, size=self.rows, endpoint=True)
        return [random.integers(VOCABULARY, size=length) for length in lengths]

    def save_model(self, folder: Path) -> Path:
        """A seeded model of token ids, so that the wire carries 8 bytes a timestep."""
        import torch

        torch.manual_seed(0)
        layers = tuple(LayerConfig(hidden_size=self.hidden) for _ in range(self.layers))
        config = SequenceModelConfig(
            qrnn=QRNNConfig(input_size=self.hidden, layers=layers),
            vocabulary_size=VOCABULARY,
            pooling="last",
            head_size=16,
        )
        path = folder / f"{self.layers}x{self.hidden}.pt"
        if not path.exists():
            save(SequenceModel(config), path)
        return path


def cases(size: Literal["full", "small"]) -> list[Case]:
    """The table for GPUs, or one that a CPU runs in a minute."""
    small = size == "small"
    replicated = {
        "placement": "replicate",
        "hidden": 64 if small else 1024,
        "layers": 3,
        "rows": 32 if small else 128,
        "calls": 5 if small else 20,
    }
    placed = {
        "placement": "layers",
        "hidden": 64 if small else 4096,
        "layers": 8,
        "calls": 3 if small else 5,
    }
    long = 4096 if small else 65_536
    return [
        Case(name="equal lengths", lengths=(500, 500), callers=8, **replicated),
        Case(name="uneven lengths", lengths=(1, 1000), callers=8, **replicated),
        Case(name="one long sequence", lengths=(long, long), rows=1, callers=1, **placed),
        Case(name="a full queue", lengths=(long // 64, long // 16), rows=8, callers=8, **placed),
    ]
