"""Stacks that together cover every kind of layer, and random input for them."""

from __future__ import annotations

import torch

from qrnn_serve.model.config import LayerConfig, QRNNConfig

WIDE = LayerConfig(hidden_size=6, window=2)

STACKS = {
    "one": QRNNConfig(input_size=4, layers=(LayerConfig(hidden_size=4),)),
    "windows": QRNNConfig(
        input_size=3,
        layers=(
            LayerConfig(hidden_size=5, window=3),
            LayerConfig(hidden_size=6, window=2, output_gate=False),
            LayerConfig(hidden_size=4),
        ),
    ),
    "no_bias": QRNNConfig(input_size=3, layers=(WIDE, WIDE), bias=False),
    "zoneout": QRNNConfig(
        input_size=3, layers=(LayerConfig(hidden_size=6, zoneout=0.25), WIDE), dropout=0.5
    ),
    "zoneout_fastai": QRNNConfig(
        input_size=3,
        layers=(LayerConfig(hidden_size=6, zoneout=0.25),),
        zoneout_rule="fastai",
        weight_drop=0.5,
    ),
    "joined": QRNNConfig(
        input_size=3,
        layers=(LayerConfig(hidden_size=5, window=4), LayerConfig(hidden_size=2, window=3)),
        bidirectional="per_layer",
    ),
    "stacks": QRNNConfig(
        input_size=3,
        layers=(LayerConfig(hidden_size=5, window=2), LayerConfig(hidden_size=3, window=3)),
        bidirectional="stacks",
    ),
}


def random_rows(lengths, width, dtype=torch.float64):
    """One tensor [T, width] for each length, of unit scale."""
    return [torch.randn(length, width, dtype=dtype) for length in lengths]


def pad(rows, timesteps=None, fill=0.0, batch_first=False):
    """Rows [T, width] right-padded with `fill` to one tensor."""
    timesteps = max(len(row) for row in rows) if timesteps is None else timesteps
    shape = (len(rows), timesteps, *rows[0].shape[1:])
    padded = torch.full(shape, fill, dtype=rows[0].dtype, device=rows[0].device)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    return padded if batch_first else padded.transpose(0, 1)
