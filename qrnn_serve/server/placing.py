"""Which replicas a server has and where their layers are, from the settings."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.scorers import ScorerSpec
from qrnn_serve.scorers.loader import file_kind
from qrnn_serve.scorers.placement import PlacedReplica, read_placement
from qrnn_serve.scorers.planner import PlanRequest, make_plan
from qrnn_serve.scorers.planning import MODES, Plan
from qrnn_serve.server.config import ServerConfig

logger = logging.getLogger(__name__)

_PLANNED_BATCH_TIMESTEPS = 8192


def replica_specs(path: Path, config: ServerConfig) -> list[ScorerSpec]:
    """What each replica of a model loads, and where.

    Raises:
        ConfigError: A device is not there, the plan file is wrong, or the model fits nowhere.
        ArtefactError: The file is missing, or its layers cannot be placed.
    """
    devices = devices_of(config)
    if config.placement.endswith(".toml"):
        replicas = _of_file(config, devices)
    elif config.placement == "layers" or (
        config.placement == "auto" and _may_be_too_large(path, config, devices)
    ):
        plan = plan_of(path, config)
        for line in plan.as_toml().splitlines():
            logger.info("placement: %s", line)
        replicas = plan.placement.replicas
    else:
        return [_spec(path, config, device, len(devices)) for device in devices]
    count = sum(len(replica.stages) for replica in replicas)
    return [_placed_spec(path, config, replica, count) for replica in replicas]


def plan_of(path: Path, config: ServerConfig) -> Plan:
    """Measure and choose, as `auto`, `replicate` and `layers` say.

    Raises:
        ConfigError: The settings name a plan file, a device is not there, or the model fits
            nowhere.
        ArtefactError: The file is missing, or its layers cannot be placed.
    """
    try:
        mode = MODES[config.placement]
    except KeyError:
        raise ConfigError(f"placement: {config.placement} is a plan already") from None
    devices = devices_of(config)
    most = config.pool_config.batch.max_timesteps
    return make_plan(
        PlanRequest(
            path=str(path),
            devices=tuple(devices),
            mode=mode,
            batch_timesteps=min(most, _PLANNED_BATCH_TIMESTEPS),
            threads=_threads(config, len(devices)),
            memory_bytes=config.model_memory_bytes,
        )
    )


def devices_of(config: ServerConfig) -> list[str]:
    """The devices of the settings, with each GPU where all are asked for.

    Raises:
        ConfigError: All GPUs were asked for and there are none.
    """
    return [device for name in config.devices for device in _expanded(name)]


def _of_file(config: ServerConfig, devices: list[str]) -> tuple[PlacedReplica, ...]:
    replicas = read_placement(Path(config.placement)).replicas
    used = {device for replica in replicas for device in replica.devices}
    if unknown := sorted(used - set(devices)):
        raise ConfigError(
            f"{config.placement}: uses {', '.join(unknown)}, which --device does not name; it "
            f"names {', '.join(devices)}"
        )
    return replicas


def _may_be_too_large(path: Path, config: ServerConfig, devices: list[str]) -> bool:
    """Whether memory must be looked at before the model is put on every device."""
    kinds = {device.split(":")[0] for device in devices}
    if len(kinds) > 1 or config.engine not in {None, "native"}:
        # There is nothing to choose.
        return False
    if file_kind(path) == "onnx":
        return False
    return config.may_be_cut(path.stat().st_size)


def _spec(path: Path, config: ServerConfig, device: str, count: int) -> ScorerSpec:
    return ScorerSpec(
        path=str(path),
        device=device,
        engine=config.engine,
        threads=_threads(config, count),
        allow_unproven=config.allow_unproven,
        graph_memory_mb=config.graph_memory_mb,
    )


def _placed_spec(
    path: Path, config: ServerConfig, replica: PlacedReplica, count: int
) -> ScorerSpec:
    spec = _spec(path, config, replica.stages[0].device, count)
    if len(replica.stages) == 1:
        return spec
    return replace(spec, stages=replica.stages)


def _threads(config: ServerConfig, count: int) -> int:
    """CPU threads of each of `count` stages or replicas."""
    return config.threads or max(len(os.sched_getaffinity(0)) // count, 1)


def _expanded(device: str) -> list[str]:
    if device != "cuda":
        return [device]
    # It takes seconds to import, and the server needs nothing else of it.
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("device 'cuda' is not there: found no GPU; `qrnn-serve doctor` says more")
    return [f"cuda:{index}" for index in range(count)]
