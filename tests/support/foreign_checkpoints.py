"""Tiny state dicts in the key layouts of other programs, and what those models must output.

The output comes from plain float64 loops over the same numbers, with nothing of the importer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qrnn_serve.model.config import LayerConfig, QRNNConfig
from support.qrnn_loop import loop_stack

VOCABULARY, EMBEDDING, HIDDEN = 23, 6, 10


@dataclass(frozen=True)
class Foreign:
    """A state dict, an input [B, T] or [B, T, I] and the output [B, T, C] in float64."""

    tensors: dict[str, torch.Tensor]
    input: torch.Tensor
    output: np.ndarray


def stack_weights(config: QRNNConfig) -> dict[str, torch.Tensor]:
    """Random weights of a stack under our names."""
    directions = ("layers", "layers_bwd")[: config.num_directions]
    weights = {}
    for number, layer in enumerate(config.layers):
        rows = layer.gates * layer.hidden_size
        columns = layer.window * config.layer_input_size(number)
        for stack in directions:
            name = f"{stack}.{number}.linear"
            weights[f"{name}.weight"] = torch.empty(rows, columns).uniform_(-0.8, 0.8)
            weights[f"{name}.bias"] = torch.empty(rows).uniform_(-0.8, 0.8)
    return weights


def run(config: QRNNConfig, weights, rows, decoder=None) -> np.ndarray:
    """Rows [B, T, I] through the stack and the decoder (weight, bias), by loops."""
    wide = {name: tensor.double().numpy() for name, tensor in weights.items()}
    hidden = np.stack([loop_stack(config, wide, row)[0] for row in rows.double().numpy()])
    if decoder is None:
        return hidden
    weight, bias = (tensor.double().numpy() for tensor in decoder)
    return hidden @ weight.T + bias


def fastai_language_model(*, bidirectional: bool, version: int = 2) -> Foreign:
    """Three levels; the last is as wide as the embedding, to which the decoder is tied."""
    per_direction = 2 if bidirectional else 1
    widths = [HIDDEN // per_direction, HIDDEN // per_direction, EMBEDDING // per_direction]
    config = QRNNConfig(
        input_size=EMBEDDING,
        layers=tuple(
            LayerConfig(hidden_size=width, window=2 if level == 0 else 1)
            for level, width in enumerate(widths)
        ),
        bidirectional="per_layer" if bidirectional else "no",
    )
    weights = stack_weights(config)
    embedding = torch.randn(VOCABULARY, EMBEDDING)
    bias = torch.randn(VOCABULARY)
    tensors = {"0.encoder.weight": embedding, "0.encoder_dp.emb.weight": embedding}
    for level in range(len(widths)):
        at = f"0.rnns.{level}.layers.0.linear"
        raw = weights[f"layers.{level}.linear.weight"]
        tensors[f"{at}.weight_raw"] = raw
        if version == 1:
            tensors[f"{at}.module.weight"] = torch.nn.functional.dropout(raw, 0.4)
        tensors[f"{at}.module.bias"] = weights[f"layers.{level}.linear.bias"]
        if bidirectional:
            back = f"0.rnns.{level}.layers_bwd.0.linear"
            for part in ("weight", "bias"):
                tensors[f"{back}.{part}"] = weights[f"layers_bwd.{level}.linear.{part}"]
    tensors |= {"1.decoder.weight": embedding, "1.decoder.bias": bias}
    ids = torch.randint(0, VOCABULARY, (3, 7))
    return Foreign(tensors, ids, run(config, weights, embedding[ids], (embedding, bias)))


def pase_encoder(timesteps: int) -> Foreign:
    """The QRNN and the convolution after it, with a convolution, a skip and a norm around them."""
    config = QRNNConfig(input_size=8, layers=(LayerConfig(hidden_size=8, window=2),))
    weights = stack_weights(config)
    convolution = torch.nn.Conv1d(8, 5, 1)
    tensors = {
        "blocks.0.conv.weight": torch.randn(8, 1, 11),
        "denseskips.0.weight": torch.randn(5, 8, 1),
        **{f"rnn.{name}": tensor for name, tensor in weights.items()},
        **{f"W.{name}": tensor for name, tensor in convolution.state_dict().items()},
        "norm_out.running_mean": torch.randn(5),
        "norm_out.num_batches_tracked": torch.tensor(7),
    }
    frames = torch.randn(2, timesteps, 8)
    head = (tensors["W.weight"].squeeze(2), tensors["W.bias"])
    return Foreign(tensors, frames, run(config, weights, frames, head))
