"""The C library: every instruction set, any number of threads, callers in threads and forks."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading

import pytest
import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels import cpu, fo_pool, forget_mult, library, native_library, reference
from support.pool_cases import DTYPES, assert_near, dense, forget_inputs, packed, pool_inputs

LAYOUTS = [dense(11, 5, 67), packed(0, 30, 2, 9, hidden=67)]


@pytest.fixture(params=["avx512", "avx2", "portable"])
def instruction_set(request):
    """Runs the test on one set of kernels, where the processor has it."""
    before = cpu.instruction_set()
    try:
        cpu.select_instruction_set(request.param)
    except KernelError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    cpu.select_instruction_set(before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_matches_reference(instruction_set, dtype, layout):
    """All kernels in the library are right, not only those of this machine."""
    assert cpu.instruction_set() == instruction_set
    gates, c0 = pool_inputs(layout, dtype, True)
    inputs = forget_inputs(layout, dtype)
    leaves = [t.requires_grad_() for t in (gates, c0, *inputs)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    offsets = layout.offsets("cpu")

    got = [*fo_pool(*leaves[:2], offsets), forget_mult(*leaves[2:], offsets)]
    want = [*reference.fo_pool(*wide[:2], offsets), reference.forget_mult(*wide[2:], offsets)]
    seeds = [torch.randn(t.shape).to(dtype) for t in got]
    got += torch.autograd.grad(got, leaves, seeds)
    want += torch.autograd.grad(want, wide, [s.double() for s in seeds])

    for value, expected in zip(got, want, strict=True):
        assert_near(value, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_value_is_converted_exactly(instruction_set, dtype):
    """All 65,536 values survive the way in and out; infinities, NaN and subnormals included."""
    values = torch.arange(-32768, 32768, dtype=torch.int16).view(dtype).view(1, 1, -1)

    kept = forget_mult(torch.ones_like(values), torch.zeros_like(values), None)
    through = forget_mult(torch.ones_like(values), values)
    # 0 * x is NaN for an infinite x: mask those out of the identity f = 0, h0 = x.
    state = forget_mult(torch.zeros_like(values), torch.zeros_like(values), values[0])

    assert torch.equal(kept, torch.zeros_like(values))
    finite = values.isfinite()
    assert torch.equal(through[finite], values[finite])
    assert torch.equal(state[finite], values[finite])
    assert torch.equal(through.isnan(), values.isnan())
    assert torch.equal(through[values.isinf()], values[values.isinf()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_half_is_to_nearest_even(instruction_set, dtype):
    """Results are rounded as torch rounds them, ties, overflow and subnormals included."""
    a = torch.cat([torch.logspace(-9, 6, 3000), torch.linspace(0.5, 2, 1000)]).to(dtype)
    b = torch.rand(4000).to(dtype)
    f = torch.full((1, 1, 4000), 0.5, dtype=dtype)

    got = forget_mult(f, a.view(1, 1, -1), b.view(1, -1))

    assert torch.equal(got.flatten(), (0.5 * a.double() + 0.5 * b.double()).to(dtype))


def test_activations_are_accurate_everywhere(instruction_set):
    """tanh and sigmoid stay within 2e-7 of float64 from zero to far out, and NaN stays NaN."""
    x = torch.cat(
        [
            torch.linspace(-100, 100, 100_001),
            torch.logspace(-30, 0, 1000),
            -torch.logspace(-30, 0, 1000),
        ]
    )
    one = torch.full_like(x, 40.0)

    tanh = fo_pool(torch.cat([x, one]).view(1, 1, -1), output_gate=False)[1]
    forget = fo_pool(torch.cat([one, x]).view(1, 1, -1), output_gate=False)[1]
    output = fo_pool(torch.cat([one, one, x]).view(1, 1, -1))[0][0]
    nan = fo_pool(torch.full((1, 1, 3), float("nan")))[0]

    assert (tanh[0].double() - x.double().tanh()).abs().max() < 2e-7
    assert (forget[0].double() - x.double().sigmoid()).abs().max() < 2e-7
    assert (output[0].double() - x.double().sigmoid()).abs().max() < 2e-7
    assert nan.isnan().all()
    small = x.abs() < 1e-3
    assert ((tanh[0] - x).abs()[small] <= 1e-6 * x.abs()[small]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_large_outputs_have_the_bits_of_small_ones(instruction_set, dtype, reverse):
    """Outputs large enough to be written past the caches, dense and packed, equal small pieces."""
    layout = dense(11, 700, 1056 if dtype == torch.float64 else 1120)
    gates = torch.randn(layout.shape(3)).to(dtype)
    gates[::2] *= 3
    assert gates.nbytes / 3 > 16 << 20

    h, c = fo_pool(gates, None, None, True, reverse)

    packed_gates = gates.transpose(0, 1).reshape(-1, gates.shape[-1])
    packed_h, packed_c = fo_pool(packed_gates, None, torch.arange(0, 7701, 11), True, reverse)
    assert torch.equal(packed_h.view(700, 11, -1), h.transpose(0, 1))
    assert torch.equal(packed_c, c)
    for rows in (slice(0, 100), slice(699, 700)):
        small_h, small_c = fo_pool(gates[:, rows], None, None, True, reverse)
        assert torch.equal(h[:, rows], small_h)
        assert torch.equal(c[rows], small_c)
    expected = reference.fo_pool(gates[:, :3].double(), None, None, True, reverse)
    assert_near(h[:, :3], expected[0])
    assert_near(c[:3], expected[1])


def test_an_infinite_state_stays_until_a_reset(instruction_set):
    """An infinite c0 gives the reference's infinities and NaN, also where f is nearly 1."""
    gates = torch.zeros(60, 1, 3 * 40)
    gates[..., 40:80] = torch.linspace(-30, 12, 40)
    gates[30, :, 40:80] = 200.0
    c0 = torch.full((1, 40), float("inf"))
    c0[:, 1::3] = -float("inf")
    c0[:, 2::3] = 0.5

    got = fo_pool(gates, c0)
    expected = reference.fo_pool(gates, c0)

    for value, want in zip(got, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "layout",
    [
        dense(50, 9, 300),
        dense(400, 1, 700),
        dense(900, 300, 1),
        dense(9, 4, 5000),
        packed(900, 0, 40, 1, hidden=300),
    ],
    ids=["dense", "one-row", "narrow", "wide", "packed"],
)
def test_threads_change_nothing(layout):
    """Any number of threads gives the same bits, forward and backward."""
    gates, c0 = pool_inputs(layout, torch.float32, True)
    f, x, h0 = forget_inputs(layout, torch.float32)
    seed = torch.randn(layout.shape())
    offsets = layout.offsets("cpu")

    def run():
        leaves = [t.detach().requires_grad_() for t in (gates, c0, f, x, h0)]
        h, c = fo_pool(leaves[0], leaves[1], offsets)
        h2 = forget_mult(*leaves[2:], offsets)
        grads = torch.autograd.grad([h, c, h2], leaves, [seed, c.detach(), seed])
        return [h, c, h2, *grads]

    expected = run()
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        for a, b in zip(run(), expected, strict=True):
            assert torch.equal(a, b), threads


