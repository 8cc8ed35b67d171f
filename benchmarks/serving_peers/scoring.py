"""What every peer runs: the TorchScript file of the benchmark on sequences laid end to end.

Peers get the export's packed entry and its kernels, so that a row compares servers, not models.
The environment says which file: QRNN_MODEL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

import qrnn_serve.kernels.ops  # noqa: F401  registers the operators that the file calls

WIDTH = 256
MAX_ROWS = 32
"""Calls of one sequence in a batch, at most."""
MAX_CALL_ROWS = 1024
"""Sequences of one call, at most."""


class Model:
    """Scores lists of arrays [B, T, WIDTH], each of its own B and T."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._forward = torch.jit.load(os.environ["QRNN_MODEL"]).forward_packed
        self.score([np.zeros((1, 32, WIDTH), np.float32)])

    def score(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Float32 [B, C] for each input."""
        lengths = [length for array in inputs for length in [array.shape[1]] * len(array)]
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lengths), 0, out=offsets[1:])
        values = np.concatenate([array.reshape(-1, array.shape[-1]) for array in inputs])
        # As the server of this project does: the profiling executor holds up calls of new shapes.
        with torch.inference_mode(), torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
            output, _ = self._forward(torch.from_numpy(values), offsets)
        ends = np.cumsum([len(array) for array in inputs])[:-1]
        return np.split(output.numpy(), ends)
