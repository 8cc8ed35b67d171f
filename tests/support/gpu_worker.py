"""A replica's process with a real model on a GPU, which a row can harm.

    python gpu_worker.py SPEC FAULTS SOCKET_FD MEMORY_FD

By a value in its features, a row

    FAULTS_THE_GPU   makes a kernel write where no memory is: the context never works again
    HANGS_THE_GPU    makes a kernel run for half a minute

FAULTS is JSON: "memory_bytes" for the device memory that torch may take beside what the model and
the warm-up of the kernels took, "wrong_kernels" for a pool that is off by a thousandth on the GPU.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.kernels import diagnostics
from qrnn_serve.scorers import ScorerSpec, load_checked
from qrnn_serve.scorers.worker import serve_scorer

FAULTS_THE_GPU, HANGS_THE_GPU = 1001.0, 1002.0
_KERNELS = r"""
extern "C" __global__ void fault() { *reinterpret_cast<volatile int*>(64) = 1; }

extern "C" __global__ void hang() {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < 30000000000ull);
}
"""


def command(spec, **faults) -> list[str]:
    """What runs it."""
    return [sys.executable, __file__, json.dumps(to_mapping(spec)), json.dumps(faults)]


def load(spec, faults):
    if "wrong_kernels" in faults:
        right = diagnostics.ops.fo_pool

        def wrong(gates, *arguments, **options):
            h, c = right(gates, *arguments, **options)
            return h + 1e-3 * gates.is_cuda, c

        diagnostics.ops.fo_pool = wrong
    scorer = load_checked(spec)
    if "memory_bytes" in faults:
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        allowed = torch.cuda.memory_reserved() + faults["memory_bytes"]
        torch.cuda.set_per_process_memory_fraction(allowed / total)
    score_into = scorer.score_into

    def score_or_harm(rows, place):
        if rows.values.dtype.kind == "f":
            for value, kernel in ((FAULTS_THE_GPU, "fault"), (HANGS_THE_GPU, "hang")):
                if (rows.values == value).any():
                    launch(kernel, scorer._stream)
        return score_into(rows, place)

    scorer.score_into = score_or_harm
    return scorer


def launch(name, stream):
    import cupy

    with cupy.cuda.ExternalStream(stream.cuda_stream):
        cupy.RawKernel(_KERNELS, name)((1,), (1,), ())


if __name__ == "__main__":
    spec, faults = from_mapping(ScorerSpec, json.loads(sys.argv[1])), json.loads(sys.argv[2])
    spec = dataclasses.replace(spec, threads=1)
    serve_scorer(lambda: load(spec, faults), int(sys.argv[3]), int(sys.argv[4]))
