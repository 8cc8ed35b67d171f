"""Layers placed over several devices: one stage after the other, and in overlapping pieces.

    python benchmarks/placement.py --devices cuda:0,cuda:1
    python benchmarks/placement.py --devices cpu,cpu --hidden 256 --timesteps 8192 --threads 1

Each batch is scored on the first device alone where it fits, by the stages one after the other
("naive"), in fixed numbers of pieces, and as the scorer chooses, in turns. One long sequence is cut
in time (layer by time wavefront); a full batch of uneven rows in both ways: between rows only, with
a model that pools over whole rows, and anywhere. Numbers are compared with naive placement before a
figure is kept. Writes medians and spread to benchmarks/results/placement-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.engine.types import PackedRows
from qrnn_serve.model.config import LayerConfig, Pooling, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers.costs import costs_of
from qrnn_serve.scorers.pieces import cut_pieces
from qrnn_serve.scorers.placed import PlacedScorer, place
from qrnn_serve.scorers.placement import Stage
from qrnn_serve.scorers.planning import choose, rooms_of
from qrnn_serve.scorers.torch_scorer import find_device, free_bytes

RESULTS = Path(__file__).parent / "results"
COUNTS = (4, 8, 16, 32)
TARGETS = {"one sequence": 1.6, "full batch, cut anywhere": 1.8}
Row = dict[str, object]


def make_model(options: argparse.Namespace, pooling: Pooling) -> SequenceModel:
    """Layers of one width, with small random weights."""
    torch.manual_seed(0)
    layers = tuple(LayerConfig(hidden_size=options.hidden) for _ in range(options.layers))
    stack = QRNNConfig(input_size=options.hidden, layers=layers)
    model = SequenceModel(SequenceModelConfig(qrnn=stack, pooling=pooling, head_size=8))
    return model.eval().requires_grad_(False)


def make_rows(options: argparse.Namespace, lengths: list[int]) -> PackedRows:
    """Normal values."""
    values = np.random.default_rng(0).standard_normal((sum(lengths), options.hidden), np.float32)
    return PackedRows(values=values, lengths=np.array(lengths, np.int64))


def uneven_lengths(timesteps: int, mean: int) -> list[int]:
    """Row lengths from 1 to twice the mean that add up to `timesteps`."""
    random, lengths = np.random.default_rng(1), list[int]()
    while (left := timesteps - sum(lengths)) > 0:
        lengths.append(min(int(random.integers(1, 2 * mean + 1)), left))
    return lengths


def stages_of(model: SequenceModel, options: argparse.Namespace) -> tuple[Stage, ...]:
    """The stages that the server would choose for these devices."""
    devices = options.devices.split(",")
    costs = costs_of(model, devices, 8192, options.threads)
    free = {device: free_bytes(find_device(device)) for device in devices}
    plan = choose(costs, rooms_of(devices, free, None), "layers", can_cut=True)
    print(plan.as_toml(), flush=True)
    return plan.placement.replicas[0].stages


def measure(ways: dict[str, Callable[[], object]], samples: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns, after one run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(samples + 1):
        for name, run in ways.items():
            started_s = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started_s)
    return seconds


def compare(scorer: PlacedScorer, alone: PlacedScorer, rows: PackedRows, samples: int) -> Row:
    """All ways of scoring one batch; ratios are naive over the way."""
    chosen = scorer.pieces_for(rows)
    naive = scorer.score_in(rows, 1)
    difference = 0.0
    for count in (chosen, *COUNTS):
        scored = scorer.score_in(rows, count)
        for got, want in ((scored.output, naive.output), (scored.state, naive.state)):
            difference = max(difference, float(np.abs(np.subtract(got, want)).max()))
    if not difference <= SAME_ROWS_FLOAT32_MAX_ABS:
        sys.exit(f"no figures: pieces differ from naive placement by {difference}")
    seconds = measure(
        {
            "one device": lambda: alone.score_in(rows, 1),
            "naive": lambda: scorer.score_in(rows, 1),
            "chosen": lambda: scorer.score(rows),
            **{f"{n} pieces": lambda n=n: scorer.score_in(rows, n) for n in COUNTS},
        },
        samples,
    )
    median_s = {name: statistics.median(taken) for name, taken in seconds.items()}
    offsets = np.concatenate([[0], np.cumsum(rows.lengths)])
    return {
        "rows": rows.rows,
        "timesteps": rows.timesteps,
        "chosen pieces": len(cut_pieces(offsets, chosen, in_time=scorer.schema.cuts_in_time)),
        "median s": median_s,
        "fastest s": {name: min(taken) for name, taken in seconds.items()},
        "naive over": {name: median_s["naive"] / s for name, s in median_s.items()},
        "largest difference": difference,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", default="cpu,cpu", help="in the order of the stages")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--timesteps", type=int, default=32768)
    parser.add_argument("--mean-row", type=int, default=500, help="of the full batch")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a stage")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="what is measured")
    return parser.parse_args()


def main() -> int:
    """Measure, print, write; the exit status."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    long, uneven = [options.timesteps], uneven_lengths(options.timesteps, options.mean_row)
    table: dict[str, Row] = {}
    sides: dict[Pooling, dict[str, list[int]]] = {
        "last": {"one sequence": long, "full batch, cut anywhere": uneven},
        "mean": {"full batch, cut between rows": uneven},
    }
    for pooling, batches in sides.items():
        model = make_model(options, pooling)
        stages = stages_of(model, options)
        whole = Stage(device=stages[0].device, first=0, last=options.layers - 1)
        scorer, alone = (place(model, plan, options.threads) for plan in (stages, (whole,)))
        for name, lengths in batches.items():
            row = compare(scorer, alone, make_rows(options, lengths), options.samples)
            table[name] = row | {"target": TARGETS.get(name)}
            print(name, json.dumps(row, indent=1), flush=True)
        scorer.close()
        alone.close()
    first = find_device(options.devices.split(",")[0])
    device = torch.cuda.get_device_name(first) if first.type == "cuda" else platform.processor()
    facts = {
        "device": device or platform.machine(),
        "devices": options.devices,
        "torch": torch.__version__,
        "commit": options.commit,
        "layers": options.layers,
        "hidden": options.hidden,
        "threads of a stage": options.threads,
        "samples": options.samples,
    }
    name = re.sub(r"\W+", "-", options.devices if first.type == "cpu" else f"{device}").lower()
    path = options.output / f"placement-{name}.json"
    path.write_text(json.dumps({**facts, "batches": table}, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
