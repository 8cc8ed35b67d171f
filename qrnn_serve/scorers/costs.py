"""What the layers of a model cost on a device: bytes from their sizes, seconds from a short run.

No weight is read: a layer of the same sizes takes the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from qrnn_serve.engine.types import PackedRows
from qrnn_serve.engine.warm_up import example_rows
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.parts import part_config, weight_bytes
from qrnn_serve.model.precision import empty_model, precision_of
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers import memory
from qrnn_serve.scorers.planning import LayerCosts
from qrnn_serve.scorers.schema import schema_of
from qrnn_serve.scorers.torch_scorer import find_device, numpy_dtype_name

_TIMED_ROWS = 8
_REPEATS = 7
TIMED_TIMESTEPS = {"cpu": 512, "cuda": 8192}


def stage_bytes_per_timestep(config: SequenceModelConfig, dtype: str) -> int:
    """Bytes that one timestep of a batch takes on the device of a stage.

    Beside the widest place of its layers these are what comes from the stage before and what goes
    to the next, which are kept for the whole batch.
    """
    borders = config.qrnn.input_size + config.qrnn.output_size
    return memory.bytes_per_timestep(config, dtype) + borders * np.dtype(dtype).itemsize


def costs_of(
    model: SequenceModel, devices: Sequence[str], batch_timesteps: int, threads: int
) -> LayerCosts:
    """Count and measure.

    Args:
        model: Without memory.
        devices: Where its layers may be; all CPUs or all GPUs.
        batch_timesteps: Of the batches that memory is counted for.
        threads: CPU threads of a stage.

    Raises:
        ConfigError: A device is not there.
    """
    config, dtype = model.config, numpy_dtype_name(model.edge_dtype())
    layers = len(config.qrnn.layers)
    alone = [_alone(model, layer) for layer in range(layers)]
    timed = TIMED_TIMESTEPS[find_device(devices[0]).type]
    return LayerCosts(
        weight_bytes=[weight_bytes(one) for one in alone],
        batch_bytes=lambda first, stop: (
            batch_timesteps * stage_bytes_per_timestep(part_config(config, first, stop), dtype)
        ),
        seconds={
            name: layer_seconds(alone, name, timed, threads) for name in dict.fromkeys(devices)
        },
        batch_timesteps=batch_timesteps,
        timed_timesteps=timed,
    )


def layer_seconds(
    alone: Sequence[SequenceModel], device_name: str, timesteps: int, threads: int
) -> list[float]:
    """Seconds that each layer takes for a batch; one of the sizes of another is not run again.

    Args:
        alone: The layers, each a model without memory.
        device_name: "cpu" or "cuda:N".
        timesteps: Of the batch, 8 rows.
        threads: CPU threads.
    """
    device = find_device(device_name)
    torch.set_num_threads(threads)
    known: dict[SequenceModelConfig, float] = {}
    for one in alone:
        if one.config not in known:
            known[one.config] = _seconds(one, device, timesteps)
    return [known[one.config] for one in alone]


def _alone(model: SequenceModel, layer: int) -> SequenceModel:
    made = empty_model(part_config(model.config, layer, layer + 1), precision_of(model))
    made.float32_edges = model.float32_edges
    return made


def _seconds(model: SequenceModel, device: torch.device, timesteps: int) -> float:
    schema = schema_of(
        model.config,
        dtype=numpy_dtype_name(model.edge_dtype()),
        state_size=model.state_size,
        weights_sha256="",
    )
    rows = example_rows(schema, [timesteps // _TIMED_ROWS] * _TIMED_ROWS, with_state=False)
    try:
        return _timed(_filled(model, device), rows, device)
    except (torch.OutOfMemoryError, MemoryError):
        # Whoever counts bytes finds that it does not fit.
        torch.cuda.empty_cache()
        return 0.0


def _filled(model: SequenceModel, device: torch.device) -> SequenceModel:
    """A copy with small random weights."""
    copy = empty_model(model.config, precision_of(model))
    copy.float32_edges = model.float32_edges
    copy = copy.to_empty(device=device).requires_grad_(False)
    for weight in copy.state_dict().values():
        if weight.is_floating_point():
            weight.uniform_(-0.1, 0.1)
        else:
            weight.random_(-100, 100)
    return copy


def _timed(model: SequenceModel, rows: PackedRows, device: torch.device) -> float:
    values = torch.from_numpy(np.array(rows.values)).to(device)
    offsets = np.concatenate([[0], np.cumsum(rows.lengths)])
    on_device, longest = torch.from_numpy(offsets).to(device), int(rows.lengths.max())
    taken: list[float] = []
    with torch.inference_mode():
        for _ in range(_REPEATS + 1):
            started_s = time.perf_counter()
            model.forward_packed(values, on_device, None, longest)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started_s)
    return min(taken[1:])
