"""This server and those that people would use instead, on one machine, in one run.

    python benchmarks/serving.py [--quick] [--peers triton,mosec] [--environments DIR]

The servers take turns on one core, with the same TorchScript file, and the callers have another.
Every answer is compared with the module in this process before a figure is told. Peers are
installed into environments of their own. Writes benchmarks/results/serving.json, .md and .png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from serving_cases import CASES, Case, inputs_of, make_model
from serving_engine import Engine
from serving_faults import FaultInputs, bad_neighbour, fault_inputs, poisons, terminated
from serving_faults import vanishing_callers as vanishing
from serving_load import Inputs, WrongNumbersError, load, wait_until_serving
from serving_report import environment, summary, write_report
from serving_servers import ALL, OURS_NAME, NotInstalledError, Peer, Server, install, start
from serving_wire import AnswerError

ROOT = Path(__file__).parents[1]
_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Turns of each server in each case.
        seconds: Of a turn.
    """

    rounds: int
    seconds: float


FULL = Plan(rounds=5, seconds=0.8)
QUICK = Plan(rounds=3, seconds=0.25)


class Field:
    """The servers. One runs at a time, the others are paused: even an idle one may poll."""

    def __init__(self, model: Path, environments: Path, folder: Path, core: int) -> None:
        self._model = model
        self._environments = environments
        self._folder = folder
        self._core = core
        self.servers: dict[str, Server] = {}

    def start(self, peer: Peer, ready: Inputs) -> None:
        """Start a server, wait until it answers a call rightly, and pause it.

        Raises:
            RuntimeError: It ended, or did not answer in time.
        """
        folder = self._folder / peer.name
        server = start(peer, self._model, self._environments, folder, self._core)
        self.servers[peer.name] = server
        until = time.monotonic() + _START_S
        while not asyncio.run(wait_until_serving(peer.wire, server.port, ready, 1.0)):
            server.check_runs()
            if time.monotonic() > until:
                raise RuntimeError(f"{peer.name} did not answer within {_START_S:g} s")
        server.pause()

    @contextlib.contextmanager
    def turn(self, server: Server) -> Generator[None, None, None]:
        """This one runs."""
        server.go_on()
        try:
            yield
        finally:
            server.pause()

    def end(self) -> None:
        """End all."""
        for server in self.servers.values():
            server.end()


def install_all(peers: Sequence[Peer], environments: Path) -> dict[str, str]:
    """Make the environments; the reasons for those that cannot be made."""
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            install(peer, environments)
        except NotInstalledError as error:
            missing[peer.name] = str(error)
            print(f"without {peer.name}: {error}", flush=True)
    return missing


def start_reason(field: Field, peer: Peer, ready: Inputs) -> dict[str, str]:
    """Start a server; the reason if it does not serve.

    Raises:
        RuntimeError: It is this project's own.
    """
    try:
        field.start(peer, ready)
    except (RuntimeError, WrongNumbersError) as error:
        if peer.package is None:
            raise
        print(f"without {peer.name}: {error}", flush=True)
        field.servers.pop(peer.name).end()
        return {peer.name: str(error)}
    return {}


def measure_case(
    case: Case, inputs: Inputs, field: Field, engine: Engine, plan: Plan
) -> dict[str, Any]:
    """All servers in turns; each one's figures of each round, or what went wrong."""
    rates: list[float] = []
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in field.servers}
    failures: dict[str, str] = {}
    for _ in range(plan.rounds):
        rates.append(engine.rate(case, inputs, plan.seconds / 2))
        for name, server in field.servers.items():
            if name in failures:
                continue
            try:
                with field.turn(server):
                    sample = asyncio.run(
                        load(
                            server.peer.wire,
                            server.port,
                            inputs,
                            callers=case.callers,
                            seconds=plan.seconds,
                            cpu_s=server.cpu_s,
                        )
                    )
            except (AnswerError, WrongNumbersError) as error:
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            figures = asdict(sample)
            figures["sequences_per_s"] = figures.pop("calls_per_s") * case.rows
            figures["cpu_us_per_sequence"] = figures.pop("cpu_ms") * 1e3 / case.rows
            rounds[name].append(figures)
    return summary(case, rates, rounds, failures, ours=OURS_NAME)


def measure_faults(field: Field, inputs: FaultInputs) -> dict[str, dict[str, Any]]:
    """What each server does to others when one caller is wrong or leaves, and at SIGTERM."""
    faults: dict[str, dict[str, Any]] = {}
    for name, server in field.servers.items():
        faults[name] = found = {}
        with field.turn(server):
            for poison, values in poisons(inputs.usual.values[0]).items():
                found[poison] = _tried(
                    bad_neighbour(server.peer.wire, server.port, inputs.usual, values)
                )
            found["callers vanish"] = _tried(vanishing(server, inputs.usual))
            found["SIGTERM"] = _tried(terminated(server, inputs.long))
        print(f"{name}: {found}", flush=True)
    return faults


def _tried(fault: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    try:
        return asyncio.run(fault)
    except (AnswerError, WrongNumbersError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Measure, write, and say whether every server was measured in every case."""
    plan = QUICK if arguments.quick else FULL
    server_core, client_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {client_core})
    torch.set_num_threads(1)
    peers = [ALL[name] for name in (OURS_NAME, *arguments.peers)]
    missing = install_all(peers, arguments.environments)
    model, file = make_model(folder)
    ready = inputs_of(model, (32,), 1)
    field = Field(file, arguments.environments, folder, server_core)
    engine = Engine(file, server_core)
    cases: list[dict[str, Any]] = []
    try:
        for peer in peers:
            if peer.name not in missing:
                print(f"starting {peer.name}", flush=True)
                missing.update(start_reason(field, peer, ready))
        for case in CASES:
            inputs = inputs_of(model, case.lengths, case.rows)
            cases.append(measure_case(case, inputs, field, engine, plan))
            print(cases[-1]["text"], flush=True)
        faults = measure_faults(field, fault_inputs(model))
    finally:
        field.end()
        engine.end()
    results = {
        "environment": environment(),
        "plan": asdict(plan),
        "servers": {
            peer.name: {"package": peer.package, "settings": peer.settings} for peer in peers
        },
        "missing": missing,
        "cases": cases,
        "faults": faults,
    }
    for path in write_report(results, arguments.output / f"serving{'-quick' * arguments.quick}"):
        print(f"wrote {path}")
    return 1 if missing or any(case["failures"] for case in cases) else 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = tuple(name for name in ALL if name != OURS_NAME)
    parser.add_argument(
        "--peers",
        type=_names_of(names),
        default=names,
        metavar="A,B",
        help=f"servers beside this one, of {','.join(names)}; none for none",
    )
    parser.add_argument("--quick", action="store_true", help="short turns; files end in -quick")
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / "build/serving-peers",
        help="folder of the peers' environments, which are kept [build/serving-peers]",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two cores, one for the server and one for the callers")
    arguments.environments = arguments.environments.resolve()
    # The servers must not outlive the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(arguments, Path(folder)))


def _names_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = () if text == "none" else tuple(text.split(","))
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"expected some of {','.join(names)}, or none; got {','.join(unknown)}"
            )
        return chosen

    return parse


if __name__ == "__main__":
    main()
