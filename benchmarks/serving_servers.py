"""The servers under test: how each is installed, started on one core, paused and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from serving_wire import KSERVE, LITSERVE, MOSEC, OURS, Wire

PEERS = Path(__file__).parent / "serving_peers"
_READY = "ready"
_EXIT_S = 40.0
_TRITON_CONFIG = """\
backend: "python"
max_batch_size: 1024
input [{ name: "input" data_type: TYPE_FP32 dims: [-1, 256] allow_ragged_batch: true }]
output [{ name: "output" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
dynamic_batching { }
"""


class NotInstalledError(Exception):
    """A peer cannot be installed here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where a server starts.

    Attributes:
        model: The TorchScript file.
        port: To listen on; the next one is free as well.
        folder: For its files.
        python: The interpreter of its environment.
        sites: The environment's own folder of packages.
    """

    model: Path
    port: int
    folder: Path
    python: Path
    sites: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A kind of server.

    Attributes:
        name: For people and `--peers`.
        package: What pip installs; None for this project.
        wire: How it is talked to.
        command: What starts it.
        variables: Environment variables that it needs beside the common ones.
        settings: For the report.
    """

    name: str
    package: str | None
    wire: Wire
    command: Callable[[Launch], list[str]]
    variables: Callable[[Launch], Mapping[str, str]] = field(default=lambda _: {})
    settings: str


def _our_command(launch: Launch) -> list[str]:
    server = Path(sys.executable).with_name("qrnn-serve")
    return [
        str(server),
        str(launch.model),
        *("--port", str(launch.port), "--threads", "1", "--log-level", "warning"),
    ]


def _app(name: str, *options: str) -> Callable[[Launch], list[str]]:
    return lambda launch: [
        str(launch.python),
        str(PEERS / name),
        *("--port", str(launch.port)),
        *options,
    ]


def _triton_command(launch: Launch) -> list[str]:
    """The tritonserver of pytriton's wheel, with a model repository written here."""
    package = launch.sites / "pytriton/tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backends, model = launch.folder / "backends", launch.folder / "models/model"
    shutil.copytree(package / "backends", backends)
    stub = package / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    (model / "1").mkdir(parents=True)
    shutil.copy(PEERS / "triton_model.py", model / "1/model.py")
    (model / "config.pbtxt").write_text(_TRITON_CONFIG)
    return [
        str(package / "bin/tritonserver"),
        *("--model-repository", str(model.parent), "--backend-directory", str(backends)),
        *("--grpc-address", "127.0.0.1", "--grpc-port", str(launch.port)),
        *("--allow-http", "false", "--allow-metrics", "false"),
    ]


def _triton_variables(launch: Launch) -> dict[str, str]:
    # The stub links to libpython, which is where the interpreter was built to look for it.
    libraries = (launch.sites / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR"))
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        # The stub embeds an interpreter, which looks there for the environment it belongs to.
        "PATH": os.pathsep.join((str(launch.python.parent), os.environ["PATH"])),
        "QRNN_PEERS": str(PEERS),
    }


PYTRITON = "nvidia-pytriton==0.7.0"
OURS_NAME = "qrnn-serve"
ALL = {
    peer.name: peer
    for peer in (
        Peer(
            name=OURS_NAME,
            package=None,
            wire=OURS,
            command=_our_command,
            settings="--threads 1, else defaults",
        ),
        Peer(
            name="triton",
            package=PYTRITON,
            wire=KSERVE,
            command=_triton_command,
            variables=_triton_variables,
            settings="Python backend, dynamic batching without delay, ragged batches",
        ),
        Peer(
            name="pytriton",
            package=PYTRITON,
            wire=KSERVE,
            command=_app("pytriton_app.py"),
            variables=_triton_variables,
            settings="@batch, dynamic batching without delay; joins equal lengths only",
        ),
        Peer(
            name="mosec",
            package="mosec==0.9.8",
            wire=MOSEC,
            command=_app(
                "mosec_app.py",
                *("--address", "127.0.0.1", "--timeout", "60000", "--log-level", "warning"),
                *("--max-request-size", str(1 << 30)),
            ),
            settings="one worker, batches of 32, wait 1 ms",
        ),
        Peer(
            name="litserve",
            package="litserve==0.2.19",
            wire=LITSERVE,
            command=_app("litserve_app.py"),
            settings="one worker, batches of 32, wait 2 ms, fast_queue, base64 in JSON",
        ),
    )
}


class Server:
    """A running server and all the processes under it."""

    def __init__(self, peer: Peer, launch: Launch, process: subprocess.Popen[bytes]) -> None:
        self.peer = peer
        self.port = launch.port
        self.log = launch.folder / "log.txt"
        self._process = process
        self._known = {psutil.Process(process.pid)}

    def check_runs(self) -> None:
        """Raise RuntimeError, with the end of its log, if it has ended."""
        if self._process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(
                f"{self.peer.name} ended with status {self._process.returncode}; its log "
                f"ends with:\n{tail}"
            )

    def pause(self) -> None:
        """Take its core away: even an idle server may poll."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def go_on(self) -> None:
        """Undo `pause`."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def terminate(self) -> None:
        """Ask it to end, as an orchestrator does: SIGTERM to its first process."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill what is left of it."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(_EXIT_S)

    def _processes(self) -> list[psutil.Process]:
        """All that were ever seen: those whose parent has ended are found by nobody else."""
        for process in list(self._known):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._known.update(process.children(recursive=True))
        return list(self._known)


@contextlib.contextmanager
def on_core(core: int) -> Generator[None, None, None]:
    """Processes that are started here stay on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(peer: Peer, model: Path, environments: Path, folder: Path, core: int) -> Server:
    """Start a server; it may not serve yet."""
    python, sites = Path(sys.executable), Path(sysconfig.get_path("purelib"))
    if peer.package is not None:
        python, sites = _environment(environments, peer.package)
    folder.mkdir(parents=True)
    launch = Launch(model=model, port=_free_port(), folder=folder, python=python, sites=sites)
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "QRNN_MODEL": str(model),
        **peer.variables(launch),
    }
    with on_core(core), (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            peer.command(launch), env=variables, stdout=log, stderr=log, cwd=folder
        )
    return Server(peer, launch, process)


def install(peer: Peer, environments: Path) -> None:
    """Make a peer's environment, unless it is there.

    torch and this project's operators are those of the running environment, behind the peer's own
    packages on the path: all sides run the same build.

    Raises:
        NotInstalledError: It cannot be made.
    """
    if peer.package is None:
        return
    python, sites = _environment(environments, peer.package)
    root = python.parent.parent
    if (root / _READY).exists():
        return
    print(f"installing {peer.package} in {root}", flush=True)
    venv.create(root, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", peer.package]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError(reasons[-1] if reasons else f"pip ended with {done.returncode}")
    shared = sysconfig.get_path("purelib")
    (sites / "zz_shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    (root / _READY).touch()


def _environment(environments: Path, package: str) -> tuple[Path, Path]:
    """Its interpreter and its folder of packages."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    root = environments / f"{package.replace('==', '-')}-py{version}"
    return root / "bin/python", root / f"lib/python{version}/site-packages"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
