"""Zip archives that torch writes, with our manifest in them: TorchScript and torch.export files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest

_ARCHIVE = "archive"
"""Folder in the file that holds all of it."""

# torch ends its process when it cannot write, as on a full disk, and keeps Python's lock while it
# writes. So it writes to this program, which takes everything and tells at the end.
_COPY = """
import os, shutil, sys
try:
    shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer, 1 << 20)
    sys.stdout.buffer.flush()
except OSError as error:
    while sys.stdin.buffer.read(1 << 20):
        pass
    os._exit(error.errno)
"""


def write_archive(path: Path, save: Callable[[Path], object], suffix: str = "") -> None:
    """Let torch write a file of which no byte depends on its name.

    Args:
        path: File to write.
        save: Is given the path to write to.
        suffix: Which torch wants that path to have.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    with path.open("wb") as file, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-S", "-c", _COPY]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file) as copying:  # noqa: S603
            pipe = cast("IO[bytes]", copying.stdin)
            # torch names the folder in the archive after the file.
            name = Path(folder) / (_ARCHIVE + suffix)
            name.symlink_to(f"/dev/fd/{pipe.fileno()}")
            save(name)
    if (number := copying.returncode) != 0:
        raise OSError(number, os.strerror(number), str(path))


def set_manifest(path: Path, manifest: Manifest) -> None:
    """Put the manifest at the end of a file of `write_archive`, in place of one that is there.

    Raises:
        OSError: The disk is full.
    """
    name = f"{_ARCHIVE}/extra/{MANIFEST_KEY}"
    with zipfile.ZipFile(path, "a") as archive:
        if name in archive.NameToInfo:
            _cut_off(archive, [archive.NameToInfo[name]])
        _append(archive, name, manifest.to_json())


def drop_entries(path: Path, endings: tuple[str, ...]) -> None:
    """Take entries out of a file of `write_archive`; what stands behind them moves up.

    Args:
        path: The file.
        endings: Of the names to drop. What stands behind the first is held in memory.

    Raises:
        OSError: The disk is full.
    """
    with zipfile.ZipFile(path, "a") as archive:
        entries = sorted(archive.filelist, key=lambda entry: entry.header_offset)
        first = next(n for n, e in enumerate(entries) if e.filename.endswith(endings))
        tail = entries[first:]
        kept = [(e.filename, archive.read(e)) for e in tail if not e.filename.endswith(endings)]
        _cut_off(archive, tail)
        for name, content in kept:
            _append(archive, name, content)


def _cut_off(archive: zipfile.ZipFile, tail: list[zipfile.ZipInfo]) -> None:
    """Forget the last entries, so that the next is written in their place."""
    for entry in tail:
        del archive.NameToInfo[entry.filename]
        archive.filelist.remove(entry)
    archive.start_dir = tail[0].header_offset


def _append(archive: zipfile.ZipFile, name: str, content: str | bytes) -> None:
    # A ZipInfo has a fixed date, where a name would be given today's.
    archive.writestr(zipfile.ZipInfo(name), content)


def manifest_in(path: Path) -> Manifest:
    """The manifest of a file that `set_manifest` has given one."""
    with zipfile.ZipFile(path) as archive:
        return Manifest.from_json(archive.read(f"{_ARCHIVE}/extra/{MANIFEST_KEY}"), path.name)
