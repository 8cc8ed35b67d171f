"""The proof beside an artefact: what its export measured, and the hash of each file it is about.

`model.onnx` has `model.onnx.proof.json`. The hash of the measurements stands in the artefact's
manifest, the hashes of the files in the proof: neither can be exchanged or damaged unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ArtefactError, ConfigError

PROOF_SUFFIX = ".proof.json"
_FORMAT_VERSION = 1
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofFile:
    """What stands in the file.

    Attributes:
        artefact_sha256: Of the artefact's bytes.
        beside_sha256: File name to hash, of files that must stay beside the artefact.
        measured: What was compared and how far it was off, as the exporter wrote it.
        format_version: Raised when older readers could not use the file.
    """

    artefact_sha256: str
    beside_sha256: dict[str, str]
    measured: dict[str, Any]
    format_version: int = _FORMAT_VERSION


def proof_path(artefact: Path) -> Path:
    """Where the proof of an artefact is."""
    return artefact.with_name(artefact.name + PROOF_SUFFIX)


def measured_sha256(measured: dict[str, Any]) -> str:
    """The hash of a proof's measurements, for the artefact's manifest."""
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def write_proof(artefact: Path, beside: Sequence[Path], measured: dict[str, Any]) -> ProofFile:
    """Write the proof of files that will not change any more, at `proof_path`.

    Returns:
        What stands in it.
    """
    proof = ProofFile(
        artefact_sha256=file_sha256(artefact),
        beside_sha256={path.name: file_sha256(path) for path in beside},
        measured=measured,
    )
    text = json.dumps(to_mapping(proof), sort_keys=True, indent=1)
    proof_path(artefact).write_text(text + "\n")
    return proof


def read_proof(artefact: Path) -> ProofFile:
    """The proof of an artefact, once its files are known to be the ones that were proven.

    Raises:
        ArtefactError: There is none, it cannot be read, or a file is another or damaged.
    """
    path = proof_path(artefact)
    proof = _parsed(path)
    expected = {artefact.name: proof.artefact_sha256, **proof.beside_sha256}
    for name, digest in expected.items():
        file = artefact.with_name(name)
        if not file.is_file():
            raise ArtefactError(f"{artefact}: needs {file.name} beside it, which is not there")
        if file_sha256(file) != digest:
            raise ArtefactError(
                f"{file}: damaged, or not the file that {path.name} is about: its hash is another. "
                "Copy them again together, or export again"
            )
    return proof


def check_measured(proof: ProofFile, vouched: str | None, artefact: Path) -> None:
    """Check that an artefact vouches for the proof beside it.

    Args:
        proof: The proof.
        vouched: `measured_sha256` as it stands in the artefact.
        artefact: For messages.

    Raises:
        ArtefactError: It does not.
    """
    if vouched != measured_sha256(proof.measured):
        raise ArtefactError(
            f"{artefact}: {proof_path(artefact).name} was changed, or is the proof of another "
            "export. Copy them again together, or export again"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parsed(path: Path) -> ProofFile:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ArtefactError(f"{path}: larger than any proof that qrnn-export writes")
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtefactError(
            f"{path}: missing. qrnn-export writes it beside the artefact and proves with it that "
            "the numbers are right; copy both, or export again"
        ) from error
    except ValueError as error:
        raise ArtefactError(f"{path}: damaged: not JSON: {error}") from error
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    version = fields.get("format_version")
    if version != _FORMAT_VERSION:
        raise ArtefactError(
            f"{path}: proof format {version!r}, this release reads {_FORMAT_VERSION}; "
            "export the model again, or use the release that wrote it"
        )
    try:
        return from_mapping(ProofFile, fields, str(path))
    except ConfigError as error:
        raise ArtefactError(str(error)) from error
