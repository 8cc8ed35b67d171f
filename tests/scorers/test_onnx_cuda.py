"""The ONNX engine on a GPU: the right device, the kernel there, the numbers of the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from qrnn_serve import onnx_ops_library
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.kernels import reference
from qrnn_serve.scorers import load_scorer
from support.artefacts import CONFIGS, packed, random_rows, scores_by_hand
from support.pool_cases import assert_near
from support.pool_graphs import F_POOL_REVERSE, FO_POOL, cast_pool_model, pool_feed, pool_model

CUDA = "CUDAExecutionProvider"
needs_provider = pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu"
)


def session(model, *, profile=None):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnx_ops_library())
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=[(CUDA, {"use_tf32": "0"})]
    )


@pytest.mark.skipif(
    CUDA in onnxruntime.get_available_providers(), reason="this ONNX Runtime has it"
)
def test_a_runtime_without_cuda_is_refused(artefacts, monkeypatch):
    """C56: a GPU that was asked for is never answered from the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(ConfigError, match="install onnxruntime-gpu"):
        load_scorer(artefacts[next(iter(CONFIGS))].paths["onnx"], device="cuda:0", threads=1)


@pytest.mark.gpu
@needs_provider
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_the_reference(artefacts, name):
    """Every kind of model, uneven and long rows, alone and together."""
    scorer = load_scorer(artefacts[name].paths["onnx"], device="cuda:0", threads=1)
    assert scorer.device == "cuda:0"
    for lengths in ([1], [17], [3, 1, 40, 2, 2, 9, 129], [1] * 33, [700, 5]):
        rows = random_rows(CONFIGS[name], lengths)

        scored = scorer.score(packed(rows))

        expected = scores_by_hand(artefacts[name].model, rows)
        np.testing.assert_allclose(scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)


@pytest.mark.gpu
@needs_provider
def test_the_operator_runs_on_the_gpu(tmp_path):
    """The runtime's own profile says where each node ran."""
    runner = session(pool_model(FO_POOL), profile=tmp_path / "profile")
    runner.run(None, pool_feed([3, 2], 3))

    events = json.loads(Path(runner.end_profiling()).read_text(encoding="utf-8"))

    ran = {
        event["args"]["op_name"]: event["args"]["provider"]
        for event in events
        if "provider" in event.get("args", {})
    }
    assert ran["FoPool"] == CUDA


CASES = [
    (element, dtype, settings)
    for element, dtype in (
        (onnx.TensorProto.FLOAT, torch.float32),
        (onnx.TensorProto.FLOAT16, torch.float16),
        (onnx.TensorProto.BFLOAT16, torch.bfloat16),
    )
    for settings in (FO_POOL, F_POOL_REVERSE)
]


@pytest.mark.gpu
@needs_provider
@pytest.mark.parametrize(("element", "dtype", "settings"), CASES)
def test_every_dtype_is_near_the_reference(element, dtype, settings):
    """Padded rows of any length, empty ones too; NaN in the padding gives zeros."""
    runner = session(cast_pool_model(settings, element))
    for lengths, timesteps in (
        ([0, 3, 1], 3),
        ([1], 1),
        ([700, 5, 0, 64, 65], 700),
        ([10_000], 10_000),
        ([0], 4),
    ):
        feed = pool_feed(lengths, timesteps, gates=3 if settings["output_gate"] else 2)
        gates = torch.from_numpy(feed["gates"]).to(dtype).double()
        state = torch.from_numpy(feed["c0"]).to(dtype).double()

        hidden, cells = runner.run(None, feed)

        for row, length in enumerate(lengths):
            want_hidden, want_cells = reference.fo_pool(
                gates[row, :length].unsqueeze(1),
                state[row : row + 1],
                None,
                bool(settings["output_gate"]),
                bool(settings["reverse"]),
                settings["zoneout"],
            )
            got = torch.from_numpy(hidden[row, :length]).to(dtype).unsqueeze(1)
            assert_near(got, want_hidden)
            assert_near(torch.from_numpy(cells[row : row + 1]).to(dtype), want_cells)
            assert not hidden[row, length:].any()


@pytest.mark.gpu
@needs_provider
def test_sessions_and_threads_share_the_kernels():
    """C20: callers on streams of their own get their own answers, every time."""
    runners = [session(pool_model(FO_POOL)) for _ in range(2)]
    feeds = [pool_feed([length, 40], 400) for length in (400, 100, 7, 1)]
    expected = [runners[0].run(None, feed) for feed in feeds]
    wrong = []

    def work(number):
        for _ in range(50):
            got = runners[number % 2].run(None, feeds[number])
            if not all(map(np.array_equal, got, expected[number])):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(feeds))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert not wrong


@pytest.mark.gpu
@needs_provider
def test_wrong_sizes_on_a_gpu_are_refused_in_words():
    """The operator's own checks reach the caller through the runtime's status."""
    runner = session(pool_model(FO_POOL, fixed_shapes=False))
    feed = pool_feed([3, 2], 3)
    feed["c0"] = feed["c0"][:1]

    with pytest.raises(
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
        match=r"ai\.qrnn::FoPool: c0: expected one row for each of 2 rows of gates, got 1",
    ):
        runner.run(None, feed)

    feed["c0"] = pool_feed([3, 2], 3)["c0"]
    assert np.isfinite(runner.run(None, feed)[1]).all()


FAILING_COMPILER = """
import ctypes, sys
import onnxruntime
from qrnn_serve import onnx_ops_library
from support.pool_graphs import FO_POOL, pool_feed, pool_model

ctypes.CDLL(sys.argv[1])  # loaded first, so it is the compiler that the operator finds
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnx_ops_library())
runner = onnxruntime.InferenceSession(
    pool_model(FO_POOL).SerializeToString(), options, providers=["CUDAExecutionProvider"]
)
for _ in range(2):
    try:
        runner.run(None, pool_feed([3, 2], 3))
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
        print(error)
"""


@pytest.mark.gpu
@needs_provider
def test_a_kernel_that_cannot_be_compiled_is_an_error_of_the_call(tmp_path):
    """What the compiler said reaches the caller, every time, and the process goes on."""
    version = torch.version.cuda
    assert version is not None
    release = version.partition(".")[0]
    compiler = tmp_path / f"libnvrtc.so.{release}"
    source = Path(__file__).parents[1] / "kernels" / "cuda_driver_on_host.cpp"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-DQRNN_RELEASE={release}"]
    command += [f"-Wl,-soname,{compiler.name}", "-o", str(compiler), str(source), "-ldl"]
    subprocess.run(command, check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "QRNN_COMPILER_FAILS": "1",
        "QRNN_SERVE_CACHE_DIR": str(tmp_path / "cache"),
    }

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILING_COMPILER, str(compiler)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    said = f"ai.qrnn::FoPool: fo_pool: cuda:0: NVRTC {release}.0 cannot compile qrnn_"
    assert done.stdout.count(said) == 2, done.stdout + done.stderr
    assert done.stdout.count("line one") == 2
