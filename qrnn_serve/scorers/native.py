"""The native engine: our own module, with the weights of a checkpoint or a TorchScript file."""

from __future__ import annotations

from pathlib import Path

import torch

from qrnn_serve.core.proof_file import ProofFile
from qrnn_serve.engine.types import ModelSchema
from qrnn_serve.model.checkpoint import load, weights_sha256
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers.schema import schema_of
from qrnn_serve.scorers.torch_scorer import (
    TorchScorer,
    device_max_timesteps,
    find_device,
    multiplications_of,
    numpy_dtype_name,
)
from qrnn_serve.scorers.torchscript import read_torchscript


def load_native(
    path: Path, device_name: str, threads: int, proof: ProofFile | None, *, scripted: bool
) -> TorchScorer:
    """Load a checkpoint, or the weights in a TorchScript file, into our own module.

    Args:
        path: The file.
        device_name: "cpu" or "cuda:N".
        threads: CPU threads, of the whole process.
        proof: The TorchScript file's proof; None takes a file that is not proven.
        scripted: True when the file is a TorchScript file of qrnn-export.

    Raises:
        ConfigError: The device is not there.
        ArtefactError: The TorchScript file is damaged or not one of ours.
        CheckpointError: The same of a checkpoint.
    """
    device = find_device(device_name)
    torch.set_num_threads(threads)
    model = _from_torchscript(path, device, proof) if scripted else load(path, map_location=device)
    model.requires_grad_(False)
    schema = native_schema(model)
    return TorchScorer(
        model.forward_packed,
        schema,
        device=device,
        engine="native",
        max_timesteps=device_max_timesteps(model.config, schema.dtype, device),
        threads=threads,
        multiplications=multiplications_of(model.state_dict()),
    )


def native_schema(model: SequenceModel) -> ModelSchema:
    """What a module takes and gives."""
    weights = model.state_dict()
    return schema_of(
        model.config,
        dtype=numpy_dtype_name(next(iter(weights.values())).dtype),
        state_size=model.state_size,
        weights_sha256=weights_sha256(weights),
    )


def _from_torchscript(path: Path, device: torch.device, proof: ProofFile | None) -> SequenceModel:
    artefact = read_torchscript(path, device, proof)
    dtype = getattr(torch, artefact.schema.dtype)
    model = SequenceModel(artefact.config, device=device, dtype=dtype)
    model.load_state_dict(artefact.module.state_dict())
    return model.eval()
