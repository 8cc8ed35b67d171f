"""What importing a package may do: load little, start nothing, write nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = """
import sys, threading
import {module}
heavy = [m for m in ("torch", "cupy", "onnx", "onnxruntime", "pandas") if m in sys.modules]
assert not heavy, heavy
assert threading.active_count() == 1, threading.enumerate()
"""

QUIET = """
import os, sys, threading
before = set(os.listdir("."))
import {module}
assert "cupy" not in sys.modules
assert threading.active_count() == 1, threading.enumerate()
import torch
assert not torch.cuda.is_initialized()
assert set(os.listdir(".")) == before
"""


def run_python(code, cwd):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.mark.parametrize(
    "module",
    ["qrnn_client", "qrnn_client.cli", "qrnn_protos", "qrnn_serve", "qrnn_serve.core.errors"],
)
def test_light_packages_import_without_torch(module, tmp_path):
    """The client, the messages and the core load no framework and start no thread."""
    done = run_python(LIGHT.format(module=module), tmp_path)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    ["qrnn_serve.kernels", "qrnn_serve.model", "qrnn_serve.server", "qrnn_export"],
)
def test_importing_does_no_work(module, tmp_path):
    """Importing compiles nothing, touches no GPU, starts no thread and writes no file."""
    done = run_python(QUIET.format(module=module), tmp_path)

    assert done.returncode == 0, done.stderr
