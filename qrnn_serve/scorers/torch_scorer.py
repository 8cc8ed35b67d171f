"""Runs a torch model on packed rows: host arrays in, host arrays out, on one device.

On a GPU each scorer has its own stream: inputs go up from pinned memory, the model runs and results
come down on it, and the thread waits once.

Letters: B rows, N timesteps of all rows together, I input width, S state width.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageTimes
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.scorers import memory

PackedForward = Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""values [N, I] or [N], offsets [B + 1] int64, state [B, S] or None, timesteps of the longest row
-> output, state [B, S]."""

# A second thread pays for itself above about this many multiplications. Below, it costs time as
# soon as another program wants its core: each operation waits for the slower thread.
_ONE_THREAD_MULTIPLICATIONS = 4_000_000

logger = logging.getLogger(__name__)


class TorchScorer:
    """A Scorer over a function on packed tensors that lie on one device.

    Args:
        forward: The function.
        schema: What it takes and gives.
        device: Where it runs.
        engine: Its name, for people.
        max_timesteps: Most timesteps of one batch.
        threads: CPU threads of a batch that is large enough for them, in the whole process.
        multiplications: In the matrix products of one timestep.
    """

    def __init__(
        self,
        forward: PackedForward,
        schema: ModelSchema,
        *,
        device: torch.device,
        engine: str,
        max_timesteps: int,
        threads: int,
        multiplications: int,
    ) -> None:
        self._forward: PackedForward | None = forward
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # The weights came on another stream, which this one does not wait for.
            torch.cuda.synchronize(device)
        self.schema = schema
        self.device = str(device)
        self.engine = engine
        self.max_timesteps = max_timesteps
        self.alive = True
        self._threads = threads
        self._multiplications = multiplications

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: The device has no room for the batch.
        """
        if self._forward is None:
            raise RuntimeError("a closed scorer was used. This is a bug.")
        started_s = time.monotonic()
        offsets = np.zeros(rows.rows + 1, np.int64)
        np.cumsum(rows.lengths, out=offsets[1:])
        if self._stream is None:
            work = rows.timesteps * self._multiplications
            torch.set_num_threads(self._threads if work > _ONE_THREAD_MULTIPLICATIONS else 1)
        with torch.inference_mode(), self._on_stream(), _memory_errors(self._device):
            state = None if rows.state is None else self._upload(rows.state)
            values, offsets_there = self._upload(rows.values), self._upload(offsets)
            uploaded_s = time.monotonic()
            longest = int(np.max(rows.lengths, initial=0))
            output, state = self._forward(values, offsets_there, state, longest)
            host_output, host_state = self._download(output), self._download(state)
            if self._stream is not None:
                self._stream.synchronize()
        times = StageTimes(upload_s=uploaded_s - started_s, compute_s=time.monotonic() - uploaded_s)
        return ScoredRows(output=host_output.numpy(), state=host_state.numpy(), times=times)

    def interrupt(self) -> bool:
        """A thread in native code cannot be ended."""
        return False

    def close(self) -> None:
        """Let go of the model and give its device's memory back."""
        self._forward = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        if self._stream is None:
            # torch has no read-only tensors, so what lies in a message is copied once.
            return torch.from_numpy(np.require(array, requirements=["C", "W"]))
        # torch caches pinned memory and waits for the stream before it hands it out again.
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
        np.copyto(pinned.numpy(), array)
        return pinned.to(self._device, non_blocking=True)

    def _download(self, tensor: Tensor) -> Tensor:
        """A host tensor that holds the values once the stream has been waited for."""
        if self._stream is None:
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


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
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        free_bytes = memory.free_host_bytes()
    return memory.most_timesteps(config, dtype, free_bytes, portable=portable)


def multiplications_of(weights: Mapping[str, Tensor]) -> int:
    """Multiplications in the matrix products of one timestep."""
    return sum(w.numel() for name, w in weights.items() if not name.startswith("embedding."))


def numpy_dtype_name(dtype: torch.dtype) -> str:
    """The numpy name of a torch dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Out-of-memory errors as MemoryError, with torch's cached blocks given back first."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise MemoryError(f"out of memory on {device}: {error}") from error
    except RuntimeError as error:
        # The CPU allocator has no error class of its own.
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(f"out of memory on {device}: {error}") from error
