"""Models to export, and the two ONNX sessions and the scripted module made from one."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from qrnn_export.importer import ImportedModel
from qrnn_export.options import ExportOptions
from qrnn_export.writers import WRITERS
from qrnn_serve import SequenceModel, onnx_ops_library
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.stacks import STACKS

TINY_STACK = QRNNConfig(
    input_size=5,
    layers=(LayerConfig(hidden_size=7, window=3), LayerConfig(hidden_size=6, output_gate=False)),
    bidirectional="per_layer",
)

MODELS = {
    **{f"stack {name}": SequenceModelConfig(qrnn=stack) for name, stack in STACKS.items()},
    "ids, every pooling, head": SequenceModelConfig(
        qrnn=TINY_STACK, vocabulary_size=11, padding_id=0, pooling="last_max_mean", head_size=3
    ),
    "head at every timestep": SequenceModelConfig(qrnn=STACKS["windows"], head_size=3),
    "head without bias": SequenceModelConfig(
        qrnn=STACKS["one"], pooling="mean", head_size=2, head_bias=False
    ),
    "last of one direction": SequenceModelConfig(qrnn=STACKS["windows"], pooling="last"),
    "last of two directions": SequenceModelConfig(qrnn=STACKS["stacks"], pooling="last"),
    "max": SequenceModelConfig(qrnn=STACKS["joined"], pooling="max"),
    "sums of ids, hidden layers, sigmoid": SequenceModelConfig(
        qrnn=TINY_STACK,
        vocabulary_size=9,
        padding_id=2,
        ids_per_timestep=4,
        pooling="max",
        head_hidden_sizes=(5, 4),
        head_size=2,
        output_activation="sigmoid",
    ),
    "sums of ids without padding": SequenceModelConfig(
        qrnn=TINY_STACK, vocabulary_size=5, ids_per_timestep=2, input_activation="hardtanh"
    ),
    "activations around a head at every timestep": SequenceModelConfig(
        qrnn=STACKS["windows"],
        input_activation="hardtanh",
        pooled_activation="relu",
        head_hidden_sizes=(3,),
        head_size=2,
        output_activation="sigmoid",
    ),
    "activation without head": SequenceModelConfig(qrnn=STACKS["one"], output_activation="sigmoid"),
}


def make_model(config: SequenceModelConfig, dtype=torch.float32) -> SequenceModel:
    """A model with weights that are not small, so that every gate and every path matters."""
    model = SequenceModel(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.8, 0.8)
    return model.eval()


def write(model: SequenceModel, directory: Path, *formats: str, **options) -> list[Path]:
    """Write artefacts without the proof."""
    imported = ImportedModel(model, ())
    return [
        WRITERS[f](imported, directory / f"model{WRITERS[f].suffix}", ExportOptions(**options)).path
        for f in formats
    ]


def session(
    model: Path | bytes, *, library: bool, threads: int = 1
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session on the CPU, with or without our operators."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(onnx_ops_library())
    source = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@dataclasses.dataclass(frozen=True)
class Batch:
    """input [B, T, I] or [B, T], lengths [B] and state [B, S] or None, as tensors."""

    input: torch.Tensor
    lengths: torch.Tensor
    state: torch.Tensor | None

    def feed(self) -> dict[str, np.ndarray]:
        """The same for ONNX Runtime."""
        given = {"input": self.input, "lengths": self.lengths, "state": self.state}
        return {name: tensor.numpy() for name, tensor in given.items() if tensor is not None}


def random_batch(
    model: SequenceModel, lengths: list[int], timesteps: int, *, with_state: bool, fill=None
) -> Batch:
    """Random rows of the given lengths, padded with NaN (or ids below 0), or with `fill`."""
    config = model.config
    shape = (len(lengths), timesteps, *config.timestep_shape)
    dtype = model.qrnn.layers[0].linear.weight.dtype
    if config.takes_ids:
        values = torch.randint(0, config.vocabulary_size, shape)
    else:
        values = torch.randn(*shape, dtype=dtype)
    padded = torch.arange(timesteps) >= torch.tensor(lengths).reshape(-1, 1)
    values[padded] = (-1 if config.takes_ids else float("nan")) if fill is None else fill
    state = torch.randn(len(lengths), model.state_size, dtype=dtype) if with_state else None
    return Batch(values, torch.tensor(lengths, dtype=torch.int64), state)


@functools.cache
def reference_model(name: str) -> SequenceModel:
    """The named model in float64, made once."""
    torch.manual_seed(1611)
    return make_model(MODELS[name], torch.float64)
