"""Says what a model file holds: names and shapes, what they tell, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qrnn_export.importer import import_saved, is_ours
from qrnn_export.layouts.registry import find_layout
from qrnn_export.onnx_file import read_manifest as read_onnx_manifest
from qrnn_export.options import ImportHints
from qrnn_export.payload import find_payload
from qrnn_export.source_file import is_torchscript, read_file
from qrnn_serve.core.config import to_mapping
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest
from qrnn_serve.model.checkpoint import load


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file holds.

    Attributes:
        kind: What the file is, in words.
        tensors: Name, shape and dtype of each tensor.
        config: The model's configuration, as far as it is known.
        notes: What was inferred, and from what.
        missing: What must be said by flags before it can be exported; "" when nothing.
    """

    kind: str
    tensors: tuple[tuple[str, str, str], ...] = ()
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    missing: str = ""


def inspect_file(path: Path, hints: ImportHints, *, trust_pickle: bool) -> Inspection:
    """Look into a checkpoint or an artefact.

    Args:
        path: The file.
        hints: Facts that the file does not hold, as for an export.
        trust_pickle: Unpickle the file even if that runs code.

    Raises:
        CheckpointError: It cannot be read at all, or holds no model.
        ArtefactError: It is an artefact with a damaged manifest.
    """
    if path.suffix == ".onnx" and path.is_file():
        return _of_manifest("ONNX artefact", read_onnx_manifest(path))
    if is_torchscript(path):
        extra = {MANIFEST_KEY: ""}
        torch.jit.load(str(path), map_location="cpu", _extra_files=extra)
        return _of_manifest(
            "TorchScript artefact", Manifest.from_json(extra[MANIFEST_KEY], path.name)
        )
    saved = read_file(path, trust_pickle=trust_pickle)
    if is_ours(path, saved):
        model = load(path)
        return Inspection(
            "checkpoint of qrnn_serve.save",
            _listed(model.state_dict()),
            to_mapping(model.config),
        )
    return _of_foreign(saved, hints)


def _of_manifest(kind: str, manifest: Manifest) -> Inspection:
    tensors = tuple(
        (f"{side} {spec.name}", str(list(spec.shape)), spec.dtype)
        for side, specs in (("input", manifest.inputs), ("output", manifest.outputs))
        for spec in specs
    )
    worst = max(manifest.parity.values(), default=0.0)
    checked = f"{len(manifest.parity)} checks, largest difference from the module {worst:.2g}"
    made_with = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return Inspection(
        kind,
        tensors,
        manifest.config,
        (*manifest.notes, checked, f"made with {made_with}"),
    )


def _of_foreign(saved: Any, hints: ImportHints) -> Inspection:
    notes: list[str] = []
    payload = find_payload(saved, notes)
    tensors = payload.state_dict() if isinstance(payload, nn.Module) else payload
    try:
        imported = import_saved(payload, hints)
    except CheckpointError as error:
        return Inspection(_kind(tensors, hints), _listed(tensors), None, tuple(notes), str(error))
    return Inspection(
        _kind(tensors, hints),
        _listed(tensors),
        to_mapping(imported.model.config),
        (*notes, *imported.notes),
    )


def _kind(tensors: dict[str, Tensor], hints: ImportHints) -> str:
    try:
        layout = find_layout(tensors, hints.layout)
    except CheckpointError:
        return "tensors of no known layout"
    return f"layout {layout.name!r}: {layout.describes}"


def _listed(tensors: dict[str, Tensor]) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
