"""Recognises the weights of a loss that splits its vocabulary: they are not part of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qrnn_export.layouts.base import Tensors

_TAIL = re.compile(r"(^|\.)(tail_vectors|tail_bias|tail\.\d+\.\d+\.weight)$")


def is_tail_weight(name: str) -> bool:
    """Whether it is a split cross entropy's (awd-lstm-lm) or an adaptive softmax's (torch)."""
    return _TAIL.search(name) is not None


def note_on_loss(where: str, tensors: Tensors) -> Iterable[str]:
    """One line on the weights of a loss that are left out, or none."""
    found = [f"{name} {list(t.shape)}" for name, t in tensors.items() if is_tail_weight(name)]
    if found:
        yield (
            f"left out of the {where}: {', '.join(found)}, weights of a loss that splits the "
            "vocabulary. The logits are the decoder's and agree; a plain softmax over them is not "
            "the probability that was trained, which needs the splits and these weights too"
        )
