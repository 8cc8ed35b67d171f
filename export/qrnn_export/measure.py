"""Runs artefacts on saved cases in a process of its own and writes down how far they are off.

    python -m qrnn_export.measure CASES REPORT.json DEVICE[,DEVICE] ARTEFACT...

The process knows nothing of the export: an artefact that needs more than its own file, the runtime
and our operators fails here, and so does a portable one that needs our operators. It measures and
leaves the judgement to `proof`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from qrnn_export.archive_file import manifest_in
from qrnn_export.cases import Array, Case, load_cases
from qrnn_export.chain_file import ChainedFile, read_chain
from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest

Run = Callable[[Case], tuple[Array, Array]]
Load = Callable[[], tuple[Run, Manifest]]


class AbsentError(Exception):
    """What this machine lacks to run an artefact on a device."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One case on one way of running an artefact.

    Attributes:
        artefact: Name of the file.
        way: "forward", "forward_packed", "custom op", "function body", "program" or "compiled";
            on a GPU with its device, as in "forward on cuda:0".
        case: Name of the case; "" when the file could not even be loaded.
        difference: Largest absolute difference from the module, over output and state; in half
            precision the larger relative norm of the two.
        scale: How many times the tolerance is allowed: as many as the largest absolute value that
            the module gave, at least 1; in half precision, as `Case.relative_scale` says.
        problem: Why there is no difference to give; "" when there is one.
        rows: B of the case.
        timesteps: T of the case.
        seconds: That the one call took.
        by_layer: The largest difference of each layer's last cell state, and of the output.
    """

    artefact: str
    way: str
    case: str
    difference: float
    scale: float
    problem: str = ""
    rows: int = 0
    timesteps: int = 0
    seconds: float = field(default=0.0, compare=False)
    by_layer: dict[str, float] = field(default_factory=dict[str, float])


_CPU_PROVIDER, _CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


def measure(
    artefact: Path, cases: Path, devices: Sequence[str], absent: list[str]
) -> Iterator[Measurement]:
    """Run one artefact in each of its ways, on each device, on all saved cases.

    Args:
        artefact: The file.
        cases: Folder of the cases.
        devices: "cpu" or "cuda:N".
        absent: What could not be compared, and why, is added here.
    """
    for device in devices:
        for way, load in _runs(artefact, device).items():
            place = way if device == "cpu" else f"{way} on {device}"
            try:
                yield from _measure_way(artefact, place, load, cases)
            except AbsentError as error:
                absent.append(f"{artefact.name}, {place}, was not compared: {error}")


def _measure_way(artefact: Path, way: str, load: Load, cases: Path) -> Iterator[Measurement]:
    # The artefact and its last outputs, which may keep its memory, end with this function: one is
    # loaded at a time.
    try:
        run, manifest = load()
    except AbsentError:
        raise
    except Exception as error:  # whatever the runtime raises is the finding
        yield _failed(artefact, way, "", error)
        return
    for case in load_cases(cases):
        started_s = time.perf_counter()
        try:
            output, state_out = run(case)
        except Exception as error:  # as above
            yield _failed(artefact, way, case.name, error)
            continue
        seconds = time.perf_counter() - started_s
        packed = way.startswith("forward_packed") and case.output.ndim == 3
        expected = _real_timesteps(case.output, case) if packed else case.output
        pairs = [(output, expected), (state_out, case.state_out)]
        measured = compare((artefact.name, way, case.name), pairs, case.relative_scale)
        if not measured.problem:
            measured = replace(measured, by_layer=_by_layer(manifest, *pairs))
        rows, timesteps = case.input.shape[:2]
        yield replace(measured, rows=rows, timesteps=timesteps, seconds=seconds)


def _by_layer(
    manifest: Manifest, output: tuple[Array, Array], state: tuple[Array, Array]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in manifest.state:
        if part.kind == "cell":
            name, columns = f"layer {part.layer}", slice(part.start, part.stop)
            difference = _difference(state[0][:, columns], state[1][:, columns])
            found[name] = max(found.get(name, 0.0), difference)
    return {**found, "output": _difference(*output)}


def _difference(got: Array, expected: Array) -> float:
    return float(np.max(np.abs(np.subtract(got, expected)))) if got.size else 0.0


def compare(
    place: tuple[str, str, str],
    pairs: Sequence[tuple[Array, Array]],
    relative_scale: float | None = None,
) -> Measurement:
    """Measure (got, expected) pairs; another shape or dtype, or NaN, is a problem.

    Args:
        place: Artefact, way and case.
        pairs: For the output and the state.
        relative_scale: As in `Case`.
    """
    difference, scale = 0.0, relative_scale or 1.0
    for name, (got, expected) in zip(("output", "state_out"), pairs, strict=True):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            problem = (
                f"{name}: expected {expected.dtype} {list(expected.shape)}, "
                f"got {got.dtype} {list(got.shape)}"
            )
            return Measurement(*place, 0.0, scale, problem)
        if not (np.isfinite(got).all() and np.isfinite(expected).all()):
            return Measurement(*place, 0.0, scale, f"{name}: holds NaN or infinity")
        off = _difference if relative_scale is None else relative_norm
        difference = max(difference, off(got, expected))
        if got.size and relative_scale is None:
            scale = max(scale, float(np.max(np.abs(expected))))
    return Measurement(*place, difference, scale)


def relative_norm(got: Array, expected: Array) -> float:
    """|got - expected| / |expected|, in float64; 0 / 0 is 0."""
    off = np.linalg.norm(np.subtract(got, expected, dtype=np.float64))
    size = np.linalg.norm(expected.astype(np.float64))
    return float(off / size) if size else float(off and np.inf)


def main(arguments: Sequence[str]) -> None:
    """Measure the artefacts named on the command line, in that order."""
    cases, report_path, listed, *artefacts = arguments
    absent: dict[str, list[str]] = {Path(artefact).name: [] for artefact in artefacts}
    rows = [
        asdict(m)
        for path in map(Path, artefacts)
        for m in measure(path, Path(cases), listed.split(","), absent[path.name])
    ]
    Path(report_path).write_text(json.dumps({"measurements": rows, "absent": absent}))


def _runs(artefact: Path, device: str) -> dict[str, Load]:
    """The ways of running an artefact on a device, by its name."""
    kinds = {
        ".pt": _torchscript_runs,
        ".onnx": _onnx_runs,
        ".pt2": _program_runs,
        ".json": _chain_runs,
    }
    return kinds[artefact.suffix](artefact, device)


def _chain_runs(path: Path, device: str) -> dict[str, Load]:
    """Stages one after another, each with its columns of the state, in the first of their ways."""
    chain = read_chain(path)
    columns = [slice(*stage.state) for stage in chain.stages]

    def load(files: Sequence[ChainedFile]) -> tuple[Run, Manifest]:
        ways = [_runs(path.with_name(one.file), device) for one in files]
        loads = [next(iter(way.values())) for way in ways]
        runs, manifests = zip(*(one() for one in loads), strict=True)

        def run(case: Case) -> tuple[Array, Array]:
            output, states = case.input, list[Array]()
            for stage, place in zip(runs, columns, strict=True):
                state = None if case.state is None else case.state[:, place]
                output, state_out = stage(replace(case, input=output, state=state))
                states.append(state_out)
            return output, np.concatenate(states, axis=1)

        layout = [
            replace(
                part,
                layer=part.layer + stage.layers[0],
                start=part.start + stage.state[0],
                stop=part.stop + stage.state[0],
            )
            for stage, manifest in zip(chain.stages, manifests, strict=True)
            for part in manifest.state
        ]
        return run, replace(manifests[-1], state=tuple(layout))

    return {
        f"chain of {name}": lambda files=files: load(files)
        for name, files in chain.artefacts.items()
    }


def _torchscript_runs(path: Path, device: str) -> dict[str, Load]:
    import torch

    def load(way: str) -> tuple[Run, Manifest]:
        manifest = manifest_in(path)
        # A portable file must load without the qrnn:: operators; others call them by name.
        if not manifest.portable:
            import qrnn_serve.kernels.ops  # noqa: F401  (imported for the registration)
        module = torch.jit.load(str(path), map_location=device)

        def tensor(array: Array | None) -> Any:
            return None if array is None else torch.from_numpy(array).to(device)

        def run(case: Case) -> tuple[Array, Array]:
            with torch.inference_mode():
                if way == "forward":
                    given = (tensor(case.input), tensor(case.lengths), tensor(case.state))
                    output, state_out = module(*given)
                else:
                    values = tensor(_real_timesteps(case.input, case))
                    offsets = tensor(np.concatenate([[0], np.cumsum(_lengths(case))]))
                    output, state_out = module.forward_packed(values, offsets, tensor(case.state))
            return output.cpu().numpy(), state_out.cpu().numpy()

        return run, manifest

    return {way: lambda way=way: load(way) for way in ("forward", "forward_packed")}


def _program_runs(path: Path, device: str) -> dict[str, Load]:
    import torch
    from torch.export.passes import move_to_device_pass

    import qrnn_serve.kernels.ops  # noqa: F401  (imported for the registration)
    from qrnn_serve.model.program_weights import refuse_code

    manifest = manifest_in(path)

    def load() -> tuple[Run, Manifest]:
        if manifest.kind == "aot":
            if device != "cpu":
                raise AbsentError("machine code for the CPU")
            program = torch._inductor.aoti_load_package(str(path))
        else:
            refuse_code(path)
            program = move_to_device_pass(torch.export.load(str(path)), device).module()

        def run(case: Case) -> tuple[Array, Array]:
            state = case.state
            if state is None:
                state = np.zeros((len(case.input), manifest.state_size), case.state_out.dtype)
            arrays = (case.input, _lengths(case), state)
            given = [torch.from_numpy(array).to(device) for array in arrays]
            with torch.inference_mode():
                output, state_out = program(*given)
            return output.cpu().numpy(), state_out.cpu().numpy()

        return run, manifest

    return {"compiled" if manifest.kind == "aot" else "program": load}


def _onnx_runs(path: Path, device: str) -> dict[str, Load]:
    import onnxruntime

    from qrnn_serve import onnx_ops_library

    provider, settings = _CPU_PROVIDER, dict[str, str]()
    if device != "cpu":
        # The settings of the matrix products are those of torch: no TensorFloat32.
        settings = {"device_id": device.removeprefix("cuda:"), "use_tf32": "0"}
        provider = _CUDA_PROVIDER

    def load(library: str | None) -> tuple[Run, Manifest]:
        if provider not in onnxruntime.get_available_providers():
            raise AbsentError(f"this ONNX Runtime has no {provider}; install onnxruntime-gpu")
        options = onnxruntime.SessionOptions()
        # The runtime warns that `state` has a default, which is on purpose.
        options.log_severity_level = 3
        if library:
            options.register_custom_ops_library(library)
        session = onnxruntime.InferenceSession(str(path), options, providers=[(provider, settings)])
        if session.get_providers()[0] != provider:
            raise AbsentError(f"{provider} did not load; its log says which library it misses")
        text = session.get_modelmeta().custom_metadata_map[MANIFEST_KEY]
        manifest = Manifest.from_json(text, path.name)

        def run(case: Case) -> tuple[Array, Array]:
            given = {"input": case.input, "lengths": _lengths(case)}
            if case.state is not None:
                given["state"] = case.state
            output, state_out = session.run(None, given)
            return np.asarray(output), np.asarray(state_out)

        return run, manifest

    return {
        "custom op": lambda: load(onnx_ops_library()),
        "function body": lambda: load(None),
    }


def _lengths(case: Case) -> Array:
    if case.lengths is not None:
        return case.lengths
    return np.full(case.input.shape[0], case.input.shape[1], np.int64)


def _real_timesteps(padded: Array, case: Case) -> Array:
    """[B, T, ...] to [N, ...], rows laid end to end."""
    real = np.arange(padded.shape[1]) < _lengths(case)[:, None]
    return padded[real]


def _failed(artefact: Path, way: str, case: str, error: Exception) -> Measurement:
    return Measurement(artefact.name, way, case, 0.0, 1.0, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
