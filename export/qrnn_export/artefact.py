"""Reads an artefact back into a module: what its manifest describes, with the weights it holds."""

from __future__ import annotations

import zipfile
from pathlib import Path

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from torch import Tensor

from qrnn_export.archive_file import manifest_in
from qrnn_export.onnx_file import manifest_of
from qrnn_export.onnx_layers import weight_name
from qrnn_export.source_file import is_torchscript
from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest
from qrnn_serve.model.checkpoint import weights_sha256
from qrnn_serve.model.precision import described_model
from qrnn_serve.model.program_weights import read_program_weights
from qrnn_serve.model.sequence_model import SequenceModel


def read_artefact(path: Path) -> tuple[Manifest, SequenceModel]:
    """The manifest of an artefact, and the module with the weights that it holds.

    Raises:
        ArtefactError: It is missing, damaged, not of qrnn-export, or its weights are not those that
            were exported.
    """
    if not path.is_file():
        raise ArtefactError(f"{path}: no such file")
    if path.suffix == ".onnx":
        manifest, weights = _read_onnx(path)
    elif path.name.endswith(".aot.pt2"):
        raise ArtefactError(
            f"{path}: machine code, which runs as soon as it is loaded and holds no weights that "
            "can be read; verify the .pt2 file that is made beside it"
        )
    elif path.suffix == ".pt2":
        manifest, weights = _read_program(path)
    elif is_torchscript(path):
        manifest, weights = _read_torchscript(path)
    else:
        raise ArtefactError(
            f"{path}: expected a file of qrnn-export: .ts.pt, .onnx, .pt2, or .stages.json"
        )
    try:
        model = described_model(manifest, path)
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ArtefactError(
            f"{path}: its weights are not those of its manifest: {error}"
        ) from error
    if weights_sha256(model.state_dict()) != manifest.weights_sha256:
        raise ArtefactError(f"{path}: damaged: the weights are not those that were exported")
    return manifest, model.eval().requires_grad_(False)


def _read_program(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    try:
        manifest = manifest_in(path)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ArtefactError(f"{path}: damaged, or not written by qrnn-export: {error}") from error
    return manifest, read_program_weights(path, described_model(manifest, path))


def _read_torchscript(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    extra = {MANIFEST_KEY: ""}
    try:
        module = torch.jit.load(str(path), map_location="cpu", _extra_files=extra)
    except (RuntimeError, ValueError) as error:
        raise ArtefactError(f"{path}: damaged or truncated: {error}") from error
    if not extra[MANIFEST_KEY]:
        raise ArtefactError(f"{path}: a TorchScript file that qrnn-export did not write")
    return Manifest.from_json(extra[MANIFEST_KEY], path.name), dict(module.state_dict())


def _read_onnx(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    try:
        graph = onnx.load_model(str(path))
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ArtefactError(
            f"{path}: damaged, or without the weights beside it: {error}"
        ) from error
    manifest = manifest_of(graph, path)
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    weights: dict[str, Tensor] = {}
    for name in described_model(manifest, path).state_dict():
        stored = constants.get(weight_name(name))
        if stored is None:
            raise ArtefactError(f"{path}: the graph has no weight {weight_name(name)}")
        values = torch.from_numpy(numpy_helper.to_array(stored).copy())
        # The graph multiplies from the right.
        transposed = name.endswith(".weight") and name != "embedding.weight"
        weights[name] = values.T.contiguous() if transposed else values
    return manifest, weights