def test_callers_in_many_threads():
    """Eight threads calling at once, each with its own sizes, all get their own results."""
    torch.set_num_threads(2)
    inputs = [pool_inputs(dense(150 + i, 3, 320 + i), torch.float32, True) for i in range(8)]
    expected = [fo_pool(*pair) for pair in inputs]
    gate = threading.Barrier(8)
    wrong: list[int] = []

    def work(i: int) -> None:
        gate.wait()
        for _ in range(30):
            got = fo_pool(*inputs[i])
            if not all(map(torch.equal, got, expected[i])):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert wrong == []


def test_a_forked_child_has_threads_of_its_own():
    """A fork after the pool has started neither hangs nor changes numbers."""
    program = """
import os, torch
from qrnn_serve.kernels import fo_pool
torch.set_num_threads(3)
gates = torch.arange(60.0 * 8 * 900).sin().view(60, 8, 900)
# Compared as bytes: torch's own threads do not survive a fork, so the child may not use them.
expected = fo_pool(gates)[0].numpy().tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if fo_pool(gates)[0].numpy().tobytes() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
assert fo_pool(gates)[0].numpy().tobytes() == expected
"""

    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_library_is_found():
    """The library is there, in this package or where the installation put it."""
    assert native_library().name == "libqrnn_kernels.so"
    assert native_library().is_file()


def test_a_missing_library_says_how_to_build_it(monkeypatch):
    """Without the library the call fails; it does not quietly run something slower."""
    monkeypatch.setattr(library, "LIBRARY_NAME", "libqrnn_absent.so")
    cpu._library.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"libqrnn_absent.so was not found.*pip install -e"):
            fo_pool(torch.zeros(1, 1, 3))
        monkeypatch.setattr(importlib.metadata, "distribution", _no_distribution)
        with pytest.raises(KernelError, match="CMake"):
            native_library()
    finally:
        cpu._library.cache_clear()


def _no_distribution(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_damaged_library_is_named(monkeypatch, tmp_path):
    """A file that is no library is an error with its path."""
    path = tmp_path / "libqrnn_kernels.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "native_library", lambda: path)
    cpu._library.cache_clear()
    try:
        with pytest.raises(KernelError, match="cannot load the CPU kernels from"):
            fo_pool(torch.zeros(1, 1, 3))
    finally:
        cpu._library.cache_clear()


def test_an_unknown_instruction_set_is_refused():
    """A name that this build does not have is an error."""
    with pytest.raises(KernelError, match="mmx"):
        cpu.select_instruction_set("mmx")


def test_the_interpreter_lock_is_released():
    """Another Python thread runs while a kernel does."""
    gates = torch.zeros(3000, 4, 3000)
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = ticks
    arguments_done = fo_pool(gates)
    during = ticks - before
    done.set()
    counter.join()

    assert arguments_done[0].shape == (3000, 4, 1000)
    # Python hands the lock over every 5 ms; a counter that was shut out would stand still.
    assert during > 1000
