"""The CPU kernels against a memory copy, matrix products and other recurrent layers.

    python benchmarks/cpu.py [--seconds 1] [--threads 1,2]

Runs the operators' tests first and prints no speed when they fail. Both sides of a ratio take turns
within one run, and a ratio is the median of the ratios of the turns, so that other load on the
machine meets both; "at best" compares the shortest times instead, which load spoils least. Shows
progress on stderr, prints tables and writes them to benchmarks/results/cpu.json.
docs/cpu-kernels.md says what bounds the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from qrnn_export.importer import ImportedModel
from qrnn_export.options import ExportOptions
from qrnn_export.writers import WRITERS
from qrnn_serve import QRNN, SequenceModel, onnx_ops_library
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.kernels import cpu
from qrnn_serve.model.config import SequenceModelConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/cpu.json"
TESTS = ["tests/kernels/test_cpu.py", "tests/kernels/test_ops.py"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
# T, B, H; the outputs of the last are those of a small model, in cache.
POOL_SHAPES = [(256, 64, 1024), (1024, 16, 640), (128, 32, 256)]
IN_CACHE = (16, 8)  # T, B of the part of a shape that shows what the arithmetic alone takes
MODEL_SHAPES = [(32, 8), (128, 32)]
WINDOWS = (1, 2)
WIDTH, LAYERS = 256, 2

Side = Callable[[], object]
Row = dict[str, str | float]


class Turns:
    """Times of several things that take turns, in seconds."""

    def __init__(self, sides: Mapping[str, Side], seconds: float) -> None:
        for side in sides.values():
            side()
        self.times: dict[str, list[float]] = {name: [] for name in sides}
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or len(next(iter(self.times.values()))) < 5:
            for name, side in sides.items():
                start = time.perf_counter()
                side()
                self.times[name].append(time.perf_counter() - start)

    def median(self, name: str) -> float:
        """Of one thing."""
        return statistics.median(self.times[name])

    def best(self, name: str) -> float:
        """The shortest of one thing."""
        return min(self.times[name])

    def ratio(self, above: str, below: str) -> float:
        """Median of time `above` over time `below`, turn by turn."""
        pairs = zip(self.times[above], self.times[below], strict=True)
        return statistics.median(a / b for a, b in pairs)


class Progress:
    """One line on stderr: how far, and what is measured now."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.start = steps, 0, time.perf_counter()

    def begin(self, what: str) -> None:
        """The next step."""
        self.done += 1
        seconds = time.perf_counter() - self.start
        line = f"{self.done} of {self.steps}, {seconds:.0f} s: {what}"
        print(
            f"\r{line:<70}", end="" if self.done < self.steps else "\n", file=sys.stderr, flush=True
        )


