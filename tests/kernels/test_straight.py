"""Eager calls skip torch's dispatcher; everything that listens to it still sees the operators."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from qrnn_serve.kernels import fo_pool, ops
from qrnn_serve.kernels.straight import goes_straight


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


def _gates():
    return torch.randn(5, 2, 9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_plain_tensors_go_straight(mode, monkeypatch):
    """With and without gradients, a parameter too; the operator is not asked."""
    monkeypatch.setattr(ops.torch.ops.qrnn, "fo_pool", None)
    with mode():
        assert goes_straight(_gates(), None, torch.nn.Parameter(_gates()))
        assert fo_pool(_gates())[0].shape == (5, 2, 3)


def test_a_mode_sees_the_operator():
    """A dispatch mode, and a tracer, find it by its name."""
    with _Names() as mode:
        fo_pool(_gates())
    graph = make_fx(lambda gates: fo_pool(gates)[0])(_gates())

    assert "qrnn.fo_pool.default" in mode.names
    assert "qrnn.fo_pool.default" in {str(node.target) for node in graph.graph.nodes}


def test_fake_tensors_have_shapes_and_no_memory():
    """No kernel is called with the address of a tensor that has none."""
    with FakeTensorMode():
        h, c = fo_pool(_gates())
    assert h.shape == (5, 2, 3)
    assert c.shape == (2, 3)
    assert fo_pool(_gates().to("meta"))[0].device.type == "meta"


def test_a_subclass_and_a_negated_view_do_not_go_straight():
    """What wraps a tensor, or says that its memory is not its values, needs the dispatcher."""

    class Own(torch.Tensor):
        pass

    negated = torch.randn(5, 2, 9, dtype=torch.complex64).conj().imag
    assert negated.is_neg()

    assert not goes_straight(_gates().as_subclass(Own))
    assert not goes_straight(negated)
    torch.testing.assert_close(fo_pool(negated)[0], fo_pool(negated.clone().resolve_neg())[0])


def test_functional_transforms_are_not_passed_by():
    """torch.func wraps tensors that look plain."""
    seen = []

    def run(gates):
        seen.append(goes_straight(gates))
        return gates.sum()

    torch.func.grad(run)(_gates())

    assert seen == [False]
