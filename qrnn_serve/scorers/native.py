"""The native engine: our own module, with the weights of a checkpoint or an artefact."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.manifest import ArtefactKind, Manifest
from qrnn_serve.core.proof_file import ProofFile
from qrnn_serve.engine.types import ModelSchema
from qrnn_serve.model.checkpoint import describe, load, weights_sha256
from qrnn_serve.model.precision import HALF, described_model, precision_of
from qrnn_serve.model.program_weights import read_program_weights
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers.gpu import GpuScorer
from qrnn_serve.scorers.schema import read_manifest, schema_of
from qrnn_serve.scorers.torch_scorer import (
    TorchScorer,
    device_max_timesteps,
    find_device,
    numpy_dtype_name,
    scorer_on,
)
from qrnn_serve.scorers.torchscript import manifest_text, read_torchscript


def load_native(
    path: Path,
    device_name: str,
    threads: int,
    proof: ProofFile | None,
    kind: str,
    graph_bytes: int,
) -> TorchScorer | GpuScorer:
    """Load a checkpoint, or the weights in an artefact, into our own module.

    Args:
        path: The file.
        device_name: "cpu" or "cuda:N".
        threads: CPU threads, of the whole process.
        proof: The artefact's proof; None takes a file that is not proven.
        kind: What the file is: "checkpoint", "torchscript" or "pt2".
        graph_bytes: GPU memory that CUDA graphs may take.

    Raises:
        ConfigError: The device is not there.
        ArtefactError: The artefact is damaged or not one of ours.
        CheckpointError: The same of a checkpoint.
    """
    device = find_device(device_name)
    torch.set_num_threads(threads)
    model = read_model(path, device, proof, kind)
    schema = native_schema(model)
    return scorer_on(
        device,
        model.forward_packed,
        schema,
        engine="native",
        max_timesteps=device_max_timesteps(model.config, schema.dtype, device),
        threads=threads,
        graph_bytes=graph_bytes,
        weights=model.state_dict(),
    )


def read_model(
    path: Path, device: torch.device, proof: ProofFile | None, kind: str
) -> SequenceModel:
    """The module that a file holds, to serve it with.

    Args:
        path: The file.
        device: Where its weights go.
        proof: The artefact's proof; None takes a file that is not proven.
        kind: What the file is: "checkpoint", "torchscript" or "pt2".

    Raises:
        ArtefactError: The artefact is damaged or not one of ours.
        CheckpointError: The same of a checkpoint.
    """
    if kind == "checkpoint":
        model = load(path, map_location=device)
        model.float32_edges = precision_of(model) in HALF
    else:
        read = _from_torchscript if kind == "torchscript" else _from_program
        model = read(path, device, proof)
    return model.requires_grad_(False)


def describe_model(path: Path, kind: str) -> SequenceModel:
    """The module that `read_model` would give, without memory: reads no weight.

    Raises:
        ArtefactError: The artefact is damaged or not one of ours.
        CheckpointError: The same of a checkpoint.
    """
    if kind == "checkpoint":
        model = describe(path)
        model.float32_edges = precision_of(model) in HALF
        return model
    artefact: ArtefactKind = "torchscript" if kind == "torchscript" else "pt2"
    return described_model(read_manifest(manifest_text(path), path, artefact, None), path)


def native_schema(model: SequenceModel) -> ModelSchema:
    """What a module takes and gives."""
    return schema_of(
        model.config,
        dtype=numpy_dtype_name(model.edge_dtype()),
        state_size=model.state_size,
        weights_sha256=weights_sha256(model.state_dict()),
    )


def _from_torchscript(path: Path, device: torch.device, proof: ProofFile | None) -> SequenceModel:
    artefact = read_torchscript(path, device, proof)
    return _with_weights(artefact.manifest, artefact.module.state_dict(), path)


def _from_program(path: Path, device: torch.device, proof: ProofFile | None) -> SequenceModel:
    manifest = read_manifest(manifest_text(path), path, "pt2", proof)
    weights = read_program_weights(path, described_model(manifest, path))
    if weights_sha256(weights) != manifest.weights_sha256:
        raise ArtefactError(f"{path}: damaged: the weights are not those that were exported")
    return _with_weights(manifest, {k: w.to(device) for k, w in weights.items()}, path)


def _with_weights(manifest: Manifest, weights: dict[str, Tensor], path: Path) -> SequenceModel:
    model = described_model(manifest, path)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ArtefactError(f"{path}: its weights are not those of its manifest") from error
    return model
