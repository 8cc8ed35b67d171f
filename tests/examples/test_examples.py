"""The two multi-device examples run on the CPU here and on GPUs with pytest -m gpu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--timesteps", "24", "--batch", "7", "--hidden", "33")


def run_example(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_data_parallel_example_gives_the_same_numbers():
    """Splitting the batch over replicas changes no number."""
    printed = run_example("data_parallel.py", "--device", "cpu", "--repeats", "2", *SMALL)

    difference = float(printed.split("largest absolute difference: ")[1])
    assert difference <= 1e-6


def test_model_parallel_example_learns():
    """Training across two devices makes the loss fall; served over both it scores the same."""
    printed = run_example("model_parallel.py", "--device", "cpu", *SMALL)

    first, last = printed.split("loss fell from ")[1].splitlines()[0].split(" to ")
    assert float(last) < float(first) / 2
    assert "served over cpu and cpu" in printed
    assert float(printed.split("relative: ")[1]) <= 1e-5


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_data_parallel_example_on_two_gpus():
    """DataParallel(dim=1) over two GPUs gives one GPU's numbers."""
    run_example("data_parallel.py", "--device", "cuda")


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_model_parallel_example_on_two_gpus():
    """The layers train across two GPUs."""
    run_example("model_parallel.py", "--device", "cuda")
