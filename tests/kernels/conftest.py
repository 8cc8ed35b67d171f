"""Every kernel test runs with fresh memory full of NaN and one thread; the kernels on the host."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve.kernels import cuda
from support.cuda_on_host import HostKernels


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Memory that torch hands out is NaN, so that an element nobody wrote is seen."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def one_thread():
    """The loops of the reference are many small operations, which threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    """The kernels as a library for the CPU."""
    return HostKernels(tmp_path_factory.mktemp("cuda_on_host"))


@pytest.fixture
def on_host(host_kernels, monkeypatch):
    """Makes the CUDA implementation run on the host, by the plans of a large GPU."""
    monkeypatch.setattr(cuda, "launch", host_kernels.launch)
    monkeypatch.setattr(cuda, "_processors", lambda index: 132)
    monkeypatch.setattr(cuda, "_has_wide_copies", lambda index: True)
