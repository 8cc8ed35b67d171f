"""The TorchScript engine: a scripted SequenceModel that qrnn-export wrote."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import qrnn_serve.kernels.ops  # noqa: F401  registers the operators that the scripted model calls
from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest
from qrnn_serve.core.proof_file import ProofFile
from qrnn_serve.engine.types import ModelSchema
from qrnn_serve.model.checkpoint import weights_sha256
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.scorers.gpu import GpuScorer
from qrnn_serve.scorers.schema import manifest_config, manifest_schema, read_manifest
from qrnn_serve.scorers.torch_scorer import (
    TorchScorer,
    device_max_timesteps,
    find_device,
    scorer_on,
)

_MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchScriptArtefact:
    """What a TorchScript file holds, checked against its manifest."""

    module: torch.jit.ScriptModule
    config: SequenceModelConfig
    schema: ModelSchema
    manifest: Manifest


def load_torchscript(
    path: Path, device_name: str, threads: int, proof: ProofFile | None, graph_bytes: int
) -> TorchScorer | GpuScorer:
    """Load a TorchScript file of qrnn-export.

    Args:
        path: The file.
        device_name: "cpu" or "cuda:N".
        threads: CPU threads, of the whole process.
        proof: The file's proof; None takes a file that is not proven.
        graph_bytes: GPU memory that CUDA graphs may take.

    Raises:
        ConfigError: The device is not there.
        ArtefactError: The file is damaged or not one of ours.
    """
    device = find_device(device_name)
    torch.set_num_threads(threads)
    artefact = read_torchscript(path, device, proof)
    forward_packed = artefact.module.forward_packed

    def forward(
        values: Tensor, offsets: Tensor, state: Tensor | None, longest: int
    ) -> tuple[Tensor, Tensor]:
        # The profiling executor specialises on the first shapes and again on new ones, and holds up
        # those calls. The model is a few large operators: there is nothing to gain from it.
        with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]  (documented by torch)
            return forward_packed(values, offsets, state)

    return scorer_on(
        device,
        forward,
        artefact.schema,
        engine="torchscript",
        max_timesteps=device_max_timesteps(
            artefact.config, artefact.schema.dtype, device, portable=artefact.manifest.portable
        ),
        threads=threads,
        graph_bytes=graph_bytes,
        weights=artefact.module.state_dict(),
    )


def read_torchscript(
    path: Path, device: torch.device, proof: ProofFile | None
) -> TorchScriptArtefact:
    """Read a TorchScript file and compare it with its manifest. Runs none of its code.

    Raises:
        ArtefactError: It is damaged, was not written by qrnn-export, or its weights are not those
            that were exported.
    """
    manifest = read_manifest(manifest_text(path), path, "torchscript", proof)
    schema = manifest_schema(manifest, path)
    try:
        module = torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError) as error:
        raise ArtefactError(f"{path}: damaged or truncated: {_first_line(error)}") from error
    module.eval()
    if not hasattr(module, "forward_packed"):
        raise ArtefactError(f"{path}: has no forward_packed; export it again with qrnn-export")
    if weights_sha256(module.state_dict()) != manifest.weights_sha256:
        raise ArtefactError(f"{path}: damaged: the weights are not those that were exported")
    config = manifest_config(manifest, path)
    return TorchScriptArtefact(module=module, config=config, schema=schema, manifest=manifest)


def manifest_text(path: Path) -> bytes | None:
    """The manifest in a TorchScript or torch.export file; None when it has none.

    Raises:
        ArtefactError: The file is damaged, or the manifest too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(f"/extra/{MANIFEST_KEY}"):
                    if entry.file_size > _MAX_MANIFEST_BYTES:
                        raise ArtefactError(
                            f"{path}: its manifest of {entry.file_size} bytes is larger than any "
                            f"that qrnn-export writes ({_MAX_MANIFEST_BYTES})"
                        )
                    return archive.read(entry)
    except (zipfile.BadZipFile, OSError) as error:
        raise ArtefactError(
            f"{path}: damaged or truncated, or not a file of torch: {error}"
        ) from error
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
