"""Score one batch on one device and split over several, and compare times and numbers.

QRNN tensors are time-major, [T, B, H], so the batch is axis 1: nn.DataParallel must be told dim=1.
Left at its default it cuts every sequence in pieces and returns wrong numbers of the right shape.

    python examples/data_parallel.py --device cuda             one GPU against all of them
    python examples/data_parallel.py --device cpu --replicas 2

Ends with status 1 when the split changes a number by more than the project allows.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from qrnn_serve import QRNN
from qrnn_serve.core.tolerances import SAME_ROWS_FLOAT32_MAX_ABS

Scored = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Embedding and a three-layer QRNN: ids [T, B] to outputs [T, B, H] and states [3, B, H]."""

    def __init__(self, vocabulary_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, hidden_size)
        self.qrnn = QRNN(hidden_size, hidden_size, num_layers=3)

    def forward(self, ids: Tensor) -> Scored:
        """Run all timesteps of all sequences."""
        return self.qrnn(self.embedding(ids))


class ThreadReplicas(nn.Module):
    """What DataParallel(dim=1) does, for CPUs: one copy and one thread a share of the batch."""

    def __init__(self, model: nn.Module, replicas: int) -> None:
        super().__init__()
        self.replicas = [model, *(copy.deepcopy(model) for _ in range(replicas - 1))]
        self.threads = ThreadPoolExecutor(replicas)

    def forward(self, ids: Tensor) -> Scored:
        """Split axis 1, score the shares at the same time, join them on axis 1."""
        shares = ids.chunk(len(self.replicas), dim=1)
        scored = list(self.threads.map(_score, self.replicas, shares))
        outputs, states = zip(*scored, strict=True)
        return torch.cat(outputs, dim=1), torch.cat(states, dim=1)


def _score(model: nn.Module, ids: Tensor) -> Scored:
    with torch.inference_mode():
        return model(ids)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Time `run`, which must leave its result on `device`, after one warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def split_model(model: nn.Module, device: torch.device, replicas: int) -> nn.Module:
    """Return a module that splits its batch over `replicas` devices."""
    if device.type == "cuda":
        return nn.DataParallel(model, device_ids=list(range(replicas)), dim=1)
    return ThreadReplicas(model, replicas)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--replicas", type=int, help="default: every GPU, or 2 on the CPU")
    parser.add_argument("--timesteps", type=int, default=128)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args()


def main() -> int:
    """Print one line a way of running; return the exit status."""
    options = parse_arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU found; --device cpu runs the same comparison on the CPU")
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    torch.manual_seed(0)
    replicas = options.replicas or (torch.cuda.device_count() if device.type == "cuda" else 2)
    model = Encoder(options.vocabulary, options.hidden).to(device).eval()
    ids = torch.randint(options.vocabulary, (options.timesteps, options.batch), device=device)
    split = split_model(model, device, replicas)

    whole_output, whole_state = _score(model, ids)
    split_output, split_state = _score(split, ids)
    difference = max(
        float((whole_output - split_output).abs().max()),
        float((whole_state - split_state).abs().max()),
    )
    one_s = median_seconds(lambda: _score(model, ids), device, options.repeats)
    many_s = median_seconds(lambda: _score(split, ids), device, options.repeats)

    print(f"T {options.timesteps}, B {options.batch}, H {options.hidden}, 3 layers, float32")
    print(f"one {device.type}: {1000 * one_s:.2f} ms")
    print(f"split over {replicas} by batch: {1000 * many_s:.2f} ms, x{one_s / many_s:.2f}")
    print(f"largest absolute difference: {difference:.1e}")
    return 0 if difference <= SAME_ROWS_FLOAT32_MAX_ABS else 1


if __name__ == "__main__":
    sys.exit(main())
