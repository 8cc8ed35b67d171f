"""Writes an ONNX model to a file, with its weights beside it when they would not fit in."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import helper

from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest

NOTICE = (
    "For speed, register our operators with ONNX Runtime: "
    "options.register_custom_ops_library(qrnn_serve.onnx_ops_library()). Without them any ONNX "
    "Runtime gives the same scores, but slowly: one loop iteration a timestep."
)
"""Said once for each export."""


def weights_beside(path: Path, digest: str) -> Path:
    """Where the weights of a large model go: a file beside it.

    Its name holds a part of the weights' hash, so that a model and the weights of another export
    never meet, even when a process is killed between writing the two.

    Args:
        path: The model's.
        digest: Hash of the weights.
    """
    return path.with_name(f"{path.stem}.{digest[:12]}.onnx.data")


def write_onnx(model: onnx.ModelProto, path: Path, manifest: Manifest) -> None:
    """Write the model with its manifest as metadata; equal models give equal bytes."""
    helper.set_model_props(model, {MANIFEST_KEY: manifest.to_json()})
    path.write_bytes(model.SerializeToString(deterministic=True))


def check_onnx(path: Path) -> None:
    """Let onnx check the written file: every operator, and the shape of every tensor.

    Raises:
        ArtefactError: It is not valid. This is a bug of the exporter.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ArtefactError(
            f"{path.name}: onnx finds it invalid: {error}. This is a bug."
        ) from error


def read_manifest(path: Path) -> Manifest:
    """The manifest in an ONNX file; its weights are not read.

    Raises:
        ArtefactError: The file is not ONNX, or has no manifest of ours.
    """
    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except DecodeError as error:
        raise ArtefactError(f"{path}: not an ONNX file, or cut off ({error})") from error
    return manifest_of(model, path)


def manifest_of(model: onnx.ModelProto, path: Path) -> Manifest:
    """The manifest in a model that was read from `path`.

    Raises:
        ArtefactError: It has none of ours.
    """
    entries = {entry.key: entry.value for entry in model.metadata_props}
    if MANIFEST_KEY not in entries:
        raise ArtefactError(f"{path}: an ONNX file that qrnn-export did not write (no manifest)")
    return Manifest.from_json(entries[MANIFEST_KEY], path.name)


def external_files(path: Path) -> list[Path]:
    """The files beside an ONNX file that hold its weights; none when it is not ONNX."""
    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except DecodeError:
        return []
    names = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [path.parent / name for name in sorted(names)]
