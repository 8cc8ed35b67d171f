"""Compares artefacts with the module they were made from, all in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qrnn_export
import qrnn_serve
from qrnn_export.cases import Array, Case, bounded_points, random_batch, save_cases
from qrnn_export.devices import Devices, find_devices
from qrnn_export.errors import ParityError
from qrnn_export.measure import Measurement, relative_norm
from qrnn_serve.core.tolerances import (
    FLOAT32_MAX_ABS,
    GOLDEN_FLOAT64_MAX_ABS,
    HALF_RELATIVE_NORM,
)
from qrnn_serve.model.precision import HALF, convert, precision_of
from qrnn_serve.model.sequence_model import SequenceModel

_TIME_LIMIT_S = 3600


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured, and the largest difference allowed on data of unit scale.

    Attributes:
        measurements: All of them.
        tolerance: The largest difference allowed; in half precision, the largest relative norm.
        devices: Where it was measured.
        absent: For each artefact, what could not be compared, and why.
        facts: What else belongs in the proof file, such as what a conversion costs.
    """

    measurements: tuple[Measurement, ...]
    tolerance: float
    devices: Devices = field(default_factory=lambda: Devices({}))
    absent: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def limit(self, measurement: Measurement) -> float:
        """Largest difference allowed for one measurement."""
        return self.tolerance * measurement.scale

    def failures(self) -> list[Measurement]:
        """Measurements with a problem or a difference above the limit."""
        return [m for m in self.measurements if m.problem or not m.difference <= self.limit(m)]

    def measured(self, artefact: str) -> dict[str, Any]:
        """What was measured of one artefact, as plain data for its proof file."""
        rows = [
            {
                "run as": m.way,
                "case": m.case,
                "difference": m.difference,
                "allowed": self.limit(m),
                "by layer": m.by_layer,
            }
            for m in self.measurements
            if m.artefact == artefact
        ]
        return {
            "tolerance": self.tolerance,
            "devices": self.devices.names,
            "not compared": [*self.devices.absent, *self.absent.get(artefact, [])],
            "measurements": rows,
            **self.facts,
        }

    def parity(self, artefact: str) -> dict[str, float]:
        """Differences of one artefact by way and case, for its manifest."""
        return {
            f"{m.way}, {m.case}": m.difference for m in self.measurements if m.artefact == artefact
        }


def prove(
    model: SequenceModel,
    artefacts: Sequence[Path],
    directory: Path,
    cases: Iterable[Case] | None = None,
    devices: Devices | None = None,
) -> Proof:
    """Run the artefacts in a fresh process and compare them with the module.

    Args:
        model: The module, in evaluation mode on the CPU.
        artefacts: `.ts.pt`, `.onnx` and `.pt2` files.
        directory: Where to put temporary files.
        cases: What to compare on; None is `eager_cases`.
        devices: Where to run them; None is what `find_devices` finds.

    Raises:
        ParityError: A file cannot be loaded or run there, or is further off than the tolerance, or
            no device can run it.
    """
    devices = devices or find_devices()
    cases_path, report_path = directory / "cases", directory / "report.json"
    save_cases(eager_cases(model) if cases is None else cases, cases_path)
    # TorchScript first: a portable file must load where nothing has made our operators known.
    ordered = sorted(artefacts, key=lambda path: path.suffix != ".pt")
    _run_in_fresh_process([cases_path, report_path, ",".join(devices.names), *ordered])
    names = [path.name for path in artefacts]
    report = json.loads(report_path.read_text())
    rows = sorted(report["measurements"], key=lambda r: names.index(r["artefact"]))
    measurements = tuple(Measurement(**row) for row in rows)
    proof = Proof(measurements, tolerance_of(model), devices, report["absent"])
    if unproven := set(names) - {m.artefact for m in measurements}:
        why = "".join(f"\n  {line}" for name in sorted(unproven) for line in proof.absent[name])
        raise ParityError(f"artefacts that run on no device here are not proven:{why}", proof)
    if failures := proof.failures():
        listed = "".join(f"\n  {_described(proof, m)}" for m in failures[:5])
        more = f"\n  and {len(failures) - 5} more" if len(failures) > 5 else ""
        raise ParityError(f"the artefacts do not give the module's numbers:{listed}{more}", proof)
    return proof


