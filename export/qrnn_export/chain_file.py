"""The file that says how the stages of a model belong together: MODEL.stages.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ArtefactError, ConfigError

SUFFIX = ".stages.json"
_FORMAT_VERSION = 1
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainedStage:
    """One stage.

    Attributes:
        layers: Its first layer, and one past its last.
        state: Its columns of the model's state: the first, and one past the last.
        weight_bytes: Size of its weights.
        seconds: What its layers took together when the cut was chosen.
    """

    layers: tuple[int, ...]
    state: tuple[int, ...]
    weight_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainedFile:
    """An artefact of one stage: its name, beside the chain, and the hash of its bytes."""

    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """What stands in the file.

    Attributes:
        stages: In the order in which they run.
        artefacts: For each format one file a stage, in that order.
        proof_sha256: Hash of the measurements in the proof beside it; None before there are any.
        format_version: Raised when older readers could not use the file.
    """

    stages: tuple[ChainedStage, ...]
    artefacts: dict[str, tuple[ChainedFile, ...]]
    proof_sha256: str | None = None
    format_version: int = _FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("layers", "state"):
            runs = [getattr(stage, name) for stage in self.stages]
            pairs = all(len(run) == 2 and run[0] <= run[1] for run in runs)
            if not runs or not pairs or [a for a, _ in runs] != [0, *(b for _, b in runs[:-1])]:
                raise ConfigError(
                    f"{name} of the stages: expected [first, one past the last], from 0, each from "
                    f"where the one before ends, got {[list(run) for run in runs]}"
                )
        for name, files in self.artefacts.items():
            named = [entry.file for entry in files]
            if len(named) != len(self.stages) or any(Path(n).name != n for n in named):
                raise ConfigError(
                    f"artefacts.{name}: expected {len(self.stages)} names of files in the same "
                    f"folder, got {named}"
                )


def write_chain(path: Path, chain: Chain) -> None:
    """Write the file; equal chains give equal bytes."""
    path.write_text(json.dumps(to_mapping(chain), indent=1, sort_keys=True) + "\n")


def read_chain(path: Path) -> Chain:
    """Read the file.

    Raises:
        ArtefactError: It is missing, damaged, or of another version.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ArtefactError(f"{path}: larger than any that qrnn-export writes")
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtefactError(f"{path}: no such file") from error
    except ValueError as error:
        raise ArtefactError(f"{path}: damaged: not JSON: {error}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != _FORMAT_VERSION:
        raise ArtefactError(
            f"{path}: format {version!r} of stages, this release reads {_FORMAT_VERSION}; export "
            "the model again, or use the release that wrote it"
        )
    try:
        return from_mapping(Chain, content)
    except ConfigError as error:
        raise ArtefactError(f"{path}: damaged: {error}") from error
