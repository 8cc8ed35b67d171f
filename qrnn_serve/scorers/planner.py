"""From a file and devices to a plan. On GPUs in a process of its own, which leaves no memory taken.

python -m qrnn_serve.scorers.planner REQUEST      prints the plan, or the error, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ConfigError, ReplicaError
from qrnn_serve.scorers.loader import file_kind
from qrnn_serve.scorers.packets import Kind, Packet, error_of, failed
from qrnn_serve.scorers.planning import Mode, Plan, choose, rooms_of

_FAILED_STATUS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        path: The model's file.
        devices: Where it may run, in the order in which stages follow one another.
        mode: "replicate" puts the model on each, "layers" one over all, "auto" decides.
        batch_timesteps: Of the batches that memory is counted for.
        threads: CPU threads of a stage.
        memory_bytes: Most bytes of weights on one device; None for what is free.
    """

    path: str
    devices: tuple[str, ...]
    mode: Mode
    batch_timesteps: int
    threads: int
    memory_bytes: int | None = None


def make_plan(request: PlanRequest) -> Plan:
    """Read what the model is, measure its layers on the devices, and choose.

    Raises:
        ConfigError: A device is not there, or the model fits nowhere.
        ArtefactError: The file is damaged, not one of ours, or not one that can be cut.
        CheckpointError: The same of a checkpoint.
    """
    if any(device != "cpu" for device in request.devices):
        return _apart(request)
    return _here(request)


def _here(request: PlanRequest) -> Plan:
    # torch takes seconds to import; whoever only replicates needs no plan.
    from qrnn_serve.model.parts import can_be_cut
    from qrnn_serve.scorers.costs import costs_of
    from qrnn_serve.scorers.native import describe_model
    from qrnn_serve.scorers.torch_scorer import find_device, free_bytes

    path = Path(request.path)
    kind = file_kind(path)
    if kind == "onnx":
        raise ConfigError(
            f"placement: the layers of {path}, an ONNX file, cannot be placed; serve the "
            "checkpoint, a .ts.pt or a .pt2 file, or use --placement replicate"
        )
    free = {device: free_bytes(find_device(device)) for device in dict.fromkeys(request.devices)}
    model = describe_model(path, kind)
    costs = costs_of(model, request.devices, request.batch_timesteps, request.threads)
    rooms = rooms_of(request.devices, free, request.memory_bytes)
    return choose(costs, rooms, request.mode, can_cut=can_be_cut(model.config))


def _apart(request: PlanRequest) -> Plan:
    command = [sys.executable, "-P", "-m", "qrnn_serve.scorers.planner"]
    done = subprocess.run(  # noqa: S603  our own interpreter and module
        [*command, json.dumps(to_mapping(request))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == _FAILED_STATUS:
        raise error_of(Packet(Kind.FAILED, text=done.stdout))
    if done.returncode != 0:
        raise ReplicaError(f"planning ended with status {done.returncode}; the log says why")
    return from_mapping(Plan, json.loads(done.stdout))


def main(arguments: Sequence[str]) -> int:
    """Print the plan of a request; the exit status."""
    try:
        plan = _here(from_mapping(PlanRequest, json.loads(arguments[0])))
    except Exception as error:  # whatever it is, it is told to whoever asked
        sys.stdout.write(failed(error).text)
        return _FAILED_STATUS
    sys.stdout.write(json.dumps(to_mapping(plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
