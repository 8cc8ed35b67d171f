"""`qrnn-serve doctor`: what is installed, what serves each device, and whether it is right."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from qrnn_serve.core.errors import ConfigError, KernelError

_LIBRARIES = (
    "qrnn-serve",
    "torch",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "onnxruntime",
    "onnxruntime-gpu",
    "grpcio",
    "protobuf",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """What was found.

    Attributes:
        text: For people.
        healthy: Whether the kernels of every device that was looked at are right.
    """

    text: str
    healthy: bool


def examine(device: str | None) -> DoctorReport:
    """Look at one device, or at the CPU and every GPU.

    Raises:
        ConfigError: That is not the name of a device.
    """
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: expected cpu or cuda:N, got {device!r}")
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{library} {version}" for library, version in _installed().items()]
    healthy = True
    for name in [device] if device is not None else _devices():
        section, right = _examine_device(name)
        lines += ["", *section]
        healthy = healthy and right
    return DoctorReport(text="\n".join(lines), healthy=healthy)


def mismatches(facts: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """The pairs of parts that disagree about CUDA, each with what to do.

    Args:
        facts: Of one GPU, as `qrnn_serve.kernels.describe` tells them.
        installed: Distribution to version.
    """
    torch_cuda = _version(facts.get("torch built for CUDA", ""))
    driver_cuda = _version(facts.get("driver supports CUDA", ""))
    compiler_cuda = _version(facts.get("nvrtc", ""))
    found: list[str] = []
    for part, needed in (("torch", torch_cuda), ("NVRTC", compiler_cuda)):
        # Within one major version an older driver runs what a newer toolkit built.
        if needed and driver_cuda and needed[0] > driver_cuda[0]:
            found.append(
                f"{part} is for CUDA {_text(needed)} but the driver supports only "
                f"{_text(driver_cuda)}: update the driver, or install {part} for CUDA "
                f"{driver_cuda[0]}"
            )
    if torch_cuda and compiler_cuda and torch_cuda[0] != compiler_cuda[0]:
        found.append(
            f"torch is for CUDA {_text(torch_cuda)} but CuPy compiles with NVRTC "
            f"{_text(compiler_cuda)}: install qrnn-serve[cuda{torch_cuda[0]}]"
        )
    for major in (12, 13):
        cupy = f"cupy-cuda{major}x"
        if cupy in installed and torch_cuda and torch_cuda[0] != major:
            found.append(
                f"torch is for CUDA {_text(torch_cuda)} but {cupy} is for CUDA {major}: "
                f"install qrnn-serve[cuda{torch_cuda[0]}]"
            )
    if {"cupy-cuda12x", "cupy-cuda13x"} <= installed.keys():
        found.append("cupy-cuda12x and cupy-cuda13x are both installed: uninstall one of them")
    return found


def _examine_device(name: str) -> tuple[list[str], bool]:
    from qrnn_serve.kernels import describe, self_check

    facts = describe(name)
    lines = [f"{fact}: {value}" for fact, value in facts.items()]
    if name.startswith("cuda"):
        lines += [f"mismatch: {pair}" for pair in mismatches(facts, _installed())]
    try:
        self_check(name)
    except KernelError as error:
        return [*lines, f"self-check: FAILED: {error}"], False
    return [*lines, "self-check: passed"], "problem" not in facts


def _devices() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _installed() -> dict[str, str]:
    versions: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
