"""The C host of the CUDA kernels, over a driver and a compiler that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qrnn_serve.kernels import plan, reference
from qrnn_serve.kernels.cuda_compile import KernelKey
from support.cuda_on_host import HOST_DTYPES
from support.pool_cases import SEQUENCES, assert_near, dense, packed, pool_inputs


@pytest.fixture(scope="session")
def without_python(host_kernels):
    """Runs the calls of call_cuda_host.py: the C host of the kernels, over a driver on the host."""
    folder = host_kernels.folder / "driver"
    folder.mkdir()
    source = Path(__file__).with_name("cuda_driver_on_host.cpp")
    for name in ("libcuda.so.1", "libnvrtc.so.13"):
        command = ["c++", "-std=c++17", "-shared", "-fPIC", "-o", str(folder / name), str(source)]
        subprocess.run([*command, "-ldl"], check=True)
    for dtype in HOST_DTYPES:
        for channels in {1, plan.widest_channels(dtype)}:
            host_kernels.built(KernelKey("qrnn_fo_pool", dtype, channels))
    host_kernels.built(KernelKey("qrnn_prepare", torch.float32, 1))

    def run(calls, **environment):
        environment = {
            "LD_LIBRARY_PATH": str(folder),
            "QRNN_HOST_KERNELS": str(host_kernels.folder),
        } | environment
        files = [str(folder / name) for name in ("calls.pt", "results.pt")]
        torch.save(calls, files[0])
        script = Path(__file__).with_name("call_cuda_host.py")
        command = [sys.executable, "-W", "ignore", str(script), *files]
        subprocess.run(command, check=True, env=os.environ | environment)
        return torch.load(files[1])

    return run


def test_the_host_without_python_matches_reference(without_python):
    """Dense, packed and padded rows, whole and in tiles, aligned and not, in every dtype."""
    calls, expected = [], []
    cases = [
        (layout.values[0], dtype, output_gate, reverse)
        for layout in [*SEQUENCES, pytest.param(packed(300, 0, 65, 700, hidden=64))]
        for dtype in HOST_DTYPES
        for output_gate, reverse in ((True, False), (False, True))
    ]
    for layout, dtype, output_gate, reverse in cases:
        gates, c0 = pool_inputs(layout, dtype, output_gate)
        options = {"output_gate": output_gate, "reverse": reverse, "zoneout": 0.3}
        offsets = layout.offsets("cpu")
        want = reference.fo_pool(
            gates.double(), c0.double(), offsets, output_gate, reverse, zoneout=0.3
        )
        calls.append({"gates": gates, "c0": c0, "offsets": offsets, **options})
        expected.append(want)
        if layout.packed:
            lengths = torch.tensor(layout.lengths, dtype=torch.int64)
            real = torch.arange(max([*layout.lengths, 1])) < lengths[:, None]
            padded = torch.full((*real.shape, gates.shape[1]), float("nan"), dtype=dtype)
            padded[real] = gates
            h = torch.zeros(*real.shape, layout.hidden, dtype=torch.float64)
            h[real] = want[0]
            calls.append({"gates": padded, "c0": c0, "lengths": lengths, **options})
            expected.append((h, want[1]))

    results = without_python(calls)

    for (status, message, h, c), (want_h, want_c) in zip(results, expected, strict=True):
        assert (status, message) == (0, "")
        assert_near(h, want_h)
        assert_near(c, want_c)


def test_the_host_without_python_says_what_is_wrong(without_python):
    """A refusal of the compiler, of wrong arguments, and of memory that is not the GPU's."""
    gates, c0 = pool_inputs(dense(3, 2, 5), torch.float32, True)
    call = {"gates": gates, "c0": c0, "output_gate": True, "reverse": False, "zoneout": 0.0}
    offsets = torch.tensor([0, 2, 3])

    ((status, message, *_),) = without_python([call], QRNN_COMPILER_FAILS="1")
    assert status == 5
    assert "cuda:1: NVRTC 13.0 cannot compile qrnn_fo_pool for sm_90" in message
    assert "line one" in message
    both = without_python(
        [{**call, "zoneout": 1.5}, {**call, "offsets": offsets, "lengths": offsets[:2]}]
    )
    assert [status for status, *_ in both] == [1, 1]
    assert "zoneout: expected 0 to 1" in both[0][1]
    assert "exclude offsets" in both[1][1]


def test_the_host_without_python_needs_a_driver(without_python):
    """Where there is none, the message says so, and the process goes on."""
    gates, c0 = pool_inputs(dense(3, 2, 5), torch.float32, True)
    call = {"gates": gates, "c0": c0, "output_gate": True, "reverse": False, "zoneout": 0.0}
    if torch.cuda.is_available():
        pytest.skip("this machine has one")

    ((status, message, *_),) = without_python([call], LD_LIBRARY_PATH="")

    assert status == 5
    assert "cannot load the CUDA driver" in message
