"""What a layout is: how one program names and shapes the tensors of its QRNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError
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
        matches: True when names and shapes show this layout; at most one of all should say so.
            A caller who names the layout is believed: then only `read` is called.
        read: Turns tensors and hints into our weights. Raises AmbiguousCheckpointError for every
            fact that is missing at once, CheckpointError when the tensors do not fit.
    """

    name: str
    describes: str
    matches: Callable[[Tensors], bool]
    read: Callable[[Tensors, ImportHints], ImportedWeights]


def refuse_unknown(layout: str, names: Sequence[str]) -> None:
    """Refuse tensors that a layout does not know: leaving one out might change scores.

    Raises:
        CheckpointError: There are some.
    """
    if names:
        raise CheckpointError(
            f"not names of the layout {layout!r}: {some(names)}. If they do not belong to the "
            "model, save it without them"
        )


def some(names: Sequence[str], limit: int = 8) -> str:
    """The first few names, and how many there are."""
    shown = ", ".join(names[:limit])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else shown