def eager_cases(model: SequenceModel) -> Iterator[Case]:
    """The cases with the module's own answers, which may be large."""
    yield from map(answering(model), questions(model))


def questions(model: SequenceModel) -> Iterator[Case]:
    """The cases without answers."""
    dtype = np.dtype(str(model.edge_dtype()).removeprefix("torch."))
    weights = model.state_dict().items()
    products = sum(w.numel() for name, w in weights if not name.startswith("embedding."))
    for point in bounded_points(model.config, products):
        yield random_batch(model.config, model.state_size, point, dtype)


def answering(model: SequenceModel) -> Callable[[Case], Case]:
    """What gives a case the answers to compare with.

    They are the module's own. A module in half precision rounds after every operator, and an
    artefact may round elsewhere: there they are those of float32 on the same rounded weights and
    inputs, and an artefact may be as far off as the module is, and by the tolerance more.
    """
    precision = precision_of(model)
    if precision not in HALF:
        return lambda case: _with(case, *answer(model, case))
    wide = convert(model, "float32")
    half = getattr(torch, precision)

    def rounded(values: Array | None) -> Array | None:
        if values is None or values.dtype == np.int64:
            return values
        return torch.from_numpy(values).to(half).float().numpy()

    def answered(case: Case) -> Case:
        given = replace(case, input=rounded(case.input), state=rounded(case.state))
        expected = answer(wide, given)
        off = max(relative_norm(*pair) for pair in zip(answer(model, case), expected, strict=True))
        scale = 1 + off / HALF_RELATIVE_NORM[precision]
        return replace(_with(case, *expected), relative_scale=scale)

    return answered


def answer(model: SequenceModel, case: Case) -> tuple[Array, Array]:
    """The module's output and state for a case."""
    with torch.inference_mode():
        output, state_out = model(
            torch.from_numpy(case.input),
            None if case.lengths is None else torch.from_numpy(case.lengths),
            None if case.state is None else torch.from_numpy(case.state),
        )
    return output.numpy(), state_out.numpy()


def _with(case: Case, output: Array, state_out: Array) -> Case:
    return replace(case, output=output, state_out=state_out)


def tolerance_of(model: SequenceModel) -> float:
    """Largest difference allowed on data of unit scale, by precision; of half a relative norm."""
    precision = precision_of(model)
    if precision in HALF:
        return HALF_RELATIVE_NORM[precision]
    if precision != "float64":
        return FLOAT32_MAX_ABS
    config = model.config.qrnn
    zoneouts = {layer.zoneout for layer in config.layers if config.zoneout_rule == "salesforce"}
    # ONNX attributes are float32, so the zoneout of a float64 model may be rounded in the graph.
    exact = all(float(np.float32(zoneout)) == zoneout for zoneout in zoneouts)
    return GOLDEN_FLOAT64_MAX_ABS if exact else FLOAT32_MAX_ABS


def _run_in_fresh_process(arguments: Sequence[Path | str]) -> None:
    # -P: a file in the user's folder that is named like a module is not that module.
    command = [sys.executable, "-P", "-m", "qrnn_export.measure", *(str(a) for a in arguments)]
    try:
        finished = subprocess.run(  # noqa: S603  (our own module, no shell)
            command,
            env={**os.environ, "PYTHONPATH": _import_path()},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ParityError(
            f"the process that checks the artefacts was not done after {_TIME_LIMIT_S} s"
        ) from error
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines()[-15:]
        raise ParityError(
            f"the process that checks the artefacts ended with status {finished.returncode}:\n  "
            + "\n  ".join(lines)
        )


def _import_path() -> str:
    """Where our packages are, which a checkout that is not installed must tell the new process."""
    ours = [str(Path(p.__file__ or "").parent.parent) for p in (qrnn_export, qrnn_serve)]
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*dict.fromkeys(ours), *([given] if given else [])])


def _described(proof: Proof, measurement: Measurement) -> str:
    place = f"{measurement.artefact}, {measurement.way}"
    place += f", {measurement.case}" if measurement.case else ""
    if measurement.problem:
        return f"{place}: {measurement.problem}"
    limit = proof.limit(measurement)
    return f"{place}: off by {measurement.difference:.2g}, allowed {limit:.2g}"
