"""What a layout is: how one program names and shapes the tensors of its QRNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from qrnn_export.options import ImportHints
from qrnn_serve.model.config import SequenceModelConfig

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ImportedWeights:
    """A foreign checkpoint in our terms.

    Attributes:
        config: What the model computes.
        tensors: State dict of a SequenceModel with that config.
        notes: What was inferred, dropped or taken from a flag, for people and for the manifest.
    """

    config: SequenceModelConfig
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which tensors are named.

    Attributes:
        name: What --layout takes.
        describes: Whose files they are, for messages.
        matches: True when the names of the tensors are of this layout.
        read: Turns tensors and hints into our weights. Raises AmbiguousCheckpointError for every
            fact that is missing at once, CheckpointError when the tensors do not fit.
    """

    name: str
    describes: str
    matches: Callable[[Tensors], bool]
    read: Callable[[Tensors, ImportHints], ImportedWeights]
