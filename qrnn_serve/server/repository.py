"""A folder of models as it lies on disk: FOLDER/NAME/VERSION/ARTEFACT. Reads names, never content.

NAME is what clients ask for, VERSION a whole number, ARTEFACT one file that qrnn-serve can serve,
with what belongs beside it. Names that begin with a dot, and files above, are left alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from qrnn_serve.core.errors import ConfigError

ARTEFACT_ENDINGS = (".ts.pt", ".pt", ".pt2", ".onnx", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """One version of a model in the repository.

    Attributes:
        model: Its name.
        version: Its number, as text.
        artefact: The file to serve; None when `problem` says why there is none.
        problem: What is wrong with the folder, or "".
        nbytes: Of its files.
        stamp: Names, sizes and times of change of its files: another stamp, other content.
    """

    model: str
    version: str
    artefact: Path | None
    problem: str
    nbytes: int
    stamp: tuple[tuple[str, int, int], ...]

    @property
    def number(self) -> int:
        """The version as a number; -1 for a folder whose name is none."""
        return int(self.version) if _is_version(self.version) else -1


def scan(folder: Path) -> dict[str, list[StoredVersion]]:
    """The versions of every model, highest first.

    Raises:
        ConfigError: The folder cannot be read.
    """
    try:
        return {name: _versions(folder / name) for name in _folders(folder)}
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read as a model repository: {error}") from error


def is_unchanged(version: StoredVersion, folder: Path) -> bool:
    """Whether the files of a version in the repository are still those that were seen."""
    try:
        return tuple(sorted(_stamps(folder / version.model / version.version))) == version.stamp
    except OSError:
        return False


def _versions(folder: Path) -> list[StoredVersion]:
    versions = [_version(folder / name) for name in _folders(folder)]
    return sorted(versions, key=lambda version: version.number, reverse=True)


def _version(folder: Path) -> StoredVersion:
    stamp = tuple(sorted(_stamps(folder)))
    artefacts = [name for name, _, _ in stamp if name.endswith(ARTEFACT_ENDINGS)]
    problem = ""
    if not _is_version(folder.name):
        problem = f"{folder}: expected a version such as 3, got {folder.name!r}"
    elif len(artefacts) != 1:
        found = f"{len(artefacts)}: {', '.join(artefacts)}" if artefacts else "none"
        problem = (
            f"{folder}: expected one model file, *{', *'.join(ARTEFACT_ENDINGS)}, found {found}"
        )
    return StoredVersion(
        model=folder.parent.name,
        version=folder.name,
        artefact=None if problem else folder / artefacts[0],
        problem=problem,
        nbytes=sum(size for _, size, _ in stamp),
        stamp=stamp,
    )


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    stamps: list[tuple[str, int, int]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # A file may be renamed or deleted while the folder is read; then there is none of it.
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            if entry.is_file():
                stamps.append((entry.name, status.st_size, status.st_mtime_ns))
    return stamps
