"""From a file and a device to a scorer. Imports no engine before it is needed."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.manifest import MANIFEST_KEY
from qrnn_serve.core.proof_file import ProofFile, read_proof
from qrnn_serve.engine.types import Scorer
from qrnn_serve.scorers.placement import Stage

logger = logging.getLogger(__name__)

DEFAULT_GRAPH_MEMORY_MB = 256

Engine = Literal["native", "torchscript", "onnx"]
FileKind = Literal["checkpoint", "torchscript", "onnx", "pt2"]

_ENGINES: dict[FileKind, tuple[Engine, ...]] = {
    "checkpoint": ("native",),
    "torchscript": ("torchscript", "native"),
    "onnx": ("onnx",),
    # torch.export.load would run what the file holds; its weights are enough for our own module.
    "pt2": ("native",),
}
_EXPECTED = (
    "a checkpoint of qrnn_serve.save (.pt, .safetensors) or a file of qrnn-export (.ts.pt, .onnx, "
    ".pt2)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """What a replica loads: the arguments of `load_scorer`, as they go to its process."""

    path: str
    device: str = "cpu"
    engine: Engine | None = None
    threads: int | None = None
    allow_unproven: bool = False
    stages: tuple[Stage, ...] = ()
    """Where the layers are placed; `device` is then that of the first. Empty: all on `device`."""
    graph_memory_mb: int = DEFAULT_GRAPH_MEMORY_MB


def load_checked(spec: ScorerSpec) -> Scorer:
    """Load a model to serve with, and prove the kernels on its device before they score anything.

    Raises:
        KernelError: The kernels on the device are missing or give wrong numbers.
        Exception: What `load_scorer` raises.
    """
    if spec.device != "cpu":
        import torch

        from qrnn_serve.scorers.torch_scorer import find_device

        # What names no device takes the current one, and would take memory on the first GPU.
        torch.cuda.set_device(find_device(spec.device))
    scorer = load_scorer(
        spec.path,
        spec.device,
        spec.engine,
        threads=spec.threads,
        allow_unproven=spec.allow_unproven,
        stages=spec.stages,
        graph_memory_mb=spec.graph_memory_mb,
    )
    # The kernels import torch, which takes seconds.
    from qrnn_serve.kernels import self_check

    for device in {stage.device for stage in scorer.stages} or {scorer.device}:
        self_check(device)
    return scorer


def load_scorer(
    path: str | Path,
    device: str = "cpu",
    engine: Engine | None = None,
    *,
    threads: int | None = None,
    allow_unproven: bool = False,
    stages: Sequence[Stage] = (),
    graph_memory_mb: int = DEFAULT_GRAPH_MEMORY_MB,
) -> Scorer:
    """Load a model to score with.

    Args:
        path: A checkpoint of ours, or a file that qrnn-export wrote.
        device: "cpu", or a GPU such as "cuda:0".
        engine: How it runs; None is what the file is for. A TorchScript file also runs natively, a
            torch.export file only so.
        threads: CPU threads of the model; None for one a core that this process may use.
        allow_unproven: Load a file of qrnn-export whose proof is missing or of another file.
        stages: Where the layers are placed, in place of `device`; `threads` is then of each.
        graph_memory_mb: Memory of a GPU, in MiB, that CUDA graphs of small batches may take; 0 for
            no graphs. ONNX Runtime has none.

    Raises:
        ConfigError: The device is not there, or the engine does not run that file or there.
        ArtefactError: The file is missing, damaged, not one of ours or not proven.
        CheckpointError: The same of a checkpoint; UntrustedFileError when it could run code.
        KernelError: The C library of the kernels is missing.
    """
    path = Path(path)
    kind = file_kind(path)
    chosen = engine or _ENGINES[kind][0]
    if chosen not in _ENGINES[kind]:
        raise ConfigError(
            f"engine {chosen!r} does not run {path}, a {kind} file; "
            f"expected {' or '.join(_ENGINES[kind])}"
        )
    threads = threads or len(os.sched_getaffinity(0))
    proof = None
    if allow_unproven:
        logger.warning("%s is loaded without its proof, as was asked", path)
    elif kind != "checkpoint":
        proof = _proof(path)
    if stages:
        if chosen != "native" and (engine is not None or "native" not in _ENGINES[kind]):
            raise ConfigError(
                f"placement: layers are placed by the native engine, which does not run {path}, "
                f"a {kind} file with engine {chosen!r}; serve the checkpoint, a .ts.pt or a .pt2 "
                "file, or use --placement replicate"
            )
        from qrnn_serve.scorers.placed import load_placed

        return load_placed(path, stages, threads, proof, kind)
    graph_bytes = graph_memory_mb << 20
    # Each engine needs another large library, which may not be installed.
    if chosen == "onnx":
        from qrnn_serve.scorers.onnx import load_onnx

        return load_onnx(path, device, threads, proof)
    if chosen == "torchscript":
        from qrnn_serve.scorers.torchscript import load_torchscript

        return load_torchscript(path, device, threads, proof, graph_bytes)
    from qrnn_serve.scorers.native import load_native

    return load_native(path, device, threads, proof, kind, graph_bytes)


def _proof(path: Path) -> ProofFile:
    try:
        return read_proof(path)
    except ArtefactError as error:
        raise ArtefactError(
            f"{error}. To serve it all the same: --allow-unproven, or allow_unproven=True"
        ) from error


def file_kind(path: Path) -> FileKind:
    """What a model file is, by its content; only .onnx, which has no mark, by its name.

    Raises:
        ArtefactError: It is missing, not a file, or none of the kinds that can be served.
    """
    if path.is_dir():
        raise ArtefactError(f"{path}: expected {_EXPECTED}, got a folder")
    if not path.is_file():
        raise ArtefactError(f"{path}: no such file")
    if path.name.endswith(".stages.json"):
        raise ArtefactError(
            f"{path}: says how the parts of a model that qrnn-export --stages cut belong together; "
            "to serve the model over several devices, serve the checkpoint, a .ts.pt or a .pt2 "
            "file of the whole with --placement layers"
        )
    if path.suffix == ".onnx":
        return "onnx"
    if path.name.endswith(".aot.pt2"):
        raise ArtefactError(
            f"{path}: machine code for programs of your own; to serve the model, use the .pt2, "
            ".ts.pt or .onnx file, or the checkpoint"
        )
    if path.suffix == ".pt2":
        return "pt2"
    if path.suffix == ".safetensors":
        return "checkpoint"
    if path.suffix != ".pt":
        raise ArtefactError(f"{path}: expected {_EXPECTED}")
    if not path.name.endswith(".ts.pt") and not _is_torchscript(path):
        return "checkpoint"
    return "torchscript"


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        # The reader of checkpoints says what is wrong with it.
        return False
    return any(name.endswith(f"/extra/{MANIFEST_KEY}") or "/code/" in name for name in names)
