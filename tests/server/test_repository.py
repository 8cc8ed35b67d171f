"""What a folder of models holds, and what is wrong with it."""

from __future__ import annotations

import os

import pytest

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.server.repository import scan


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_scan_finds_models_and_their_versions_highest_first(tmp_path):
    """Versions are numbers: 10 is above 9; files beside the artefact belong to it."""
    for version in (9, 10, 1):
        write(tmp_path / "b" / str(version) / "model.onnx", "12345")
    write(tmp_path / "a" / "1" / "any.ts.pt")
    write(tmp_path / "b" / "10" / "model.onnx.proof.json", "{}")
    write(tmp_path / "b" / "10" / "model.onnx.data", "123")
    write(tmp_path / "README.md")
    write(tmp_path / ".git" / "1" / "x.pt")

    stored = scan(tmp_path)

    assert {name: [v.version for v in found] for name, found in stored.items()} == {
        "a": ["1"],
        "b": ["10", "9", "1"],
    }
    newest = stored["b"][0]
    assert newest.artefact == tmp_path / "b" / "10" / "model.onnx"
    assert newest.nbytes == 5 + 2 + 3
    assert newest.problem == ""


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "found none"),
        (["notes.txt"], "found none"),
        (["a.pt", "a.onnx"], "found 2: a.onnx, a.pt"),
    ],
)
def test_scan_says_what_is_wrong_with_a_version(tmp_path, files, problem):
    """A version without a model file, or with two, is listed with what was found."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    for file in files:
        write(tmp_path / "m" / "1" / file)

    [version] = scan(tmp_path)["m"]

    assert version.artefact is None
    assert problem in version.problem


@pytest.mark.parametrize("name", ["latest", "01", "-1", "1.5", "1234567890"])
def test_scan_refuses_versions_that_are_no_numbers(tmp_path, name):
    """A folder that is no version is below all versions, and says so."""
    write(tmp_path / "m" / name / "x.pt")
    write(tmp_path / "m" / "0" / "x.pt")

    zero, wrong = scan(tmp_path)["m"]

    assert (zero.version, zero.problem) == ("0", "")
    assert wrong.artefact is None
    assert f"got {name!r}" in wrong.problem


def test_scan_tells_changed_files_apart(tmp_path):
    """Another size or time of a file, or another file, is another version; a look is none."""
    file = write(tmp_path / "m" / "1" / "x.pt")
    os.utime(file, (1, 1))
    first, again = scan(tmp_path)["m"], scan(tmp_path)["m"]
    os.utime(file, (2, 2))
    touched = scan(tmp_path)["m"]
    write(tmp_path / "m" / "1" / "x.pt.proof.json")
    added = scan(tmp_path)["m"]

    assert first == again
    assert len({first[0], touched[0], added[0]}) == 3


def test_scan_names_a_folder_that_it_cannot_read(tmp_path):
    """A folder that is not there is a clear error."""
    with pytest.raises(ConfigError, match="nowhere"):
        scan(tmp_path / "nowhere")
