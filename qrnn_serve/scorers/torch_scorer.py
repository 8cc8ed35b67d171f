"""Runs a torch model on packed rows: host arrays in, host arrays out. On a GPU, gpu.py does."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageFacts, StageTimes
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.scorers import memory
from qrnn_serve.scorers.gpu import GpuScorer
from qrnn_serve.scorers.graphs import PackedForward
from qrnn_serve.scorers.out_of_memory import memory_errors

# A second thread pays for itself above about this many multiplications. Below, it costs time as
# soon as another program wants its core: each operation waits for the slower thread.
_ONE_THREAD_MULTIPLICATIONS = 4_000_000


class TorchScorer:
    """A Scorer over a function on packed tensors, on the CPU.

    Args:
        forward: The function.
        schema: What it takes and gives.
        engine: Its name, for people.
        max_timesteps: Most timesteps of one batch.
        threads: CPU threads of a batch that is large enough for them, in the whole process.
        multiplications: In the matrix products of one timestep.
    """

    device = "cpu"

    def __init__(
        self,
        forward: PackedForward,
        schema: ModelSchema,
        *,
        engine: str,
        max_timesteps: int,
        threads: int,
        multiplications: int,
    ) -> None:
        self._forward: PackedForward | None = forward
        self.schema = schema
        self.engine = engine
        self.max_timesteps = max_timesteps
        self.alive = True
        self.stages: tuple[StageFacts, ...] = ()
        self._threads = threads
        self._multiplications = multiplications

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: There is no room for the batch.
        """
        if self._forward is None:
            raise RuntimeError("a closed scorer was used. This is a bug.")
        started_s = time.monotonic()
        offsets = np.zeros(rows.rows + 1, np.int64)
        np.cumsum(rows.lengths, out=offsets[1:])
        work = rows.timesteps * self._multiplications
        torch.set_num_threads(self._threads if work > _ONE_THREAD_MULTIPLICATIONS else 1)
        longest = int(np.max(rows.lengths, initial=0))
        with torch.inference_mode(), memory_errors(self.device):
            state = None if rows.state is None else _tensor(rows.state)
            values, offsets_there = _tensor(rows.values), _tensor(offsets)
            uploaded_s = time.monotonic()
            output, state = self._forward(values, offsets_there, state, longest)
        times = StageTimes(upload_s=uploaded_s - started_s, compute_s=time.monotonic() - uploaded_s)
        return ScoredRows(output=output.numpy(), state=state.numpy(), times=times)

    def interrupt(self) -> bool:
        """A thread in native code cannot be ended."""
        return False

    def close(self) -> None:
        """Let go of the model."""
        self._forward = None


def scorer_on(
    device: torch.device,
    forward: PackedForward,
    schema: ModelSchema,
    *,
    engine: str,
    max_timesteps: int,
    threads: int,
    graph_bytes: int,
    weights: Mapping[str, Tensor],
) -> TorchScorer | GpuScorer:
    """The scorer of a function whose weights are on that device.

    Args:
        device: The CPU or a GPU.
        forward: As in TorchScorer, and so on.
        schema: What it takes and gives.
        engine: Its name, for people.
        max_timesteps: Most timesteps of one batch.
        threads: As in TorchScorer; a GPU needs none.
        graph_bytes: As in GpuScorer; a CPU has no graphs.
        weights: Those that the function uses.

    Raises:
        ConfigError: The weights are elsewhere.
    """
    elsewhere = {str(tensor.device) for tensor in weights.values() if tensor.device != device}
    if elsewhere:
        raise ConfigError(f"the model was to be on {device}, and is on {sorted(elsewhere)}")
    multiplications = _multiplications_of(weights)
    if device.type == "cpu":
        return TorchScorer(
            forward,
            schema,
            engine=engine,
            max_timesteps=max_timesteps,
            threads=threads,
            multiplications=multiplications,
        )
    return GpuScorer(
        forward,
        schema,
        device=device,
        engine=engine,
        max_timesteps=max_timesteps,
        multiplications=multiplications,
        graph_bytes=graph_bytes,
    )


def find_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: It is no device of this machine, or torch cannot use it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected cpu or cuda:N, got {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"device: expected cpu or cuda:N, got {name!r}")
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "found no GPU"
        raise ConfigError(f"device {name!r} is not there: {why}; `qrnn-serve doctor` shows more")
    index = device.index or 0
    if index >= count:
        raise ConfigError(f"device {name!r} is not there: there are cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def device_max_timesteps(
    config: SequenceModelConfig, dtype: str, device: torch.device, *, portable: bool = False
) -> int:
    """The most timesteps of one batch that the device's free memory holds now."""
    return memory.most_timesteps(config, dtype, free_bytes(device), portable=portable)


def free_bytes(device: torch.device) -> int:
    """What the device has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory.free_host_bytes()


def _multiplications_of(weights: Mapping[str, Tensor]) -> int:
    """Multiplications in the matrix products of one timestep."""
    return sum(w.numel() for name, w in weights.items() if not name.startswith("embedding."))


def numpy_dtype_name(dtype: torch.dtype) -> str:
    """The numpy name of a torch dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _tensor(array: npt.NDArray[np.generic]) -> Tensor:
    # torch has no read-only tensors, so what lies in a message is copied once.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
