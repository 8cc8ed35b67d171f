"""Writes a model repository for Triton: a folder for each model, and how to run it.

    NAME_onnx/          config.pbtxt, 1/model.onnx: the artefact itself, and our operators
    NAME_onnx_stream/   the same graph, whose state must be given, which Triton then carries
    NAME_torchscript/   1/model.pt: scripted without our operators, all arguments tensors
    NAME_torchscript_stream/

The files that are not the proven artefacts are compared with the module here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from qrnn_export.cases import Array, Case, Point, random_batch
from qrnn_export.errors import ParityError
from qrnn_export.importer import ImportedModel
from qrnn_export.measure import compare
from qrnn_export.options import Format
from qrnn_export.proof import Proof, answering, tolerance_of
from qrnn_export.torchscript_file import script, write_torchscript
from qrnn_export.triton_config import config_text
from qrnn_export.triton_modules import Scoring, Streaming
from qrnn_export.triton_readme import readme_text
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.kernels.library import native_library
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel

MOUNT = "/models"
"""Where the server sees the repository; README.md mounts it there."""

_BACKENDS: dict[Format, str] = {"onnx": "onnxruntime", "torchscript": "pytorch"}
_POINTS = (Point(4, 1, uneven=False, with_state=True), Point(9, 3, uneven=True, with_state=True))


class Artefact(Protocol):
    """A proven artefact: its file, its external data, and what it says about itself."""

    path: Path
    beside: list[Path]
    manifest: Manifest


def model_names(stem: str, formats: tuple[Format, ...], config: SequenceModelConfig) -> list[str]:
    """The models of a repository, one folder each."""
    endings = ("", "_stream") if can_stream(config) else ("",)
    return [f"{stem}_{name}{ending}" for name in formats for ending in endings]


def can_stream(config: SequenceModelConfig) -> bool:
    """Whether chunks of a row, with the state between them, are scored like the whole row.

    A backward direction starts at the row's end, and a mean or maximum is over the whole row.
    """
    return config.qrnn.num_directions == 1 and config.pooling in ("none", "last")


def write_repository(
    directory: Path, stem: str, imported: ImportedModel, artefacts: Mapping[Format, Artefact]
) -> None:
    """Write the models and README.md.

    Args:
        directory: An empty folder.
        stem: What the models' names begin with.
        imported: The module.
        artefacts: Made from it.

    Raises:
        ParityError: A file does not give the module's numbers.
        OSError: The folder cannot be written to, or is full.
    """
    for name, artefact in artefacts.items():
        for stream in (False, True)[: 1 + can_stream(imported.model.config)]:
            folder = directory / f"{stem}_{name}{'_stream' if stream else ''}"
            (folder / "1").mkdir(parents=True)
            library = None
            if name == "onnx":
                library = f"{MOUNT}/{folder.name}/{native_library().name}"
                shutil.copy(native_library(), folder)
                _write_onnx(folder / "1" / "model.onnx", artefact, imported, stream=stream)
            else:
                _write_torchscript(folder / "1" / "model.pt", artefact, imported, stream=stream)
            text = config_text(
                folder.name, _BACKENDS[name], artefact.manifest, stream=stream, library=library
            )
            (folder / "config.pbtxt").write_text(text)
    names = model_names(stem, tuple(artefacts), imported.model.config)
    manifest = next(iter(artefacts.values())).manifest
    (directory / "README.md").write_text(readme_text(names, manifest, _example(imported.model)))


def _write_onnx(path: Path, artefact: Artefact, imported: ImportedModel, *, stream: bool) -> None:
    for file in artefact.beside:
        shutil.copy(file, path.parent)
    if not stream:
        shutil.copy(artefact.path, path)
        return
    model = onnx.load_model(str(artefact.path), load_external_data=False)
    # A value for `state` would make it an optional input.
    values = model.graph.initializer
    del values[next(n for n, tensor in enumerate(values) if tensor.name == "state")]
    path.write_bytes(model.SerializeToString(deterministic=True))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(native_library()))
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    _check(imported.model, path, lambda case: session.run(None, _feed(case)))


def _write_torchscript(
    path: Path, artefact: Artefact, imported: ImportedModel, *, stream: bool
) -> None:
    module: nn.Module = (Streaming if stream else Scoring)(imported.model)
    write_torchscript(script(module, portable=True), path, artefact.manifest)
    loaded = torch.jit.load(str(path))

    def run(case: Case) -> list[Array]:
        given = [torch.from_numpy(array) for array in _feed(case).values()]
        with torch.inference_mode():
            return [tensor.numpy() for tensor in loaded(*given[: 2 + stream])]

    _check(imported.model, path, run, with_state=stream)


def _feed(case: Case) -> dict[str, Array]:
    rows, timesteps = case.input.shape[:2]
    lengths = np.full(rows, timesteps, np.int64) if case.lengths is None else case.lengths
    feed: dict[str, Array] = {"input": case.input, "lengths": lengths}
    return feed if case.state is None else {**feed, "state": case.state}


def _check(
    model: SequenceModel, path: Path, run: Callable[[Case], Any], *, with_state: bool = True
) -> None:
    place = f"{path.parent.parent.name}/{path.name}"
    measured = []
    dtype = np.dtype(str(model.edge_dtype()).removeprefix("torch."))
    for point in _POINTS:
        case = random_batch(model.config, model.state_size, point, dtype)
        if not with_state:
            case = Case(case.name, case.input, case.lengths, None, case.output, case.state_out)
        case = answering(model)(case)
        pairs = zip(run(case), (case.output, case.state_out), strict=True)
        measured.append(
            compare((place, "as Triton calls it", case.name), list(pairs), case.relative_scale)
        )
    proof = Proof(tuple(measured), tolerance_of(model))
    if failures := proof.failures():
        raise ParityError(f"{place} does not give the module's numbers: {failures[0]}", proof)


def _example(model: SequenceModel) -> str:
    """The tensors of a request of one row of two timesteps, as JSON."""
    config = model.config
    shape = [1, 2, *config.timestep_shape]
    values = [0] * int(np.prod(shape))
    datatype = "INT64" if config.takes_ids else "FP32"
    if model.qrnn.layers[0].linear.weight.dtype == torch.float64 and not config.takes_ids:
        datatype = "FP64"
    tensors = [
        {"name": "input", "shape": shape, "datatype": datatype, "data": values},
        {"name": "lengths", "shape": [1, 1], "datatype": "INT64", "data": [2]},
    ]
    return json.dumps({"inputs": tensors})
