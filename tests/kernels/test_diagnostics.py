"""The self-check catches wrong numbers, and the description says what serves a device."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels import describe, diagnostics, ops, self_check
from support.pool_cases import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_self_check_passes(device):
    """Kernels that are right pass."""
    self_check(device)


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_self_check_finds_wrong_numbers(monkeypatch, wrong):
    """A kernel that never ran, or ran wrong, is found; one element is enough."""
    fo_pool = ops.fo_pool

    def spoilt(*arguments, **options):
        h, c = fo_pool(*arguments, **options)
        h[-1, -1, -1] += wrong
        return h, c

    monkeypatch.setattr(ops, "fo_pool", spoilt)

    with pytest.raises(KernelError, match="kernels on cpu give wrong numbers: fo_pool output"):
        self_check("cpu")


def test_self_check_finds_the_other_orientation(monkeypatch):
    """The paper's orientation of the forget gate fails the reference vector."""
    forget_mult = ops.forget_mult
    monkeypatch.setattr(ops, "forget_mult", lambda f, x, h0: forget_mult(1 - f, x, h0))

    with pytest.raises(KernelError, match="forget_mult on the reference vector"):
        self_check("cpu")


@pytest.mark.parametrize("device", ["cuda:97", "meta"])
def test_a_device_that_is_not_there(device):
    """The check raises, the description has the problem in words."""
    with pytest.raises(KernelError, match=device):
        self_check(device)
    assert device in describe(device)["problem"]


def test_description_of_the_cpu():
    """It names the library, the instruction set and torch."""
    facts = describe("cpu")

    assert facts["kernel"].startswith("C library, ")
    assert facts["library"].endswith("libqrnn_kernels.so")
    assert facts["torch"] == torch.__version__
    assert "problem" not in facts


@pytest.mark.gpu
def test_description_of_a_gpu():
    """It names every version that has to fit, and finds no problem."""
    facts = describe("cuda")

    assert "problem" not in facts, facts
    for name in ("cupy", "nvrtc", "driver supports CUDA", "architecture", "torch built for CUDA"):
        assert facts[name]
    assert facts["device"] == "cuda"


def test_a_problem_keeps_the_facts_found_before_it(monkeypatch):
    """What was read before a problem is still told, so that the mismatch can be seen."""

    def fails(index, facts):
        facts["architecture"] = "sm_90"
        raise KernelError("NVRTC is missing")

    monkeypatch.setattr(diagnostics, "_present", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(diagnostics, "_describe_cuda", fails)

    facts = describe("cuda")

    assert facts["architecture"] == "sm_90"
    assert facts["problem"] == "NVRTC is missing"
