"""How many timesteps of one batch fit the memory of a device.

A request that passes every other check can still multiply its timesteps with the model's widths
past what the device has; on a CPU the kernel then ends the process. So there is a limit, from free
memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from qrnn_serve.model.config import SequenceModelConfig

_USABLE_SHARE = 0.5
# Beside the gates, a portable file's scan holds its tree and what it is made of, one direction at a
# time: 7 values for each of the layer's were measured.
_PORTABLE_SCAN_VALUES = 7
_CGROUP = Path("/sys/fs/cgroup")


def bytes_per_timestep(config: SequenceModelConfig, dtype: str, *, portable: bool = False) -> int:
    """Bytes that one timestep takes at the widest place of the model.

    Counted for one layer: its input, the input with its window, the gates, and the results of both
    directions twice, since one layer's results are the next one's input.
    """
    widest = 0
    directions = config.qrnn.num_directions
    for number, layer in enumerate(config.qrnn.layers):
        inputs = config.qrnn.layer_input_size(number)
        hidden = layer.hidden_size * directions
        scan = layer.hidden_size * _PORTABLE_SCAN_VALUES if portable else 0
        widest = max(widest, inputs * (1 + layer.window) + hidden * (layer.gates + 2) + scan)
    head = config.output_size if config.pooling == "none" else 0
    embedded = config.qrnn.input_size * config.ids_per_timestep
    return (widest + embedded + head) * np.dtype(dtype).itemsize


def most_timesteps(
    config: SequenceModelConfig, dtype: str, free_bytes: int, *, portable: bool = False
) -> int:
    """Timesteps that fit half of the free memory, at least 1."""
    return timesteps_in(free_bytes, bytes_per_timestep(config, dtype, portable=portable))


def timesteps_in(free_bytes: int, each: int) -> int:
    """Timesteps of `each` bytes that fit half of the free memory, at least 1."""
    return max(int(free_bytes * _USABLE_SHARE) // each, 1)


def free_host_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's if less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            # Counts the page cache too, which is given up when memory is needed.
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)
