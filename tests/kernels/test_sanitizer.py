"""The CUDA kernels under compute-sanitizer: no access outside a tensor, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.gpu
@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(600)
def test_clean(tool):
    """A sweep of small inputs has no finding, and right numbers."""
    tests = str(Path(__file__).parents[1])
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=qrnn"]
    command += [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sanitizer_sweep.py"))]
    # Without torch's cache every tensor is an allocation of its own, whose end memcheck knows.
    environment = os.environ | {"PYTHONPATH": tests, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "swept" in done.stdout
