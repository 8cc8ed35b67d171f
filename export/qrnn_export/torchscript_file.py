"""Writes a SequenceModel as a TorchScript file: scripted, not traced, so any T and B run.

The file calls the operators qrnn::*, so the process that loads it must `import qrnn_serve.kernels`,
or load the library of `ops_library`; a portable file calls torch's own, and any libtorch loads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import nn

from qrnn_export.archive_file import drop_entries, set_manifest, write_archive
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.model.layer import QRNNLayer

_DEPRECATED = (
    "PyTorch has deprecated TorchScript and may not keep it for new versions of Python. The file "
    "was checked with the torch and Python named in its manifest; for new deployments prefer ONNX. "
)
NOTICE = _DEPRECATED + (
    "A Python process that loads it must `import qrnn_serve.kernels` first, a C++ program load the "
    "library of `qrnn-export ops-library`."
)
"""Said once for each export; torch's own warnings on the subject are kept quiet."""
PORTABLE_NOTICE = _DEPRECATED + (
    "It is portable: it needs torch or libtorch alone, and scores slower than with our operators."
)
"""Said instead of a portable file."""

_DEBUG_RECORDS = (".debug_pkl", "/.data/serialization_id")
"""Our source with the paths where it lies on this machine, and a hash over them; nothing needs
either to load. Without them errors quote the code in the file instead of ours."""

Version = tuple[int, int]


def refuse_unsupported(python: Version, torch_version: Version) -> None:
    """Stop before any work where scripting is known to fail, or was never tried.

    Raises:
        ConfigError: TorchScript does not work with this pair; the message says what does.
    """
    names = f"Python {python[0]}.{python[1]} with torch {torch_version[0]}.{torch_version[1]}"
    # torch 2.9 and older crash while scripting on Python 3.14; nothing was released for 3.15 yet.
    broken = (python >= (3, 14) and torch_version < (2, 10)) or python >= (3, 15)
    if broken:
        raise ConfigError(
            f"--format torchscript: {names} cannot script modules. Use --format onnx, or Python "
            "3.13 or older"
        )


def torch_release() -> Version:
    """Major and minor number of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def script(model: nn.Module, *, portable: bool = False) -> torch.jit.ScriptModule:
    """Compile the model, in evaluation mode, for TorchScript.

    Args:
        model: A SequenceModel, or a module around one. Not changed.
        portable: Without the operators qrnn::*.
    """
    pooling = _in_plain_operators(model) if portable else nullcontext()
    with warnings.catch_warnings(), _constants_in_order(model), pooling:
        # NOTICE says it once, in our words.
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit", category=FutureWarning)
        return cast("torch.jit.ScriptModule", torch.jit.script(model.eval()))


def write_torchscript(scripted: torch.jit.ScriptModule, path: Path, manifest: Manifest) -> None:
    """Write the file with its manifest as an extra file; equal models give equal bytes.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """

    def save(name: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
            torch.jit.save(scripted, name)

    write_archive(path, save)
    drop_entries(path, _DEBUG_RECORDS)
    set_manifest(path, manifest)


@contextmanager
def _in_plain_operators(model: nn.Module) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, QRNNLayer)]
    for layer in layers:
        layer.in_plain_operators = True
    try:
        yield
    finally:
        for layer in layers:
            del layer.in_plain_operators


@contextmanager
def _constants_in_order(model: nn.Module) -> Iterator[None]:
    """Let torch write the settings of its own layers in the order of their definition.

    It writes what a class lists as constants in the order of a set, which differs from process to
    process: the same model would give other bytes each time.
    """
    layers = [m for m in model.modules() if len(getattr(m, "__constants__", ())) > 1]
    for layer in layers:
        layer.__dict__["__constants__"] = ()
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["__constants__"]
