"""Whole models of every kind, and padded and packed input for them."""

from __future__ import annotations

import torch

from qrnn_serve.model.config import SequenceModelConfig
from support.stacks import STACKS

POOLINGS = ["none", "last", "mean", "max", "last_max_mean"]

MODELS = {
    f"{stack}-{pooling}-{'ids' if ids else 'features'}-{'head' if head else 'no_head'}": (
        SequenceModelConfig(
            qrnn=STACKS[stack],
            vocabulary_size=11 if ids else None,
            padding_id=0 if ids and head else None,
            pooling=pooling,
            head_size=3 if head else None,
            head_bias=stack != "no_bias",
        )
    )
    for stack, pooling, ids, head in [
        ("windows", "none", False, True),
        ("windows", "last_max_mean", True, True),
        ("no_bias", "max", False, True),
        ("joined", "last", False, False),
        ("joined", "mean", True, False),
        ("stacks", "none", True, False),
        ("stacks", "last_max_mean", False, True),
        ("zoneout", "mean", False, True),
    ]
}


def random_input(config, lengths, dtype=torch.float32):
    """Rows as a list: ids [T] or features [T, I] of each length."""
    if config.takes_ids:
        return [torch.randint(0, config.vocabulary_size, (length,)) for length in lengths]
    return [torch.randn(length, config.qrnn.input_size, dtype=dtype) for length in lengths]


def offsets_of(rows):
    """[B + 1] int64."""
    return torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
