"""How each replica's model is loaded: in a process of its own, or in a thread of the server."""

from __future__ import annotations

from pathlib import Path

from qrnn_serve.engine.types import ScorerLoader
from qrnn_serve.scorers import ScorerSpec, load_checked
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.placing import replica_specs


def replica_loaders(path: Path, config: ServerConfig) -> list[ScorerLoader]:
    """What loads the model at `path` as the settings say, one loader a replica.

    A loader raises ConfigError, ArtefactError or CheckpointError for what `load_scorer` refuses,
    and KernelError when the kernels on its device are missing or give wrong numbers.

    Raises:
        ConfigError: All GPUs were asked for and there are none, the plan file is wrong, or the
            model fits nowhere.
        ArtefactError: The file is missing, or its layers cannot be placed.
    """
    return [_loader(spec, config) for spec in replica_specs(path, config)]


def _loader(spec: ScorerSpec, config: ServerConfig) -> ScorerLoader:
    if not config.runs_in_process(spec.device):
        return lambda: load_checked(spec)
    command = worker_command(spec)
    return lambda: ProcessScorer(command, start_timeout_s=config.start_timeout_s)
