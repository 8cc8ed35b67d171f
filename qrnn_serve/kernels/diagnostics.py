"""What serves the kernels on a device, and whether its numbers are right."""

from __future__ import annotations

import platform

import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, HALF_RELATIVE_NORM
from qrnn_serve.kernels import cpu, cuda_compile, cuda_layer, cuda_module, ops, reference
from qrnn_serve.kernels.cuda_compile import KernelKey
from qrnn_serve.kernels.library import native_library

# f, x, h0 and the states that h_t = f_t * x_t + (1 - f_t) * h_{t-1} gives.
_FORGET = (0.5, 0.25, 1.0, 0.0)
_FRESH = (1.0, -1.0, 2.0, 5.0)
_INITIAL = 0.4
_STATES = (0.7, 0.275, 2.0, 2.0)


def self_check(device: torch.device | str) -> None:
    """Run the kernels on known and on random numbers and compare with the reference on the CPU.

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        KernelError: The device is not there, its kernels do not run, or a number is wrong.
    """
    device = _present(torch.device(device))
    f, x = (torch.tensor(v, device=device).view(4, 1, 1) for v in (_FORGET, _FRESH))
    states = ops.forget_mult(f, x, torch.full((1, 1), _INITIAL, device=device))
    _compare(device, "forget_mult on the reference vector", states.flatten(), torch.tensor(_STATES))
    generator = torch.Generator().manual_seed(7)
    gates = torch.randn(7, 3, 3 * 513, generator=generator)
    c0 = torch.randn(3, 513, generator=generator)
    h, c = ops.fo_pool(gates.to(device), c0.to(device), zoneout=0.25)
    h_expected, c_expected = reference.fo_pool(gates.double(), c0.double(), zoneout=0.25)
    _compare(device, "fo_pool output at (T 7, B 3, H 513)", h, h_expected)
    _compare(device, "fo_pool state at (T 7, B 3, H 513)", c, c_expected)
    if _has_layer_kernel(device):
        _check_layer_kernel(device, generator)


def describe(device: torch.device | str) -> dict[str, str]:
    """What would serve the kernels on a device, for people: names and versions, never an exception.

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Returns:
        Text under names such as "device", "kernel", "torch", "cupy", "nvrtc", "driver" and
        "architecture". "problem" is there when the kernels cannot run, and says why.
    """
    device = torch.device(device)
    facts = {"device": str(device), "torch": torch.__version__}
    try:
        present = _present(device)
        if present.type == "cuda":
            _describe_cuda(present.index, facts)
        else:
            _describe_cpu(facts)
    except KernelError as error:
        facts["problem"] = str(error)
    return facts


def _describe_cpu(facts: dict[str, str]) -> None:
    facts["processor"] = platform.machine()
    facts["threads"] = str(torch.get_num_threads())
    facts["library"] = str(native_library())
    facts["kernel"] = f"C library, {cpu.instruction_set()}"


def _describe_cuda(index: int, facts: dict[str, str]) -> None:
    # One fact at a time, so that those found before a problem are still told.
    major, minor = torch.cuda.get_device_capability(index)
    facts["name"] = torch.cuda.get_device_name(index)
    facts["architecture"] = f"sm_{major}{minor}"
    facts["torch built for CUDA"] = str(torch.version.cuda)
    facts["cupy"] = cuda_compile.cupy_version()
    facts["driver supports CUDA"] = cuda_module.driver_version()
    facts["nvrtc"] = cuda_compile.compiler_version()
    facts["cache"] = str(cuda_compile.cache_directory())
    with torch.cuda.device(index):
        cuda_module.loaded_kernel(index, KernelKey("qrnn_fo_pool", torch.float32, 1))
    facts["kernel"] = "CUDA, compiled by NVRTC"
    facts["whole layers"] = (
        "one kernel where it is faster, in float16 and bfloat16"
        if _has_layer_kernel(torch.device("cuda", index))
        else "two kernels, matrix product and pool: one needs a Hopper GPU (sm_90)"
    )


def _has_layer_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and (
        torch.cuda.get_device_capability(device) == cuda_layer.ARCHITECTURE
    )


def _check_layer_kernel(device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn(70, 3, 72, generator=generator).half()
    weight = (torch.randn(3 * 65, 72, generator=generator) / 8).half()
    h = ops.linear_fo_pool(x.to(device), weight.to(device))[0].cpu().double()
    expected = reference.fo_pool(x.double() @ weight.double().T)[0]
    difference = float((h - expected).norm() / expected.norm())
    # Written so that a NaN fails.
    if not difference <= HALF_RELATIVE_NORM["float16"]:
        raise KernelError(
            f"the kernels on {device} give wrong numbers: linear_fo_pool at (T 70, B 3, I 72, "
            f"H 65) in float16 differs from the reference by {difference:.3g} of its norm, allowed "
            f"is {HALF_RELATIVE_NORM['float16']:.0e}"
        )


def _present(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise KernelError(f"there are kernels for cpu and cuda devices, not for {device}")
    count = torch.cuda.device_count()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        built_for = torch.version.cuda or "no CUDA"
        raise KernelError(
            f"{device} is not there: torch {torch.__version__} (built for {built_for}) sees "
            f"{count} CUDA devices"
        )
    return torch.device("cuda", index)


def _compare(device: torch.device, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (got.cpu().double() - expected.double()).abs().max().item()
    # Written so that a NaN fails.
    if not difference <= FLOAT32_MAX_ABS:
        raise KernelError(
            f"the kernels on {device} give wrong numbers: {what} differs from the reference by "
            f"{difference:.3g}, allowed is {FLOAT32_MAX_ABS:.0e}. Nothing that they compute can be "
            "trusted; see `qrnn-serve doctor`"
        )
