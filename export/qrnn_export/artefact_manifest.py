"""The manifest of an artefact: what the file is, in the words of the model it was made from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from qrnn_serve.core.config import to_mapping
from qrnn_serve.core.manifest import ArtefactKind, Manifest, TensorSpec
from qrnn_serve.model.checkpoint import weights_sha256
from qrnn_serve.model.precision import precision_of
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.model.state import state_layout

_LIBRARIES = {
    "torchscript": ("qrnn-serve", "torch"),
    "onnx": ("qrnn-serve", "torch", "onnx", "onnxruntime", "onnxruntime-gpu"),
    "pt2": ("qrnn-serve", "torch"),
    "aot": ("qrnn-serve", "torch"),
}


def make_manifest(kind: ArtefactKind, model: SequenceModel, notes: Sequence[str]) -> Manifest:
    """The manifest of one artefact, without parity yet.

    Args:
        kind: Which runtime the file is for.
        model: What is exported.
        notes: What was inferred or dropped while importing it.
    """
    config = model.config
    layout = state_layout(config.qrnn)
    dtype = str(model.edge_dtype()).removeprefix("torch.")
    rows: tuple[Any, ...] = ("batch", "time")
    values = (*rows, *config.timestep_shape)
    output_rows = rows if config.pooling == "none" else ("batch",)
    # A state has one row a sequence; an ONNX one may have a single row for all.
    state_rows = "state_batch" if kind == "onnx" else "batch"
    state_size = model.state_size
    return Manifest(
        kind=kind,
        config=to_mapping(config),
        inputs=(
            TensorSpec(name="input", dtype="int64" if config.takes_ids else dtype, shape=values),
            TensorSpec(
                name="lengths", dtype="int64", shape=("batch",), optional=kind == "torchscript"
            ),
            TensorSpec(
                name="state",
                dtype=dtype,
                shape=(state_rows, state_size),
                optional=kind in ("torchscript", "onnx"),
            ),
        ),
        outputs=(
            TensorSpec(
                name=config.output_name, dtype=dtype, shape=(*output_rows, config.output_size)
            ),
            TensorSpec(name="state_out", dtype=dtype, shape=("batch", state_size)),
        ),
        state=layout,
        weights_sha256=weights_sha256(model.state_dict()),
        versions=_versions(_LIBRARIES[kind]),
        notes=tuple(notes),
        precision=precision_of(model),
    )


def _versions(libraries: Sequence[str]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in libraries:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            # onnxruntime comes under one of two names, and a checkout need not be installed.
            continue
    return versions
