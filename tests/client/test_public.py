"""What the package promises to those who import it."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qrnn_client
from qrnn_client import testing

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "clients" / "examples"

LIGHT = """
import sys, threading
import qrnn_client, qrnn_client.{module}
heavy = {{"torch", "cupy", "pandas", "onnx", "onnxruntime", "qrnn_serve"}} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1, threading.enumerate()
"""


@pytest.mark.parametrize("module", ["_client", "_score", "cli", "testing"])
def test_import_is_light(module, tmp_path):
    """In a fresh process the client, its command and its fake server load no heavy package."""
    code = LIGHT.format(module=module)
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_public_names_are_listed_and_documented():
    """Every name of the package is in __all__, sorted, and says what it is."""
    imported = {
        alias.asname or alias.name
        for node in ast.parse(Path(qrnn_client.__file__).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert set(qrnn_client.__all__) == imported
    assert len(qrnn_client.__all__) == len(imported)
    for module in (qrnn_client, testing):
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), name


def test_blocking_and_async_client_are_parallel():
    """Both clients have the same methods with the same parameters."""

    def signatures(client):
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert signatures(qrnn_client.Client) == signatures(qrnn_client.AsyncClient)


def test_types_hold_for_users():
    """A user's pyright sees the types of the examples, in strict mode."""
    path = Path(__file__).with_name("typing_api.py")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--project", str(ROOT), str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    report = json.loads(done.stdout)
    assert report["generalDiagnostics"] == []
    assert report["summary"]["filesAnalyzed"] == 1


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example, server, tmp_path, make_rows):
    """Each example script runs against a server and prints scores."""
    done = subprocess.run(
        [sys.executable, str(example), server.target],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "version 1" in done.stdout
