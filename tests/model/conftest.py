"""Programs run in fresh processes, so that nothing this process imported can help them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def run_python_in_parallel():
    """Run one program with each list of arguments at once; fail with what they printed."""

    def run(code, argument_lists):
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error::UserWarning", "-c", code, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for arguments in argument_lists
        ]
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs

    return run
