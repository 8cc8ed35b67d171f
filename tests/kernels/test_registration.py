"""The operators as torch sees them: gradients, fake kernels, compile, export, TorchScript."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from qrnn_serve.core.errors import InputError
from qrnn_serve.kernels import fo_pool, forget_mult
from support.pool_cases import DEVICES

OPS = torch.ops.qrnn


def _gates(device: str, dtype: torch.dtype = torch.float64, gates: int = 3) -> torch.Tensor:
    return torch.randn(4, 2, gates * 3, dtype=dtype).to(device)


def _rows(device: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(5, width, dtype=torch.float64).to(device)
    return rows, torch.tensor([0, 2, 2, 5], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("timesteps", [1, 4])
def test_forget_mult_gradcheck(with_state, reverse, timesteps, device):
    """Gradients of f, x and h0 equal finite differences."""
    f = torch.rand(timesteps, 2, 3, dtype=torch.float64).to(device).requires_grad_()
    x = torch.randn(timesteps, 2, 3, dtype=torch.float64).to(device).requires_grad_()
    h0 = torch.randn(2, 3, dtype=torch.float64).to(device).requires_grad_() if with_state else None

    assert torch.autograd.gradcheck(
        lambda *tensors: (
            forget_mult(*tensors, None, reverse)
            if with_state
            else forget_mult(*tensors, None, None, reverse)
        ),
        (f, x, h0) if with_state else (f, x),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("output_gate", [True, False], ids=["fo", "f"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_fo_pool_gradcheck(with_state, output_gate, reverse, device):
    """Gradients of gates and c0, through h and through c, equal finite differences."""
    gates = _gates(device, gates=3 if output_gate else 2).requires_grad_()
    c0 = torch.randn(2, 3, dtype=torch.float64).to(device).requires_grad_() if with_state else None

    def run(*tensors):
        state = tensors[1] if with_state else None
        return fo_pool(tensors[0], state, None, output_gate, reverse, 0.2)

    assert torch.autograd.gradcheck(run, (gates, c0) if with_state else (gates,))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_gradcheck(device):
    """The same for packed rows with an empty sequence among them."""
    rows, offsets = _rows(device, 9)
    c0 = torch.randn(3, 3, dtype=torch.float64).to(device).requires_grad_()
    f = torch.rand(5, 3, dtype=torch.float64).to(device).requires_grad_()

    assert torch.autograd.gradcheck(
        lambda g, c: fo_pool(g, c, offsets), (rows.requires_grad_(), c0)
    )
    assert torch.autograd.gradcheck(
        lambda f, x, h: forget_mult(f, x, h, offsets), (f, f.detach().clone().requires_grad_(), c0)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, device):
    """Schemas, fake kernels and autograd registration hold in torch's own checks."""
    gates = _gates(device, dtype).requires_grad_()
    c0 = torch.randn(2, 3, device=device, dtype=dtype).requires_grad_()
    rows, offsets = _rows(device, 9)
    rows = rows.to(dtype).requires_grad_()
    f = torch.rand(4, 2, 3, device=device, dtype=dtype).requires_grad_()
    x = torch.randn(4, 2, 3, device=device, dtype=dtype).requires_grad_()
    grad = torch.randn(4, 2, 3, device=device, dtype=dtype)
    # Without a gradient: torch 2.11 warns about itself when opcheck clones a view that has one.
    strided = gates.detach()[..., :6]
    tolerances = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}

    for arguments in ((gates,), (gates, c0), (rows, None, offsets), (rows, None, offsets.int())):
        torch.library.opcheck(OPS.fo_pool.default, arguments, **tolerances)
    torch.library.opcheck(OPS.fo_pool.default, (strided, None, None, False, True, 0.5))
    torch.library.opcheck(OPS.forget_mult.default, (f, x), **tolerances)
    torch.library.opcheck(OPS.forget_mult.default, (f, x, c0, None, True), **tolerances)
    with torch.no_grad():
        plain = [t.detach() for t in (grad, f, x, f)]
        torch.library.opcheck(OPS.forget_mult_backward.default, (*plain, None, None, False))
        torch.library.opcheck(
            OPS.fo_pool_backward.default,
            (grad, None, gates.detach(), None, None, True, False, 0.0),
        )


