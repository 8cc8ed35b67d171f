"""The ONNX operator against its own body in standard operators, and torch beside it.

    python benchmarks/onnx_op.py [--timesteps 512] [--rows 8] [--hidden 320]

Runs on the CPU with one thread and with all, and on ONNX Runtime's CUDA provider where there is
one (tensors stay on the GPU; the clock includes the runtime's own work and waits for the device).
Compares the numbers of all sides first. The sides of a ratio take turns in one run; medians.
Writes benchmarks/results/onnx-op-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

from qrnn_export.onnx_pool import (
    DOMAIN,
    DOMAIN_VERSION,
    IR_VERSION,
    OPSET_VERSION,
    POOL_OP,
    pool_function,
)
from qrnn_serve import onnx_ops_library
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.kernels import fo_pool

CUDA = "CUDAExecutionProvider"
RESULTS = Path(__file__).parent / "results"
BUDGET_S = 2.0
LEAST_SAMPLES = 7


def main() -> None:
    """Measure every device that is there, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    given = parser.parse_args()
    random = np.random.default_rng(0)
    feed = {
        "gates": random.standard_normal((given.rows, given.timesteps, 3 * given.hidden)),
        "c0": random.standard_normal((given.rows, given.hidden)),
    }
    feed = {name: value.astype(np.float32) for name, value in feed.items()}
    feed["lengths"] = np.full(given.rows, given.timesteps, np.int64)
    model = pool_model(given.hidden)
    rows: list[dict[str, Any]] = []
    for threads in sorted({1, os.cpu_count() or 1}):
        rows.append({"device": "cpu", "threads": threads, **measure_cpu(model, feed, threads)})
        print(json.dumps(rows[-1]))
    device = "cpu"
    if CUDA in onnxruntime.get_available_providers():
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name().lower())
        rows.append({"device": torch.cuda.get_device_name(), **measure_cuda(model, feed)})
        print(json.dumps(rows[-1]))
    result = {
        "what": "ai.qrnn::FoPool against its function body, and qrnn::fo_pool of torch",
        "sizes": {"T": given.timesteps, "B": given.rows, "H": given.hidden},
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "rows": rows,
    }
    path = given.output / f"onnx-op-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path)


def pool_model(hidden: int) -> bytes:
    """A model that is nothing but the operator, with its body."""
    attributes = {"output_gate": 1, "reverse": 0, "zoneout": 0.0}
    names = ["gates", "lengths", "c0"]
    node = helper.make_node(POOL_OP, names, ["h", "c"], domain=DOMAIN, **attributes)
    shapes = {
        "gates": (TensorProto.FLOAT, ["batch", "time", 3 * hidden]),
        "lengths": (TensorProto.INT64, ["batch"]),
        "c0": (TensorProto.FLOAT, ["batch", hidden]),
        "h": (TensorProto.FLOAT, ["batch", "time", hidden]),
        "c": (TensorProto.FLOAT, ["batch", hidden]),
    }
    values = {n: helper.make_tensor_value_info(n, *shape) for n, shape in shapes.items()}
    graph = helper.make_graph(
        [node], "pool", [values[n] for n in names], [values["h"], values["c"]]
    )
    opsets = [helper.make_opsetid("", OPSET_VERSION), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model = helper.make_model(
        graph, functions=[pool_function()], opset_imports=opsets, ir_version=IR_VERSION
    )
    return model.SerializeToString()


def measure_cpu(model: bytes, feed: dict[str, Any], threads: int) -> dict[str, Any]:
    """The three sides on the CPU."""
    torch.set_num_threads(threads)
    sessions = [session(model, ["CPUExecutionProvider"], threads, own) for own in (True, False)]
    gates = torch.from_numpy(feed["gates"]).transpose(0, 1)
    state = torch.from_numpy(feed["c0"])
    check(sessions, feed)
    return measure(
        {
            "operator": lambda: sessions[0].run(None, feed),
            "body": lambda: sessions[1].run(None, feed),
            "torch": lambda: fo_pool(gates, state),
        }
    )


def measure_cuda(model: bytes, feed: dict[str, Any]) -> dict[str, Any]:
    """The three sides on the first GPU."""
    sessions = [session(model, [CUDA], 1, own) for own in (True, False)]
    gates = torch.from_numpy(feed["gates"]).cuda().transpose(0, 1)
    state = torch.from_numpy(feed["c0"]).cuda()
    check(sessions, feed)
    bindings = []
    for runner in sessions:
        binding = runner.io_binding()
        for name, value in feed.items():
            on_gpu = onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", 0)
            binding.bind_ortvalue_input(name, on_gpu)
        for name in ("h", "c"):
            binding.bind_output(name, "cuda")
        bindings.append(binding)

    def of_torch() -> None:
        fo_pool(gates, state)
        torch.cuda.synchronize()

    return measure(
        {
            "operator": lambda: sessions[0].run_with_iobinding(bindings[0]),
            "body": lambda: sessions[1].run_with_iobinding(bindings[1]),
            "torch": of_torch,
        }
    )


def session(
    model: bytes, providers: list[str], threads: int, own: bool
) -> onnxruntime.InferenceSession:
    """A session with our operator, or without our library."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if own:
        options.register_custom_ops_library(onnx_ops_library())
    made = onnxruntime.InferenceSession(model, options, providers=providers)
    if made.get_providers()[0] != providers[0]:
        raise SystemExit(f"expected {providers[0]}, ONNX Runtime uses {made.get_providers()}")
    return made


def check(sessions: list[onnxruntime.InferenceSession], feed: dict[str, Any]) -> None:
    """All sides give the numbers of our operator in float64."""
    wide = [torch.from_numpy(feed[name]).double() for name in ("gates", "c0")]
    want, _ = fo_pool(wide[0].transpose(0, 1), wide[1])
    for runner in sessions:
        got = np.asarray(runner.run(["h"], feed)[0])
        difference = np.abs(got - want.transpose(0, 1).numpy()).max()
        if not difference <= FLOAT32_MAX_ABS:
            raise SystemExit(f"the numbers differ by {difference}: no speed is measured")


def measure(sides: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Median milliseconds of each side, which take turns, and the ratios to our operator."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        for _ in range(3):
            call()
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < BUDGET_S or len(samples["body"]) < LEAST_SAMPLES:
        for name, call in sides.items():
            start_s = time.perf_counter()
            call()
            samples[name].append(1e3 * (time.perf_counter() - start_s))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    spread = {
        name: [round(value, 4) for value in np.percentile(values, [10, 90])]
        for name, values in samples.items()
    }
    return {
        "median_ms": {name: round(value, 4) for name, value in medians.items()},
        "p10_p90_ms": spread,
        "body / operator": round(medians["body"] / medians["operator"], 2),
        "torch / operator": round(medians["torch"] / medians["operator"], 2),
    }


if __name__ == "__main__":
    main()
