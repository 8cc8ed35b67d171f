"""Layouts that are recognised and refused, because SequenceModel lacks a feature that they need."""

from __future__ import annotations

import re
from collections.abc import Callable

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError


def refuse_3d_gates(tensors: Tensors) -> None:
    """Refuse gates that are three-dimensional convolutions.

    Raises:
        CheckpointError: There are some.
    """
    for name, tensor in tensors.items():
        if tensor.dim() == 5:
            raise CheckpointError(
                f"{name} is {list(tensor.shape)}: gates from three-dimensional convolutions "
                "(QRNN3D), which a QRNN layer here does not have; its gates are linear in a window "
                "of timesteps. QRNN3D also has the paper's orientation, f on the old state, which "
                "for linear gates is read with --layout paper"
            )


def _refusing(
    name: str, describes: str, matches: Callable[[Tensors], bool], missing: str
) -> Layout:
    def read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
        refuse_3d_gates(tensors)
        raise CheckpointError(f"{describes}, not supported: {missing}")

    return Layout(name, describes, matches, read)


def _any(pattern: str) -> Callable[[Tensors], bool]:
    return lambda tensors: any(re.match(pattern, name) for name in tensors)


QRNN3D = _refusing(
    "qrnn3d",
    "a QRNN3D model",
    lambda tensors: any(tensor.dim() == 5 for tensor in tensors.values()),
    "its gates are three-dimensional convolutions",
)

SPLIT_CONVOLUTIONS = _refusing(
    "sdqes",
    "an adapter of sdqes_baselines with a convolution for each gate",
    _any(r"(.*\.)?layers\.\d+\.conv1d_[zf]\."),
    "it has another activation than tanh on Z, which a QRNN layer here does not have",
)
