"""What torch raises where there is no room, as MemoryError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def memory_errors(device: str) -> Iterator[None]:
    """Out-of-memory errors as MemoryError that names the device.

    A GPU's blocks that torch has cached are given back first.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise MemoryError(f"out of memory on {device}: {error}") from error
    except RuntimeError as error:
        # The CPU allocator has no error class of its own.
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(f"out of memory on {device}: {error}") from error
