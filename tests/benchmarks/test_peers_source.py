"""The benchmark's CUDA source without a GPU: its kernels run as C++ threads on the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import kernel_peers
from kernel_peers import ChannelScan, difference
from qrnn_serve.kernels import reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler named c++ on PATH")
    path = tmp_path_factory.mktemp("peers") / "peers.so"
    command = [
        *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-w"),
        f'-DPEERS_SOURCE="{kernel_peers.SOURCE}"',
        *("-o", str(path), str(Path(__file__).parent / "peers_on_host.cpp")),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(autouse=True)
def on_host(host_library, monkeypatch):
    """Launches run on the host; outputs are filled with NaN first."""

    def launch(name, blocks, threads, tensors, *sizes):
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        single = tensors[0].dtype == torch.float32
        numbers = (ctypes.c_longlong * len(sizes))(*sizes)
        host_library.launch(name.encode(), single, blocks, threads, pointers, numbers)

    monkeypatch.setattr(kernel_peers, "_launch", launch)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, float("nan")))


def inputs(dtype, *shape):
    return torch.rand(shape).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("timesteps", [1, 37, 128, 2048, 2100])
def test_block_scan(dtype, timesteps):
    """Chunks, warps, ends that fill no vector, and rows that begin between vectors."""
    f, x = inputs(dtype, 1, 3, timesteps)

    h = kernel_peers.block_scan(f, x)

    expected = reference.forget_mult(f.permute(2, 0, 1).double(), x.permute(2, 0, 1).double())
    assert difference(h.permute(2, 0, 1), expected) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 3, 5)], ids=str)
def test_channel_scan(dtype, shape):
    """States and gradients are the reference's."""
    f, x = (tensor.requires_grad_() for tensor in inputs(dtype, *shape))
    grad = torch.randn(shape).to(dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (f, x)]
    expected = reference.forget_mult(*wide)

    h = ChannelScan.apply(f, x)

    assert difference(h.detach(), expected.detach()) is None
    for got, wanted in zip(
        torch.autograd.grad(h, (f, x), grad),
        torch.autograd.grad(expected, wide, grad.double()),
        strict=True,
    ):
        assert kernel_peers.stepwise_difference(got, wanted) is None
