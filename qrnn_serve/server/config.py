"""The settings of `qrnn-serve`: the command line is made from this class, defaults stand here."""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from qrnn_protos.v1.limits import DEFAULT_PORT
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.batch import BatchLimits
from qrnn_serve.engine.pool import PoolConfig
from qrnn_serve.engine.queue import QueueConfig
from qrnn_serve.engine.supervision import SupervisionConfig

Engine = Literal["native", "torchscript", "onnx"]
ModelControl = Literal["watch", "rpc", "none"]
ReplicaProcesses = Literal["auto", "always", "never"]
EventLoop = Literal["auto", "asyncio", "uvloop"]
PLACEMENTS = ("auto", "replicate", "layers")
LogLevel = Literal["debug", "info", "warning", "error"]

CPU_BATCH_TIMESTEPS = 8192
GPU_BATCH_TIMESTEPS = 131072
SURELY_FITS_BYTES = 1 << 30
"""Of a model's file. With `auto`, a smaller one is put on every device without a look at their
memory, which takes seconds; where it does not fit, the replica says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How one model is served; the help text of each field is its documentation."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(
        default=DEFAULT_PORT, metadata={"help": "Port to listen on; 0 picks a free one."}
    )
    device: str = field(
        default="cpu",
        metadata={
            "help": "Where the model runs, a replica for each name: cpu, a GPU such as cuda:0, "
            "several with commas between them, or cuda for all GPUs."
        },
    )
    placement: str = field(
        default="auto",
        metadata={
            "help": "replicate: all of the model on each device; layers: one copy, its layers over "
            "all devices in their order; auto: replicate what fits and cut what does not; or a "
            "plan file, FILE.toml, as `qrnn-serve plan` prints it."
        },
    )
    replica_processes: ReplicaProcesses = field(
        default="auto",
        metadata={
            "help": "Which replicas are processes of their own, so that the server outlives what "
            "happens to them, and not threads: auto, those on GPUs."
        },
    )
    hang_timeout_s: float = field(
        default=30.0,
        metadata={
            "help": "Seconds beside 20 times the expected ones after which a replica that has not "
            "answered a batch counts as hung; a process is then killed and started again."
        },
    )
    start_timeout_s: float = field(
        default=300.0,
        metadata={"help": "Seconds that a replica's process may take to load the model."},
    )
    restart_wait_s: float = field(
        default=0.5,
        metadata={
            "help": "Seconds before a replica that failed is started again, doubled with each "
            "failure in a row, up to 30; after five failed starts in a row it is given up."
        },
    )
    engine: Engine | None = field(
        default=None, metadata={"help": "How it runs; left out, as the file's kind says."}
    )
    name: str | None = field(
        default=None,
        metadata={"help": "Name that clients ask for; left out, the file's name without endings."},
    )
    model_version: str = field(default="1", metadata={"help": "Version that replies carry."})
    threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads of a replica; left out, the cores shared among them."},
    )
    graph_memory_mb: int = field(
        default=256,
        metadata={
            "help": "MiB of each GPU's memory that CUDA graphs may take, which make small batches "
            "faster; 0 for no graphs."
        },
    )
    max_batch_timesteps: int | None = field(
        default=None,
        metadata={
            "help": f"Most timesteps of one batch, and of a piece of a longer row; left out, "
            f"{CPU_BATCH_TIMESTEPS} on a CPU and {GPU_BATCH_TIMESTEPS} on a GPU."
        },
    )
    batch_ms: float = field(
        default=50.0,
        metadata={
            "help": "Milliseconds that a batch should take; what is due next waits that long."
        },
    )
    batch_wait_ms: float = field(
        default=0.0,
        metadata={"help": "Milliseconds that an idle device waits for more rows to join a batch."},
    )
    max_batch_rows: int = field(default=4096, metadata={"help": "Most rows of one batch."})
    queue_timesteps: int = field(
        default=1 << 20, metadata={"help": "Timesteps that may wait, and of one request."}
    )
    queue_bytes: int = field(default=1 << 30, metadata={"help": "Bytes that may wait."})
    max_concurrent_calls: int = field(
        default=1024, metadata={"help": "Calls at once; more are refused."}
    )
    grace_s: float = field(
        default=30.0, metadata={"help": "Seconds that running calls get to end at shutdown."}
    )
    front_ends: int = field(
        default=1,
        metadata={
            "help": "Processes that take calls, on one port; 1 is the server itself. More pay "
            "where calls are many and small, and there are processor cores for them."
        },
    )
    event_loop: EventLoop = field(
        default="auto",
        metadata={"help": "What runs the calls: auto, uvloop where it is installed."},
    )
    reflection: bool | None = field(
        default=None,
        metadata={
            "help": "Describe the service to anyone who asks; left out, on loopback addresses only."
        },
    )
    model_control: ModelControl = field(
        default="watch",
        metadata={
            "help": "How the models of a repository change while it is served: watch, with its "
            "folders; rpc, by LoadModel and UnloadModel calls of anyone who can connect; none."
        },
    )
    watch_s: float = field(
        default=3.0, metadata={"help": "Seconds between two looks at a watched repository."}
    )
    model_memory_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Bytes that models, counted as the size of their files, may take on one "
            "device; left out, what is free on a CPU."
        },
    )
    allow_unproven: bool = field(
        default=False,
        metadata={"help": "Serve an artefact whose proof file is missing or is another file's."},
    )
    prometheus_port: int | None = field(
        default=None, metadata={"help": "Port for Prometheus metrics over HTTP."}
    )
    log_level: LogLevel = field(
        default="info", metadata={"help": "Least severe messages that are logged."}
    )

    def __post_init__(self) -> None:
        for name in ("port", "prometheus_port"):
            port = getattr(self, name)
            _check(port is None or 0 <= port <= 65535, name, port, "0 to 65535")
        for name in (
            "threads",
            "max_batch_timesteps",
            "max_batch_rows",
            "queue_timesteps",
            "queue_bytes",
            "max_concurrent_calls",
            "front_ends",
            "model_memory_bytes",
        ):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "at least 1")
        for name in ("hang_timeout_s", "start_timeout_s", "restart_wait_s", "watch_s"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for device in self.devices:
            known = re.fullmatch(r"cpu|cuda(:\d{1,4})?", device)
            _check(known is not None, "device", device, "cpu, cuda, or a GPU such as cuda:0")
        _check(
            self.placement in PLACEMENTS or self.placement.endswith(".toml"),
            "placement",
            self.placement,
            f"{', '.join(PLACEMENTS)} or the name of a .toml file",
        )
        _check(0 < self.batch_ms < math.inf, "batch_ms", self.batch_ms, "above 0")
        _check(
            0 <= self.batch_wait_ms < math.inf, "batch_wait_ms", self.batch_wait_ms, "at least 0"
        )
        _check(self.graph_memory_mb >= 0, "graph_memory_mb", self.graph_memory_mb, "at least 0")
        _check(self.grace_s >= 0, "grace_s", self.grace_s, "at least 0")
        _check(bool(self.model_version), "model_version", self.model_version, "some text")
        _check(self.name is None or bool(self.name), "name", self.name, "some text")

    def address(self, port: int) -> str:
        """`host` and a port as gRPC and people write them."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def reflects(self) -> bool:
        """Whether reflection is on."""
        if self.reflection is not None:
            return self.reflection
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def devices(self) -> tuple[str, ...]:
        """The names in `device`."""
        return tuple(name.strip() for name in self.device.split(","))

    def may_be_cut(self, nbytes: int) -> bool:
        """Whether the layers of a model whose files have that size may be over several devices."""
        if self.placement != "auto":
            return self.placement != "replicate"
        return nbytes > min(SURELY_FITS_BYTES, self.model_memory_bytes or SURELY_FITS_BYTES)

    def bytes_on_a_device(self, nbytes: int) -> int:
        """What a model whose files have that size is counted with on one device."""
        copies = max(Counter(self.devices).values())
        return copies * nbytes // (len(self.devices) if self.may_be_cut(nbytes) else 1)

    def runs_in_process(self, device: str) -> bool:
        """Whether the replica on that device is a process of its own."""
        if self.replica_processes == "auto":
            return device != "cpu"
        return self.replica_processes == "always"

    @property
    def pool_config(self) -> PoolConfig:
        """Limits of the queue, of batches and of replicas that fail."""
        # With a CPU among them, batches are small enough for it.
        default = CPU_BATCH_TIMESTEPS if "cpu" in self.devices else GPU_BATCH_TIMESTEPS
        return PoolConfig(
            queue=QueueConfig(max_timesteps=self.queue_timesteps, max_bytes=self.queue_bytes),
            batch=BatchLimits(
                target_s=self.batch_ms / 1000,
                max_timesteps=self.max_batch_timesteps or default,
                max_rows=self.max_batch_rows,
                wait_s=self.batch_wait_ms / 1000,
            ),
            supervision=SupervisionConfig(
                hang_timeout_s=self.hang_timeout_s,
                start_timeout_s=self.start_timeout_s,
                first_wait_s=self.restart_wait_s,
            ),
        )


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: expected {rule}, got {value!r}")
