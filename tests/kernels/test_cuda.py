"""The CUDA kernels on a GPU: streams, devices, threads, graphs, huge tensors, failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from qrnn_serve.core.errors import InputError, KernelError
from qrnn_serve.kernels import cuda_compile, cuda_module, fo_pool, forget_mult, reference
from support.pool_cases import assert_near, dense, packed, pool_inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Replaces the poisoned memory of the other tests: matrix products object to it."""


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """No kernel is loaded and the cache on disk is empty."""
    monkeypatch.setattr(cuda_module, "_kernels", {})
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_launches_follow_the_current_stream():
    """200 runs in two alternating side streams, behind a long product, read finished inputs."""
    layout = dense(20, 4, 128)
    gates, c0 = (t.cuda() for t in pool_inputs(layout, torch.float32, True))
    fo_pool(gates, c0)  # a stream that was remembered here would be the wrong one
    torch.cuda.synchronize()
    expected_h, expected_c = fo_pool(gates, c0)
    expected = torch.relu(expected_h), expected_c * 2
    big = torch.randn(3072, 3072, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()

    results = []
    for repetition in range(200):
        with torch.cuda.stream(streams[repetition % 2]):
            # Until the product is done the gates are zeros.
            late = torch.zeros_like(gates)
            product = big @ big
            late.copy_(gates + 0 * product[0, 0])
            h, c = fo_pool(late, c0)
            late.zero_()
            results.append((torch.relu(h), c * 2))
    torch.cuda.synchronize()

    for got in results:
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_backward_follows_the_stream_of_forward():
    """Gradients computed in a side stream are those of the default stream."""
    gates, c0 = (t.cuda() for t in pool_inputs(dense(40, 4, 128), torch.float32, True))
    leaf = gates.clone().requires_grad_()
    expected = torch.autograd.grad(fo_pool(leaf, c0)[0].sum(), leaf)[0]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    for _ in range(50):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            late = gates.clone().requires_grad_()
            grad = torch.autograd.grad(fo_pool(late, c0)[0].sum(), late)[0]
        stream.synchronize()
        assert torch.equal(grad, expected)


def test_nothing_synchronises():
    """A call queues its kernel and returns, with offsets on the GPU too."""
    layout = packed(3, 0, 9, hidden=20)
    gates, c0 = (t.cuda().requires_grad_() for t in pool_inputs(layout, torch.float32, True))
    offsets = layout.offsets("cuda")
    fo_pool(gates, c0, offsets)[0].sum().backward()
    torch.cuda.synchronize()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)
        fo_pool(gates, c0, offsets)[0].sum().backward()
        still_running = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert still_running


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graph_capture(dtype):
    """Forward and backward can be captured once and replayed on new numbers and offsets."""
    layout = packed(3, 0, 9, 4, hidden=65)
    gates, c0 = (t.cuda() for t in pool_inputs(layout, dtype, True))
    offsets = layout.offsets("cuda")
    grad = torch.randn(layout.shape(), device="cuda").to(dtype)

    def run():
        leaf = gates.detach().requires_grad_()
        h, c = fo_pool(leaf, c0, offsets)
        states = forget_mult(h.detach().sigmoid(), h.detach(), c.detach(), offsets)
        return h.detach(), c.detach(), states, torch.autograd.grad(h, leaf, grad)[0]

    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for lengths in ((3, 0, 9, 4), (16, 0, 0, 0), (1, 5, 5, 5)):
        gates.copy_(torch.randn(gates.shape))
        offsets.copy_(packed(*lengths, hidden=65).offsets("cpu"))
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(outputs, run(), strict=True):
            assert torch.equal(got, expected)


def test_tiles_under_a_graph_and_on_two_streams():
    """Words between blocks are zeroed in every replay, and two streams share none."""
    layout = packed(3000, 5, 900, 1, hidden=96)
    offsets = layout.offsets("cuda")
    inputs = [pool_inputs(layout, torch.float32, True)[0].cuda() for _ in range(4)]
    expected = [fo_pool(gates, None, offsets) for gates in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()

    results = []
    for repetition in range(100):
        with torch.cuda.stream(streams[repetition % 2]):
            results.append(fo_pool(inputs[repetition % 4], None, offsets))
    torch.cuda.synchronize()
    given = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fo_pool(given, None, offsets)

    for repetition, got in enumerate(results):
        assert all(map(torch.equal, got, expected[repetition % 4]))
    for gates, want in zip(inputs, expected, strict=True):
        given.copy_(gates)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, outputs, want))


@pytest.mark.multi_gpu
def test_tensors_on_another_device():
    """Work on device 1 stays there, whatever device is current."""
    torch.cuda.set_device(0)
    gates, c0 = pool_inputs(dense(7, 3, 65), torch.float32, True)
    expected = reference.fo_pool(gates.double(), c0.double())
    moved = gates.to("cuda:1").requires_grad_(), c0.to("cuda:1")
    fo_pool(gates.cuda(0))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)

    h, c = fo_pool(*moved)
    h.sum().backward()

    assert h.device == torch.device("cuda:1")
    assert c.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert_near(h, expected[0])
    assert_near(c, expected[1])
    with pytest.raises(InputError, match="f is on cuda:0 and x on cuda:1"):
        forget_mult(c0[None].cuda(0), c0[None].cuda(1))


@pytest.mark.multi_gpu
def test_first_calls_on_two_devices_at_once(cold):
    """Threads that each make the first call on their own device all get right results."""
    gates, c0 = pool_inputs(dense(7, 3, 65), torch.float32, True)
    expected = reference.fo_pool(gates.double(), c0.double())[0]
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(8)]

    for got in _at_once(lambda i: fo_pool(gates.to(devices[i]), c0.to(devices[i]))[0]):
        assert_near(got, expected)


