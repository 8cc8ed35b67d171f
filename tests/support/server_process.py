"""A real server: `python -m qrnn_serve.cli` in its own process, on a port of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_READY = "listening on "


@dataclass
class ServerProcess:
    """A server that said it is ready.

    Attributes:
        target: HOST:PORT to connect to.
        process: The process.
        log_path: Its standard error.
    """

    target: str
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(encoding="utf-8")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(_STOP_TIMEOUT_S)


def command_line(*arguments: object) -> list[str]:
    """How to run `qrnn-serve` with this interpreter."""
    return [sys.executable, "-m", "qrnn_serve.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    """The environment of a process that imports what this one imports, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_command(*arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `qrnn-serve` to its end."""
    return subprocess.run(
        command_line(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(),
    )


@contextlib.contextmanager
def server_process(
    model: Path, log_path: Path, *options: object, wrapper: tuple[str, ...] = ()
) -> Iterator[ServerProcess]:
    """Serve `model` on a free port with one CPU thread unless told; killed at the end.

    Args:
        model: The file to serve.
        log_path: Where its standard error goes.
        options: More options of the command line.
        wrapper: A command that runs it.

    Raises:
        RuntimeError: It ended, or did not become ready; the message has its log.
    """
    command = [*wrapper, *command_line(model, "--port", 0, "--threads", 1, *options)]
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
        )
    try:
        line = _first_line(process)
        if not line.startswith(_READY):
            raise RuntimeError(
                f"the server did not become ready, it printed {line!r}; its log:\n"
                f"{log_path.read_text(encoding='utf-8')}"
            )
        yield ServerProcess(line.removeprefix(_READY).strip(), process, log_path)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _first_line(process: subprocess.Popen[str]) -> str:
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True)
    reader.start()
    try:
        return lines.get(timeout=_READY_TIMEOUT_S)
    except queue.Empty:
        return "nothing in time"
