"""Files that appear whole or not at all: written in a hidden folder, then moved into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qrnn_serve.core.errors import ConfigError


@contextmanager
def staging_directory(directory: Path) -> Iterator[Path]:
    """A folder on the file system of `directory`, removed at the end with all that is left in it.

    `directory` is made when it is not there.

    Raises:
        OSError: The folder cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".qrnn-export-", dir=directory))
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def refuse_existing(paths: Sequence[Path], *, overwrite: bool) -> None:
    """Stop before any work when a file would be replaced that nobody said to replace.

    Raises:
        ConfigError: One exists.
    """
    existing = [str(path) for path in paths if path.exists()]
    if existing and not overwrite:
        raise ConfigError(
            f"{', '.join(existing)} exists already; add --overwrite to replace, or -o DIR to write "
            "elsewhere"
        )


def publish_folder(staged: Path, directory: Path) -> None:
    """Move everything in `staged` into `directory`, in place of what has the same names there."""
    directory.mkdir(parents=True, exist_ok=True)
    for new in sorted(staged.iterdir()):
        target = directory / new.name
        if target.is_dir():
            shutil.rmtree(target)
        shutil.move(new, target)


def publish(files: Sequence[Path], directory: Path) -> list[Path]:
    """Move staged files into `directory`, in this order, each in one step.

    All are on the disk before the first is moved, so a full disk leaves the folder as it was.

    Returns:
        Their new paths.
    """
    for file in files:
        with file.open("rb+") as written:
            os.fsync(written.fileno())
    return [file.replace(directory / file.name) for file in files]
