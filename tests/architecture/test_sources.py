"""Rules about the sources that no linter states."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("qrnn_serve", "export/qrnn_export", "clients/qrnn_client", "protos/qrnn_protos")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def package_files() -> list[Path]:
    files = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return [p for p in files if "_pb2" not in p.name]


@pytest.mark.parametrize("path", package_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    """A file holds one concept and a function fits on a screen."""
    text = path.read_text()
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    too_long = [(name, lines) for name, lines in functions if lines > MAX_FUNCTION_LINES]

    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert too_long == []


def test_stubs_are_fresh(tmp_path):
    """The committed wire messages are what the pinned generator makes of the .proto."""
    done = subprocess.run(
        [str(ROOT / ".venv/bin/python"), str(ROOT / "protos/generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
