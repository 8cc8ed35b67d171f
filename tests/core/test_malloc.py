"""Freed memory that is kept is not asked for again."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from qrnn_serve.core.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(24 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is of the GNU C library")
def test_freed_blocks_are_used_again():
    """The pages of large blocks are handed out by the system once, not at every allocation."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60
    )

    # The three blocks have 18,432 pages.
    assert int(done.stdout) < 1000
