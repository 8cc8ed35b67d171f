"""What lies in a checkpoint file, read without running code and before any weight takes memory.

`.pt` is a zip file of torch.save; only kinds of objects that torch's restricted loader knows are
read, and its tensors are mapped from the file. `.safetensors` holds tensors and text only. The
content decides which one a file is, not its name.
"""

import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from qrnn_serve.core.errors import CheckpointError, UntrustedFileError

FORMAT = "qrnn_serve.checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One checkpoint.

    Attributes:
        config: SequenceModelConfig as a mapping, not yet checked.
        weights_sha256: What `weights_sha256` of the tensors must be.
        tensors: Mapped from the file, not yet in memory.
    """

    config: Any
    weights_sha256: Any
    tensors: dict[str, Tensor]


def read_stored(path: Path) -> StoredCheckpoint:
    """Read one checkpoint file.

    Raises:
        CheckpointError: It is not there, damaged, of a newer release or from another program.
        UntrustedFileError: It holds pickled objects, which would run code.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(9)
    if start[:4] == b"PK\x03\x04":
        return _read_zip(path)
    if len(start) == 9 and start[8:] == b"{":
        return _read_safetensors(path, struct.unpack("<Q", start[:8])[0])
    if start[:1] == b"\x80":
        raise UntrustedFileError(
            f"{path}: a bare pickle (from pickle.dump or a torch.save before 1.6). Reading it runs "
            "any code that it carries, so qrnn_serve.load never does; if you trust who made it, "
            f"import it with `qrnn-export {path} --trust-pickle`"
        )
    found = "it is empty" if not start else f"it starts with {start!r}"
    raise CheckpointError(
        f"{path}: expected a .pt or .safetensors file of qrnn_serve.save, but {found}"
    )


def _read_zip(path: Path) -> StoredCheckpoint:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile as error:
        raise _damaged(path, error) from error
    names = [entry.filename for entry in entries]
    if any("/code/" in name for name in names):
        raise CheckpointError(
            f"{path}: a TorchScript file, not a checkpoint; `qrnn-serve {path}` serves it"
        )
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(f"{path}: a zip file, but not one of torch.save; it has {names[:5]}")
    # torch.save compresses nothing; a compressed entry could unpack to any size.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path}: has compressed entries, which torch.save never writes")
    _refuse_code(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise _damaged(path, error) from error
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise _foreign(path, list(content) if isinstance(content, Mapping) else [])
    _check_version(path, content.get("format_version"))
    tensors = content.get("state_dict")
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise CheckpointError(f"{path}: damaged: `state_dict` is not a mapping of names to tensors")
    _check_backed(path, tensors)
    return StoredCheckpoint(content.get("config"), content.get("weights_sha256"), dict(tensors))


def _refuse_code(path: Path) -> None:
    try:
        unsafe = sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception as error:
        raise _damaged(path, error) from error
    # The names that say most about the file first.
    unsafe.sort(key=lambda name: name.split(".")[0] in ("builtins", "collections", "torch"))
    if unsafe:
        raise UntrustedFileError(
            f"{path}: holds pickled objects ({', '.join(unsafe[:5])}). Reading them runs any code "
            "that the file carries, so qrnn_serve.load never does; if you trust who made it, "
            f"import it with `qrnn-export {path} --trust-pickle`"
        )


def _check_backed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # A file can declare a tensor of any size over a few bytes (strides of 0); copying it takes the
    # declared size.
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or needed > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: damaged: the file does not hold all values of {name}")
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > path.stat().st_size:
        raise CheckpointError(
            f"{path}: damaged: declares {total} bytes of weights in a file of "
            f"{path.stat().st_size} bytes"
        )


def _read_safetensors(path: Path, header_bytes: int) -> StoredCheckpoint:
    if header_bytes + 8 > path.stat().st_size:
        raise CheckpointError(
            f"{path}: damaged or truncated: declares a header of {header_bytes} bytes in a file of "
            f"{path.stat().st_size}"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            if metadata.get("format") != FORMAT:
                raise _foreign(path, names)
            version = metadata.get("format_version", "")
            _check_version(path, int(version) if version.isdecimal() else version)
            tensors = {name: file.get_tensor(name) for name in names}
        config = json.loads(metadata.get("config", ""))
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, error) from error
    return StoredCheckpoint(config, metadata.get("weights_sha256"), tensors)


def _check_version(path: Path, version: object) -> None:
    if version == FORMAT_VERSION:
        return
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: written by a newer release (checkpoint format {version}, this one reads "
            f"{FORMAT_VERSION}); update qrnn-serve"
        )
    raise CheckpointError(f"{path}: damaged: checkpoint format is {version!r}")


def _foreign(path: Path, names: list[Any]) -> CheckpointError:
    shown = f"; it holds {names[:5]}" if names else ""
    return CheckpointError(
        f"{path}: not a checkpoint of qrnn_serve.save{shown}. `qrnn-export {path}` imports "
        "checkpoints of other programs"
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(f"{path}: damaged or truncated: {reason}")
