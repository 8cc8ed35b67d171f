"""Seeds, GPU skips that say how to run them, and poisoned allocations."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU, with a reason that names the command."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    devices = torch.cuda.device_count()
    for item in gpu_items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if devices < needed:
            reason = f"needs {needed} CUDA GPU(s), found {devices}; run there with: pytest -m gpu"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same random numbers on every run."""
    import numpy as np
    import torch

    torch.manual_seed(1611)
    np.random.seed(1576)
