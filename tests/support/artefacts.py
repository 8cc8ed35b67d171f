"""Small models as every kind of file that can be served, and what they must score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import qrnn_export
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.model.checkpoint import save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel
from support.qrnn_loop import loop_stack, weights_of

LAYERS = (LayerConfig(hidden_size=12, window=2), LayerConfig(hidden_size=7, output_gate=False))
CONFIGS = {
    "ids": SequenceModelConfig(
        qrnn=QRNNConfig(input_size=6, layers=LAYERS),
        vocabulary_size=10,
        padding_id=1,
        pooling="last_max_mean",
        head_size=3,
    ),
    "features": SequenceModelConfig(
        qrnn=QRNNConfig(input_size=5, layers=LAYERS, bidirectional="per_layer"),
        pooling="none",
        head_size=4,
    ),
    "causal": SequenceModelConfig(
        qrnn=QRNNConfig(input_size=5, layers=(LayerConfig(hidden_size=9, window=3), *LAYERS)),
        pooling="none",
    ),
    "sums of ids": SequenceModelConfig(
        qrnn=QRNNConfig(input_size=6, layers=LAYERS),
        vocabulary_size=9,
        padding_id=0,
        ids_per_timestep=3,
        pooling="last",
        head_hidden_sizes=(5,),
        head_size=2,
        output_activation="sigmoid",
    ),
}
SUFFIXES = {"native": ".pt", "torchscript": ".ts.pt", "onnx": ".onnx"}
ENGINES = tuple(SUFFIXES)


@dataclass(frozen=True)
class Artefacts:
    """One model and its files.

    Attributes:
        model: The module, float32.
        paths: Engine to file.
    """

    model: SequenceModel
    paths: dict[str, Path]


def write_artefacts(model: SequenceModel, directory: Path) -> Artefacts:
    """The checkpoint and both exports of a model, in a new folder."""
    directory.mkdir()
    path = directory / "model.pt"
    save(model.eval(), path)
    qrnn_export.export(path)
    return Artefacts(model, {engine: directory / f"model{s}" for engine, s in SUFFIXES.items()})


def shared_artefacts(tmp_path_factory, name: str) -> Artefacts:
    """The files of the model of that name in CONFIGS, written once a test session."""
    directory = tmp_path_factory.getbasetemp() / f"artefacts_{name}"
    model = random_model(name)
    if directory.exists():
        paths = {engine: directory / f"model{s}" for engine, s in SUFFIXES.items()}
        return Artefacts(model, paths)
    return write_artefacts(model, directory)


def random_model(name: str) -> SequenceModel:
    """The model of that configuration with random weights, the same at every call."""
    torch.manual_seed(1611)
    model = SequenceModel(CONFIGS[name])
    # Embeddings start from a normal distribution with a zero row; gates from a narrow range.
    with torch.no_grad():
        for parameter in model.qrnn.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model.eval()


def random_rows(config: SequenceModelConfig, lengths, *, seed=0) -> list[np.ndarray]:
    """Rows that the model takes, one array each."""
    random = np.random.default_rng(seed)
    shapes = [(t, *config.timestep_shape) for t in lengths]
    if config.takes_ids:
        return [random.integers(0, config.vocabulary_size, shape) for shape in shapes]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def packed(rows, state=None) -> PackedRows:
    """Arrays, one a row, as the engine passes them on: read-only."""
    values = np.concatenate(rows)
    values.flags.writeable = False
    return PackedRows(
        values=values, lengths=np.array([len(row) for row in rows], np.int64), state=state
    )


def scores_by_hand(model: SequenceModel, rows) -> np.ndarray:
    """The output for each row in float64 from plain loops, laid end to end."""
    config, weights = model.config, weights_of(model)
    stack = {k.removeprefix("qrnn."): w for k, w in weights.items() if k.startswith("qrnn.")}
    outputs = []
    for row in rows:
        steps = weights["embedding.weight"][row] if config.takes_ids else row.astype(np.float64)
        if config.ids_per_timestep > 1:
            steps = (steps * (row != config.padding_id)[..., None]).sum(axis=1)
        hidden, _ = loop_stack(config.qrnn, stack, steps)
        if config.pooling == "last":
            hidden = hidden[-1:]
        if config.pooling == "last_max_mean":
            hidden = np.concatenate([hidden[-1], hidden.max(axis=0), hidden.mean(axis=0)])[None]
        for layer in range(len(config.head_hidden_sizes)):
            linear = [weights[f"head_hidden.{layer}.{part}"] for part in ("weight", "bias")]
            hidden = np.maximum(hidden @ linear[0].T + linear[1], 0)
        if config.head_size is not None:
            hidden = hidden @ weights["head.weight"].T + weights["head.bias"]
        if config.output_activation == "sigmoid":
            hidden = 1 / (1 + np.exp(-hidden))
        outputs.append(hidden)
    return np.concatenate(outputs)
