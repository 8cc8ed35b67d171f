"""Loads the model of a server, and proves the kernels on its device before they score anything."""

from __future__ import annotations

from pathlib import Path

from qrnn_serve.engine.types import Scorer
from qrnn_serve.scorers import load_scorer
from qrnn_serve.server.app import ScorerLoader
from qrnn_serve.server.config import ServerConfig


def model_loader(path: Path, config: ServerConfig) -> ScorerLoader:
    """What loads the model at `path` as the settings say."""

    def load() -> Scorer:
        return load_scorer(path, config.device, config.engine, threads=config.threads)

    return load
