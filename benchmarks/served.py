"""A real server for benchmarks: `qrnn-serve` in its own process on a free port."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_READY = "listening on "


@dataclass(frozen=True)
class Served:
    """A server that is ready.

    Attributes:
        target: HOST:PORT to connect to.
        process: The server.
        log_path: Its standard error.
    """

    target: str
    process: psutil.Popen
    log_path: Path

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(encoding="utf-8")

    def replicas(self) -> list[psutil.Process]:
        """The processes of its replicas."""
        return self.process.children()

    def metrics(self) -> dict[str, float]:
        """Its metrics by name, of all models, replicas and labels together."""
        found = re.search(r"metrics port=(\d+)", self.log)
        if found is None:
            raise RuntimeError("the server was started without --prometheus-port")
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        sums: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums


@contextlib.contextmanager
def serving(model: Path, log_path: Path, *options: object) -> Iterator[Served]:
    """Serve a file or a repository with one thread a replica; killed at the end.

    Raises:
        RuntimeError: It ended before it was ready; the message has its log.
    """
    options = ("--port", 0, "--threads", 1, "--prometheus-port", 0, *options)
    command = [sys.executable, "-m", "qrnn_serve.cli", str(model), *map(str, options)]
    with log_path.open("w", encoding="utf-8") as log:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith(_READY):
            raise RuntimeError(f"the server did not become ready: {log_path.read_text()}")
        yield Served(line.removeprefix(_READY).strip(), process, log_path)
    finally:
        if process.is_running():
            process.kill()
        process.wait()
        process.stdout.close()