def pool_rows(seconds: float, all_threads: Sequence[int], progress: Progress) -> list[Row]:
    """The fused pool's share of a memory copy of as many bytes."""
    lengths = torch.randint(128, 385, (64,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    cases = [(shape, None) for shape in POOL_SHAPES] + [((int(offsets[-1]), 64, 1024), offsets)]
    rows = []
    for (timesteps, batch, hidden), bounds in cases:
        leading = (timesteps, batch) if bounds is None else (timesteps,)
        wide = torch.empty(*leading, 3 * hidden).normal_()
        for dtype in DTYPES:
            gates = wide.to(dtype)
            for threads in all_threads:
                progress.begin(f"pool, {list(gates.shape)} {dtype}, threads: {threads}")
                torch.set_num_threads(threads)
                rows.append(pool_row(gates, (timesteps, batch, hidden), bounds, seconds, threads))
    return sorted(rows, key=lambda row: (row["threads"], DTYPE_NAMES.index(str(row["dtype"]))))


def pool_row(
    gates: Tensor,
    shape: tuple[int, int, int],
    offsets: Tensor | None,
    seconds: float,
    threads: int,
) -> Row:
    """One shape: into outputs that are there already, and into new ones as qrnn::fo_pool does."""
    timesteps, batch, hidden = shape
    c0 = gates.new_zeros(batch, hidden)
    h, c = cpu.fo_pool(gates, c0, offsets)
    few = gates.reshape(-1, 3 * hidden)[: math.prod(IN_CACHE)].view(*IN_CACHE, -1)
    few_h, few_c = cpu.fo_pool(few)
    # The pool reads three elements and writes one; a copy of two reads two and writes two.
    source = np.ones(2 * h.numel() * h.element_size(), np.uint8)
    target = source.copy()
    with ThreadPoolExecutor(threads) as executor:

        def copy(to: np.ndarray) -> None:
            parts = zip(np.array_split(to, threads), np.array_split(source, threads), strict=True)
            list(executor.map(lambda pair: np.copyto(*pair), parts))

        turns = Turns(
            {
                "copy": lambda: copy(target),
                "pool": lambda: cpu.fo_pool_into(h, c, gates, c0, offsets),
                "in cache": lambda: cpu.fo_pool_into(few_h, few_c, few, None, None),
                "new copy": lambda: copy(np.empty_like(source)),
                "new pool": lambda: torch.ops.qrnn.fo_pool(gates, c0, offsets, True, False, 0.0),
            },
            seconds,
        )
    layout = "x".join(map(str, shape)) if offsets is None else f"packed {timesteps}x{hidden}"
    return {
        "dtype": str(gates.dtype).removeprefix("torch."),
        "T x B x H": layout,
        "threads": threads,
        "copy GB/s": 2 * source.nbytes / turns.median("copy") / 1e9,
        "pool ms": 1e3 * turns.median("pool"),
        "share of copy": turns.ratio("copy", "pool"),
        "at best": turns.best("copy") / turns.best("pool"),
        "pool ns an output": 1e9 * turns.best("pool") / h.numel(),
        "in cache": 1e9 * turns.best("in cache") / few_h.numel(),
        "new outputs ms": 1e3 * turns.median("new pool"),
        "share of new copy": turns.ratio("new copy", "new pool"),
    }


class LoopLayer(nn.Module):
    """A QRNN layer as a loop over timesteps, to be scripted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width)

    def forward(self, input: Tensor) -> Tensor:
        """[T, B, H] to [T, B, H]."""
        z, f, o = self.linear(input).chunk(3, dim=-1)
        z, f = torch.tanh(z), torch.sigmoid(f)
        cell = torch.zeros_like(z[0])
        cells: list[Tensor] = []
        for t in range(z.size(0)):
            cell = f[t] * z[t] + (1 - f[t]) * cell
            cells.append(cell)
        return torch.sigmoid(o) * torch.stack(cells)


def model_rows(seconds: float, threads: int, progress: Progress) -> list[Row]:
    """A two-layer model against its matrix products alone and against other layers."""
    rows: list[Row] = []
    for window in WINDOWS:
        for timesteps, batch in MODEL_SHAPES:
            progress.begin(f"layers, {timesteps} x {batch}, window {window}, threads: {threads}")
            sides = model_sides(timesteps, batch, window, threads)
            turns = Turns(sides, seconds)
            row: Row = {
                "T x B": f"{timesteps}x{batch}",
                "window": window,
                "threads": threads,
                "model ms": 1e3 * turns.median("model"),
                "of its products": turns.ratio("model", "products"),
            }
            for peer in list(sides)[2:]:
                row[f"{peer} / ours"] = turns.ratio(peer, "model")
            if window == 1:
                row["onnx lstm / onnx ours"] = turns.ratio("onnx lstm", "onnx ours")
            rows.append(row)
    return rows


def model_sides(timesteps: int, batch: int, window: int, threads: int) -> dict[str, Side]:
    """What takes turns: the model, its products, and layers of equal size."""
    model = QRNN(WIDTH, WIDTH, num_layers=LAYERS, window=window).eval()
    x = torch.randn(timesteps, batch, WIDTH)
    columns = [torch.randn(timesteps, batch, window * WIDTH) for _ in range(LAYERS)]
    linears = [layer.linear for layer in model.layers]

    def products() -> None:
        for linear, column in zip(linears, columns, strict=True):
            linear(column)

    lstm = nn.LSTM(WIDTH, WIDTH, LAYERS).eval()
    sides: dict[str, Side] = {
        "model": lambda: model(x),
        "products": products,
        "torch lstm": lambda: lstm(x),
    }
    if window == 1:
        loop = torch.jit.script(nn.Sequential(*[LoopLayer(WIDTH) for _ in range(LAYERS)]).eval())
        sides["scripted loop"] = lambda: loop(x)
        onnx_lstm = session(lstm_graph(lstm), threads)
        sides["onnx lstm"] = lambda: onnx_lstm.run(None, {"input": x.numpy()})
        ours = qrnn_session(model, threads)
        feeds = {
            "input": np.ascontiguousarray(x.transpose(0, 1).numpy()),
            "lengths": np.full(batch, timesteps, np.int64),
        }
        sides["onnx ours"] = lambda: ours.run(None, feeds)
    return sides


def session(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session with our operators and that many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Its threads would go on spinning while the other sides have their turns.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(onnx_ops_library())
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def qrnn_session(qrnn: QRNN, threads: int) -> onnxruntime.InferenceSession:
    """The stack as qrnn-export writes it."""
    model = SequenceModel(SequenceModelConfig(qrnn=qrnn.config)).eval()
    model.qrnn.load_state_dict(qrnn.state_dict())
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        WRITERS["onnx"](ImportedModel(model, ()), path, ExportOptions())
        return session(path.read_bytes(), threads)


def lstm_graph(lstm: nn.LSTM) -> bytes:
    """The same LSTM as nodes of ONNX, whose gates are in the order i, o, f, c."""
    nodes, weights, value = [], [], "input"
    for layer in range(LAYERS):
        parameters = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w, r, *biases = [_onnx_order(getattr(lstm, f"{name}_l{layer}")) for name in parameters]
        names = [f"{name}{layer}" for name in "WRB"]
        for name, part in zip(names, (w, r, torch.cat(biases)), strict=True):
            weights.append(numpy_helper.from_array(part.detach()[None].numpy(), name))
        axis = numpy_helper.from_array(np.array([1]), f"axis{layer}")
        weights.append(axis)
        nodes.append(helper.make_node("LSTM", [value, *names], [f"Y{layer}"], hidden_size=WIDTH))
        value = f"output{layer}"
        nodes.append(helper.make_node("Squeeze", [f"Y{layer}", axis.name], [value]))
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "lstm",
        [helper.make_tensor_value_info("input", kind, ["T", "B", WIDTH])],
        [helper.make_tensor_value_info(value, kind, ["T", "B", WIDTH])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def _onnx_order(tensor: Tensor) -> Tensor:
    i, f, c, o = tensor.chunk(4)
    return torch.cat([i, o, f, c])


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Aligned text; numbers with three digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns]
    lines += [[_shown(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _shown(value: str | float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, str]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "processor": f"{len(models)} x {models[0]}" if models else platform.machine(),
        "instruction set": cpu.instruction_set(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Run the tests, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of a table")
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--note", default="", help="kept in the results: what else ran meanwhile")
    options = parser.parse_args()
    all_threads = [int(number) for number in options.threads.split(",")]
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "logical", *TESTS]
    if subprocess.run(tests, cwd=ROOT, check=False).returncode:
        sys.exit("The operators' tests fail: their speed means nothing.")
    keep_freed_memory()  # as the server does, for all sides
    pool_cases = (len(POOL_SHAPES) + 1) * len(DTYPES)
    progress = Progress((pool_cases + len(WINDOWS) * len(MODEL_SHAPES)) * len(all_threads))
    model: list[Row] = []
    with torch.inference_mode():
        pool = pool_rows(options.seconds, all_threads, progress)
        for threads in all_threads:
            torch.set_num_threads(threads)
            model += model_rows(options.seconds, threads, progress)
    facts = machine() | {"note": options.note}
    print_table("qrnn::fo_pool against a memory copy of as many bytes", pool)
    print_table(f"{LAYERS} layers of {WIDTH}, float32", model)
    RESULTS.write_text(json.dumps({"machine": facts, "pool": pool, "model": model}, indent=1))
    print(f"\n{facts}\nwritten to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
