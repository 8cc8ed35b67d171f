"""Opens a model file without running code that it carries, and says clearly when it cannot.

Knows file formats; does not know what the tensors in a file mean.
"""

from __future__ import annotations

import importlib.util
import json
import pickle  # noqa: TID251  (only its exception class: torch raises it)
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from qrnn_serve.core.errors import CheckpointError, UntrustedFileError

_TORCH_FAILURES = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    UnicodeDecodeError,
)
"""What torch.load raises for files that are damaged or not its own."""


def read_file(path: Path, *, trust_pickle: bool) -> Any:
    """Read a torch or safetensors file, all tensors on the CPU.

    Args:
        path: The file.
        trust_pickle: Allow code in a pickle to run.

    Returns:
        What was saved: a module, a mapping, a list, ... For safetensors a dict of tensors.

    Raises:
        CheckpointError: No such file, a wrong type of file, or a damaged one.
        UntrustedFileError: Loading it would run code and `trust_pickle` is False.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    if path.is_dir():
        raise CheckpointError(f"{path}: this is a folder; name the model file in it")
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise CheckpointError(f"{path}: the file is empty")
    if head.startswith(b"PK"):
        _check_torch_zip(path)
        return _load_torch(path, trust_pickle=trust_pickle)
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return _load_safetensors(path)
    if head.startswith(b"\x80"):
        return _load_torch(path, trust_pickle=trust_pickle)
    kind = "an ONNX model is an output of this command" if path.suffix == ".onnx" else ""
    raise CheckpointError(
        f"{path}: expected a torch checkpoint (.pt, .pth, .ckpt) or .safetensors, got a file that "
        f"starts with {head[:8]!r}{'; ' + kind if kind else ''}"
    )


def is_torchscript(path: Path) -> bool:
    """Whether the file is one that torch.jit.save wrote."""
    return zipfile.is_zipfile(path) and any(
        name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist()
    )


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """The text metadata of a safetensors file that `read_file` could read."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _check_torch_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path}: the file is cut off or damaged ({error}); copy it again"
        ) from error
    names = [entry.filename for entry in entries]
    if is_torchscript(path):
        raise CheckpointError(
            f"{path}: this is a TorchScript file, which is an output of this command; "
            "export from the checkpoint that it was made from"
        )
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(
            f"{path}: a zip archive that torch did not write (it holds no data.pkl)"
        )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        # A few compressed bytes can unpack to more than any memory; torch.save compresses nothing.
        raise CheckpointError(f"{path}: it has compressed parts, which torch.save never writes")


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise CheckpointError(
            f"{path}: the safetensors file is cut off or damaged ({error})"
        ) from error


def _load_torch(path: Path, *, trust_pickle: bool) -> Any:
    # Mapped, not read, so that weights are in memory once; only a zip can be.
    mapped = zipfile.is_zipfile(path)
    if trust_pickle:
        return _unpickle(path, mapped)
    try:
        with warnings.catch_warnings():
            # A pickle that torch did not write gets our own message below.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        classes = _foreign_classes(path) or re.findall(
            r"GLOBAL (\S+) was not an allowed", str(error)
        )
        if not classes:
            raise _damaged(path, error) from error
        raise UntrustedFileError(
            f"{path}: this is a pickle of Python objects ({_listed(classes)}), and loading it runs "
            "whatever code its author put in it. If you made the file or trust who did, add "
            "--trust-pickle; better, save model.state_dict() and export that"
        ) from error
    except _TORCH_FAILURES as error:
        raise _damaged(path, error) from error


def _unpickle(path: Path, mapped: bool) -> Any:
    try:
        # The caller has said that the file may run code.
        return torch.load(path, map_location="cpu", weights_only=False, mmap=mapped)
    except (ModuleNotFoundError, AttributeError) as error:
        modules = {name.split(".")[0] for name in _foreign_classes(path)}
        missing = sorted(m for m in modules if not _has_code(m))
        raise CheckpointError(
            f"{path}: its classes live in Python modules that are not here ({error}). Not found: "
            f"{', '.join(missing) or 'the class in its module'}. Put their folders on PYTHONPATH, "
            "or install them, or save model.state_dict() where they are"
        ) from error
    except _TORCH_FAILURES as error:
        raise _damaged(path, error) from error


def _has_code(module: str) -> bool:
    # A folder that happens to have the name is found too, as a package without any code.
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _foreign_classes(path: Path) -> list[str]:
    """Names in the pickle beyond torch's own allowed list, found without running anything."""
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except _TORCH_FAILURES:
        # Files of before torch 1.6, which are no zip, cannot be looked into.
        return []
    # The names that say most about the file first.
    common = ("builtins", "collections", "torch")
    return sorted(classes, key=lambda name: (name.split(".")[0] in common, name))


def _damaged(path: Path, error: Exception) -> CheckpointError:
    detail = (str(error) or type(error).__name__).splitlines()[0]
    return CheckpointError(f"{path}: not a torch checkpoint, or cut off or damaged ({detail})")


def _listed(names: list[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
