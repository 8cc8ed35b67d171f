"""Which layers run where, as data, and the TOML file that says it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from qrnn_serve.core.config import from_mapping
from qrnn_serve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers that follow one another, on one device.

    The embedding is with the first layer of a model, pooling and head are with its last.

    Attributes:
        device: "cpu" or "cuda:N". Two stages on one device share it.
        first: Number of its first layer, from 0.
        last: Number of its last layer.
    """

    device: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedReplica:
    """One copy of the model over a group of devices, in the order of its layers."""

    stages: tuple[Stage, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The group."""
        return tuple(stage.device for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Every copy of a model and where its layers are."""

    replicas: tuple[PlacedReplica, ...]


def read_placement(path: Path) -> Placement:
    """Read a plan file.

    Raises:
        ConfigError: It cannot be read, has an unknown, missing or wrong key, or stages that do not
            follow one another.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"placement: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"placement: {path} is not a TOML file: {error}") from error
    placement = from_mapping(Placement, content, str(path))
    if not placement.replicas:
        raise ConfigError(f"{path}: expected at least one table [[replicas]], got none")
    for number, replica in enumerate(placement.replicas):
        layers = replica.stages[-1].last + 1 if replica.stages else 0
        check_stages(replica.stages, layers, f"{path}: replicas[{number}]")
    return placement


def check_stages(stages: tuple[Stage, ...], layers: int, where: str) -> None:
    """Check that stages have every layer once, in order.

    Args:
        stages: Of one replica.
        layers: Number of layers of the model.
        where: What they are from, for messages.

    Raises:
        ConfigError: They do not, or their devices are a CPU and a GPU together.
    """
    if not stages:
        raise ConfigError(f"{where}: expected at least one stage, got none")
    expected = 0
    for number, stage in enumerate(stages):
        if stage.first != expected or stage.last < stage.first:
            raise ConfigError(
                f"{where}: stages[{number}]: expected layers from {expected} on, each stage at "
                f"least one, got {stage.first} to {stage.last}"
            )
        expected = stage.last + 1
    if expected != layers:
        raise ConfigError(
            f"{where}: the model has layers 0 to {layers - 1}, the stages have 0 to {expected - 1}"
        )
    kinds = {stage.device.split(":")[0] for stage in stages}
    if len(kinds) > 1:
        raise ConfigError(
            f"{where}: the stages of a replica are all on CPUs or all on GPUs, got "
            f"{', '.join(stage.device for stage in stages)}"
        )
