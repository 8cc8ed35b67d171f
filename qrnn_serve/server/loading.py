"""Loads the model of a server, and proves the kernels on its device before they score anything."""

from __future__ import annotations

from pathlib import Path

from qrnn_serve.engine.types import Scorer
from qrnn_serve.kernels import self_check
from qrnn_serve.scorers import load_scorer
from qrnn_serve.server.app import ScorerLoader
from qrnn_serve.server.config import ServerConfig


def model_loader(path: Path, config: ServerConfig) -> ScorerLoader:
    """What loads the model at `path` as the settings say.

    The loader raises ConfigError, ArtefactError or CheckpointError for what `load_scorer` refuses,
    and KernelError when the kernels on the device are missing or give wrong numbers.
    """

    def load() -> Scorer:
        scorer = load_scorer(
            path,
            config.device,
            config.engine,
            threads=config.threads,
            allow_unproven=config.allow_unproven,
        )
        self_check(scorer.device)
        return scorer

    return load
