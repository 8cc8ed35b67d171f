"""Where a proof runs its artefacts: the CPU, or the devices that are asked for."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.kernels import cpu
from qrnn_serve.kernels.diagnostics import describe

CPU = "cpu"
GPU = "cuda:0"
_NAME = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class Devices:
    """What a proof compares on.

    Attributes:
        names: The name of each device's hardware, by device.
        absent: A device that is here and was not asked for.
    """

    names: dict[str, str]
    absent: tuple[str, ...] = ()


def find_devices(wanted: Sequence[str] = ()) -> Devices:
    """The devices to prove on.

    Args:
        wanted: "cpu", "cuda" or "cuda:N"; none is the CPU alone.

    Raises:
        ConfigError: A device that is wanted is not here, or its kernels do not run.
        KernelError: The library of the kernels is not built.
    """
    here = f"{platform.machine()}, {cpu.instruction_set()}"
    names: dict[str, str] = {}
    for device in wanted:
        if not _NAME.fullmatch(device):
            raise ConfigError(f"--device: expected cpu, cuda or cuda:N, got {device!r}")
        place = GPU if device == "cuda" else device
        facts = {"name": here} if place == CPU else describe(place)
        if "problem" in facts:
            raise ConfigError(f"--device {device}: {facts['problem']}")
        names[place] = facts["name"]
    if wanted:
        return Devices(names)
    facts = describe(GPU)
    why = facts.get("problem", f"--device {CPU},{GPU} does, on {facts.get('name')}")
    return Devices({CPU: here}, (f"not compared on a GPU: {why}",))