def test_fifty_cold_starts_from_many_threads(cold, monkeypatch):
    """First calls from eight threads at a barrier compile once and are all right, 50 times over."""
    gates, c0 = pool_inputs(dense(7, 3, 65), torch.float32, True)
    expected = reference.fo_pool(gates.double(), c0.double())[0]
    gates, c0 = gates.cuda(), c0.cuda()
    torch.cuda.synchronize()
    compilations = []
    compile_kernel = cuda_compile.compile_kernel

    def counted(*arguments):
        compilations.append(arguments)
        return compile_kernel(*arguments)

    monkeypatch.setattr(cuda_compile, "compile_kernel", counted)
    for start in range(50):
        cuda_module._kernels.clear()
        if start % 10 == 0:
            monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(cold / str(start)))
        for got in _at_once(lambda _: fo_pool(gates, c0)[0]):
            assert_near(got, expected)

    assert len(compilations) == 5


@pytest.mark.parametrize("first", ["torch", "cupy"])
def test_processes_share_one_empty_cache(first, tmp_path):
    """Four processes that start at once on one cache all compute right, in both import orders."""
    program = f"""
import {first}, cupy, torch
from qrnn_serve.kernels import self_check
for dtype in (torch.float16, torch.float64):
    from qrnn_serve.kernels import fo_pool
    assert fo_pool(torch.zeros(3, 2, 9, dtype=dtype, device="cuda"))[0].abs().max() == 0
self_check("cuda")
"""
    environment = os.environ | {cuda_compile.CACHE_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]

    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    # One kernel of two dtypes, and those that the self-check runs: two, on Hopper one more.
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len(list(tmp_path.iterdir())) == 4 + on_hopper


def test_a_gpu_the_compiler_does_not_know(cold, monkeypatch):
    """An unknown architecture is an error with its name, and the next call may work."""
    gates = torch.zeros(3, 2, 9, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (2, 0))
        with pytest.raises(KernelError, match="cannot compile for sm_20"):
            fo_pool(gates)

    assert fo_pool(gates)[0].abs().max() == 0


@pytest.mark.parametrize(
    ("blocks", "threads"), [(0, 256), (1, 4096)], ids=["no-blocks", "too-many-threads"]
)
def test_a_failed_launch_raises(blocks, threads):
    """A launch that the driver refuses names the kernel, the grid and the error."""
    fo_pool(torch.zeros(1, 1, 3, device="cuda"))
    key = cuda_compile.KernelKey("qrnn_fo_pool", torch.float32, 1)
    kernel = cuda_module.loaded_kernel(0, key)

    with pytest.raises(KernelError, match=rf"qrnn_fo_pool .*cuda:0.*\({blocks}, 1, 1\).*CUDA"):
        kernel.launch(blocks, threads, torch.cuda.current_stream().cuda_stream, bytes(300))

    assert fo_pool(torch.zeros(1, 1, 3, device="cuda"))[0].item() == 0


def test_tensors_beyond_two_to_the_31_elements():
    """Offsets into tensors of more than 2^31 elements, in and out, do not wrap."""
    timesteps, hidden = 70_000, 31_000
    needed_bytes = timesteps * hidden * 4 * 2 * 2
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of GPU memory")
    gates = torch.empty(timesteps, 1, 3 * hidden, dtype=torch.float16, device="cuda").normal_()
    assert timesteps * hidden > 2**31

    h, c = fo_pool(gates)

    for first in (0, hidden - 8):
        columns = [gates[..., g * hidden + first : g * hidden + first + 8] for g in range(3)]
        few = torch.cat(columns, dim=-1).cpu().double()
        expected_h, expected_c = reference.fo_pool(few)
        assert_near(h[..., first : first + 8], expected_h)
        assert_near(c[:, first : first + 8], expected_c)


def test_packed_gradients_beyond_two_to_the_31_elements():
    """Packed rows and gradients there have the bits of the same channels alone."""
    timesteps, hidden = 70_000, 31_000
    needed_bytes = timesteps * hidden * 2 * 9
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of GPU memory")
    gates = torch.empty(timesteps, 3 * hidden, dtype=torch.float16, device="cuda").normal_()
    offsets = torch.tensor([0, 30_001, timesteps], device="cuda")
    seed = torch.ones(1, 1, dtype=torch.float16, device="cuda")

    h, c = fo_pool(gates.requires_grad_(), None, offsets)
    (grad,) = torch.autograd.grad(h, gates, seed.expand(h.shape))

    for first in (0, hidden - 8):
        places = [slice(g * hidden + first, g * hidden + first + 8) for g in range(3)]
        few = torch.cat([gates.detach()[:, place] for place in places], dim=-1).requires_grad_()
        few_h, few_c = fo_pool(few, None, offsets)
        (few_grad,) = torch.autograd.grad(few_h, few, seed.expand(few_h.shape))
        assert torch.equal(h[:, first : first + 8], few_h)
        assert torch.equal(c[:, first : first + 8], few_c)
        assert torch.equal(torch.cat([grad[:, place] for place in places], dim=-1), few_grad)


def test_cpu_tensors_stay_on_the_cpu_beside_a_gpu():
    """The path is chosen by the tensor's device, not by what the machine has."""
    gates = torch.randn(3, 2, 9)

    h, _ = fo_pool(gates)

    assert h.device.type == "cpu"
    assert_near(fo_pool(gates.cuda())[0], h.double())


def _at_once(work, workers: int = 8) -> list[torch.Tensor]:
    gate = threading.Barrier(workers)
    results: list[torch.Tensor | None] = [None] * workers

    def run(i: int) -> None:
        gate.wait()
        results[i] = work(i).cpu()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(r is not None for r in results), "a thread failed; its traceback is above"
    return [r for r in results if r is not None]
