"""Which replicas a server has: a device each, in a process or in a thread of the server."""

from __future__ import annotations

import os
from pathlib import Path

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.types import ScorerLoader
from qrnn_serve.scorers import ScorerSpec, load_checked
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from qrnn_serve.server.config import ServerConfig


def replica_loaders(path: Path, config: ServerConfig) -> list[ScorerLoader]:
    """What loads the model at `path` as the settings say, one loader a replica.

    A loader raises ConfigError, ArtefactError or CheckpointError for what `load_scorer` refuses,
    and KernelError when the kernels on its device are missing or give wrong numbers.

    Raises:
        ConfigError: All GPUs were asked for and there are none.
    """
    devices = [device for name in config.devices for device in _expanded(name)]
    threads = config.threads or max(len(os.sched_getaffinity(0)) // len(devices), 1)
    return [_loader(_spec(path, device, threads, config), config) for device in devices]


def _spec(path: Path, device: str, threads: int, config: ServerConfig) -> ScorerSpec:
    return ScorerSpec(
        path=str(path),
        device=device,
        engine=config.engine,
        threads=threads,
        allow_unproven=config.allow_unproven,
        graph_memory_mb=config.graph_memory_mb,
    )


def _loader(spec: ScorerSpec, config: ServerConfig) -> ScorerLoader:
    if not config.runs_in_process(spec.device):
        return lambda: load_checked(spec)
    command = worker_command(spec)
    return lambda: ProcessScorer(command, start_timeout_s=config.start_timeout_s)


def _expanded(device: str) -> list[str]:
    if device != "cuda":
        return [device]
    # It takes seconds to import, and the server needs nothing else of it.
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("device 'cuda' is not there: found no GPU; `qrnn-serve doctor` says more")
    return [f"cuda:{index}" for index in range(count)]
