"""Tiny state dicts in the key layouts of other programs, and what those models must output.

The output comes from plain float64 loops over the same numbers, with nothing of the importer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from qrnn_serve.model.config import LayerConfig, QRNNConfig
from support.qrnn_loop import loop_stack

VOCABULARY, EMBEDDING, HIDDEN = 23, 6, 10


@dataclass(frozen=True)
class Foreign:
    """A state dict, an input of B rows, T timesteps and the output in float64."""

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


def fastai_classifier(*, version: int, hidden: tuple[int, ...] = (8,), dropout=0.1) -> Foreign:
    """The language model's encoder, pooled, with batch norms, hidden layers and 3 classes."""
    language_model = fastai_language_model(bidirectional=False, version=version)
    encoder = {k: t for k, t in language_model.tensors.items() if k.startswith("0.")}
    weights = {
        f"layers.{level}.linear.{part}": encoder[f"0.rnns.{level}.layers.0.linear.{name}"]
        for level in range(3)
        for part, name in (("weight", "weight_raw"), ("bias", "module.bias"))
    }
    layers = (LayerConfig(hidden_size=HIDDEN, window=2), LayerConfig(hidden_size=HIDDEN))
    config = QRNNConfig(input_size=EMBEDDING, layers=(*layers, LayerConfig(hidden_size=EMBEDDING)))
    ids = language_model.input
    states = run(config, weights, encoder["0.encoder.weight"][ids])
    output = np.concatenate([states[:, -1], states.max(1), states.mean(1)], axis=1)
    tensors, widths = (
        {f"0.module.{k[2:]}": t for k, t in encoder.items()},
        (3 * EMBEDDING, *hidden, 3),
    )
    place = 0
    for number, (reads, gives) in enumerate(pairwise(widths)):
        norm = [torch.randn(reads), torch.randn(reads), torch.randn(reads), torch.rand(reads) + 0.2]
        linear = torch.nn.Linear(reads, gives, bias=version == 1)
        parts = 1 + (dropout > 0)
        at = (
            [f"{place}", f"{place + parts}"]
            if version == 1
            else [f"{number}.0", f"{number}.{parts}"]
        )
        place += parts + 2
        names = ("weight", "bias", "running_mean", "running_var")
        tensors |= {f"1.layers.{at[0]}.{k}": t for k, t in zip(names, norm, strict=True)}
        tensors[f"1.layers.{at[0]}.num_batches_tracked"] = torch.tensor(9)
        tensors |= {f"1.layers.{at[1]}.{k}": t.detach() for k, t in linear.state_dict().items()}
        gain, bias, mean, variance = (t.double().numpy() for t in norm)
        output = (output - mean) / np.sqrt(variance + 1e-5) * gain + bias
        output = output @ linear.weight.detach().double().numpy().T
        if version == 1:
            output = output + linear.bias.detach().double().numpy()
        output = np.maximum(output, 0) if number < len(widths) - 2 else output
    return Foreign(tensors, ids, output)


def pqrnn_classifier() -> Foreign:
    """Projections beyond -1 and 1, two QRNN layers, a mean, and ReLU before each linear layer."""
    config = QRNNConfig(
        input_size=8, layers=(LayerConfig(hidden_size=5), LayerConfig(hidden_size=5))
    )
    weights, head = stack_weights(config), [torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)]
    tensors = {f"hidden.{name}": tensor for name, tensor in weights.items()}
    projection = 2 * torch.randn(3, 7, 8)
    output = run(config, weights, projection.clamp(-1, 1)).mean(1)
    for place, linear in zip((1, 3), head, strict=True):
        weight, bias = (t.detach() for t in (linear.weight, linear.bias))
        tensors |= {f"output.{place}.weight": weight, f"output.{place}.bias": bias}
        output = np.maximum(output, 0) @ weight.double().numpy().T + bias.double().numpy()
    return Foreign(tensors, projection, output)


def health_records(*, fill_is_zero: bool = True) -> Foreign:
    """Two QRNN layers on sums of 4 codes a visit, of which code 0 only fills; one probability."""
    layers = (LayerConfig(hidden_size=5), LayerConfig(hidden_size=7))
    config = QRNNConfig(input_size=EMBEDDING, layers=layers)
    weights = stack_weights(config)
    embedding = torch.randn(VOCABULARY, EMBEDDING)
    embedding[0] *= not fill_is_zero
    out = torch.nn.Linear(7, 1)
    tensors = {
        "embed.weight": embedding,
        **{f"rnn_c.{name}": tensor for name, tensor in weights.items()},
        **{f"out.{name}": tensor for name, tensor in out.state_dict().items()},
    }
    codes = torch.randint(1, VOCABULARY, (3, 6, 4))
    codes[torch.rand(codes.shape) < 0.4] = 0
    visits = (embedding.double()[codes] * (codes != 0).unsqueeze(-1)).sum(2).numpy()
    wide = {name: tensor.double().numpy() for name, tensor in weights.items()}
    cells = np.stack([loop_stack(config, wide, row)[1][1, 0][0] for row in visits])
    logits = cells @ out.weight.detach().double().numpy().T + out.bias.detach().double().numpy()
    return Foreign(tensors, codes, 1 / (1 + np.exp(-logits)))


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