@pytest.mark.parametrize("device", DEVICES)
def test_compile_keeps_one_graph(device):
    """torch.compile takes a function of the operators whole, forward and backward."""

    def run(gates, c0):
        h, c = fo_pool(gates.tanh() * 2, c0)
        return forget_mult(torch.sigmoid(h), h, c)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    gates, c0 = _gates(device, torch.float32), torch.randn(2, 3).to(device)
    for timesteps in (4, 3):
        given = gates[:timesteps].clone().requires_grad_()
        expected = run(given, c0)
        got = compiled(given, c0)
        assert torch.equal(got, expected)
        assert torch.equal(
            torch.autograd.grad(got.sum(), given)[0], torch.autograd.grad(expected.sum(), given)[0]
        )


def test_export_keeps_the_operator():
    """torch.export records the operator itself, with dynamic sizes."""

    class Pool(torch.nn.Module):
        def forward(self, gates):
            return fo_pool(gates)

    gates = _gates("cpu", torch.float32)
    dynamic = {"gates": {0: torch.export.Dim("time"), 1: torch.export.Dim("batch")}}

    program = torch.export.export(Pool(), (gates,), dynamic_shapes=dynamic)

    targets = {str(node.target) for node in program.graph.nodes}
    assert "qrnn.fo_pool.default" in targets
    other = torch.randn(7, 3, 9)
    for a, b in zip(program.module()(other), fo_pool(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_torchscript(device, tmp_path):
    """A scripted function calls the operators, keeps gradients, and survives saving."""

    @torch.jit.script
    def scripted(gates: torch.Tensor, c0: torch.Tensor):
        h, c = torch.ops.qrnn.fo_pool(gates, c0)
        return torch.ops.qrnn.forget_mult(torch.sigmoid(h), h, c)

    gates, c0 = _gates(device, torch.float32).requires_grad_(), torch.randn(2, 3).to(device)
    h, c = fo_pool(gates, c0)
    expected = forget_mult(torch.sigmoid(h), h, c)
    torch.jit.save(scripted, str(tmp_path / "pool.ts.pt"))
    loaded = torch.jit.load(str(tmp_path / "pool.ts.pt"))

    for function in (scripted, loaded):
        for _ in range(3):
            got = function(gates, c0)
            assert torch.equal(got, expected)
            assert torch.equal(
                torch.autograd.grad(got.sum(), gates)[0],
                torch.autograd.grad(expected.sum(), gates, retain_graph=True)[0],
            )


def test_a_fresh_process_needs_one_import(tmp_path):
    """A saved script loads in a process that only imports qrnn_serve.kernels."""

    @torch.jit.script
    def scripted(gates: torch.Tensor):
        return torch.ops.qrnn.fo_pool(gates)[0]

    path = str(tmp_path / "pool.ts.pt")
    torch.jit.save(scripted, path)
    gates = torch.randn(3, 2, 9)
    torch.save(gates, tmp_path / "gates.pt")
    program = f"""
import torch, qrnn_serve.kernels
gates = torch.load({str(tmp_path / "gates.pt")!r}, weights_only=True)
torch.save(torch.jit.load({path!r})(gates), {str(tmp_path / "h.pt")!r})
"""

    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)

    assert torch.equal(torch.load(tmp_path / "h.pt", weights_only=True), fo_pool(gates)[0])


def test_importing_does_no_work():
    """Importing the kernels loads no C library, no CuPy and starts no thread."""
    program = """
import sys, threading
import qrnn_serve.kernels as kernels
maps = open("/proc/self/maps").read()
assert "libqrnn_kernels" not in maps and "cupy" not in sys.modules, "imported too much"
assert threading.active_count() == 1, threading.enumerate()
"""

    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode_and_no_grad(device):
    """Without gradients nothing is kept for a backward pass, and the values are the same."""
    gates = _gates(device, torch.float32).requires_grad_()
    with_grad = fo_pool(gates)

    with torch.no_grad():
        without = fo_pool(gates)
    with torch.inference_mode():
        inference = fo_pool(gates)

    assert with_grad[0].requires_grad
    for outputs in (without, inference):
        assert not outputs[0].requires_grad
        assert torch.equal(outputs[0], with_grad[0])


def test_second_derivatives_are_refused():
    """Differentiating a gradient again is an error that names the way out, not silently wrong."""
    gates = _gates("cpu").requires_grad_()
    f = torch.rand(2, 1, 3, requires_grad=True)
    first = torch.autograd.grad(fo_pool(gates)[0].sum(), gates, create_graph=True)[0]
    first_f = torch.autograd.grad(forget_mult(f, f).sum(), f, create_graph=True)[0]

    with pytest.raises(InputError, match=r"differentiable once.*kernels\.reference"):
        first.sum().backward()
    with pytest.raises(InputError, match=r"differentiable once.*kernels\.reference"):
        first_f.sum().backward()
