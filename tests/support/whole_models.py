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

MODELS |= {
    "windows-last-sums_of_ids-hidden_head": SequenceModelConfig(
        qrnn=STACKS["windows"],
        vocabulary_size=7,
        padding_id=2,
        ids_per_timestep=3,
        pooling="last",
        head_hidden_sizes=(5, 4),
        head_size=2,
        output_activation="sigmoid",
    ),
    "joined-none-features-activations": SequenceModelConfig(
        qrnn=STACKS["joined"],
        input_activation="hardtanh",
        pooled_activation="relu",
        head_hidden_sizes=(4,),
        head_size=2,
        head_bias=False,
        output_activation="sigmoid",
    ),
}


def random_input(config, lengths, dtype=torch.float32):
    """Rows as a list: ids [T] or [T, K], or features [T, I], of each length."""
    shapes = [(length, *config.timestep_shape) for length in lengths]
    if config.takes_ids:
        return [torch.randint(0, config.vocabulary_size, shape) for shape in shapes]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def offsets_of(rows):
    """[B + 1] int64."""
    return torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
