"""The custom operator in real ONNX Runtime: errors, threads, sessions, memory, a fresh process."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import psutil
import pytest
import torch

from qrnn_serve import onnx_ops_library
from qrnn_serve.core.tolerances import HALF_RELATIVE_NORM, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.kernels import reference
from support.closeness import max_abs, relative_norm
from support.exported import session
from support.pool_graphs import FO_POOL, H, cast_pool_model, pool_feed, pool_model

HALF_TYPES = [
    pytest.param(torch.float16, onnx.TensorProto.FLOAT16, id="float16"),
    pytest.param(torch.bfloat16, onnx.TensorProto.BFLOAT16, id="bfloat16"),
]


def operator(settings=FO_POOL, **options):
    return session(pool_model(settings, **options).SerializeToString(), library=True)


@pytest.mark.parametrize(("dtype", "element"), HALF_TYPES)
def test_half_precision_is_computed_in_float32(dtype, element):
    """16-bit gates give the float64 result of the same rounded gates, also with f near 0.002."""
    feed = pool_feed([300, 300], 300)
    feed["gates"][..., H : 2 * H] -= 6
    runner = session(cast_pool_model(FO_POOL, element).SerializeToString(), library=True)

    hidden, cells = runner.run(None, feed)

    gates = torch.from_numpy(feed["gates"]).to(dtype).double().transpose(0, 1)
    state = torch.from_numpy(feed["c0"]).to(dtype).double()
    want_hidden, want_cells = reference.fo_pool(gates, state)
    limit = HALF_RELATIVE_NORM[str(dtype).removeprefix("torch.")]
    assert relative_norm(torch.from_numpy(hidden), want_hidden.transpose(0, 1)) <= limit
    assert relative_norm(torch.from_numpy(cells), want_cells) <= limit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gates": (2, 3, 14)}, r"gates: expected \[batch, time, 3 \* 5\].*got \[2, 3, 14\]"),
        ({"gates": (3, 15)}, "gates: expected 3 axes, got 2"),
        ({"c0": (3, H)}, "c0: expected one row for each of 2 rows of gates, got 3"),
        ({"c0": (2, 1, H)}, "c0: expected 2 axes, got 3"),
        ({"lengths": (3,)}, "lengths: expected one for each of 2 rows of gates, got 3"),
        ({"lengths": ()}, "lengths: expected 1 axes, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_shapes_are_refused(change, message):
    """A shape that does not fit is an error that names tensor, expected and got."""
    feed = pool_feed([3, 2], 3)
    for name, shape in change.items():
        feed[name] = np.ones(shape, feed[name].dtype)

    with pytest.raises(Exception, match=message):
        operator(fixed_shapes=False).run(None, feed)


@pytest.mark.parametrize("length", [-1, 4])
def test_wrong_lengths_are_refused(length):
    """A length outside 0 to T names its row; nothing is read past a row."""
    feed = pool_feed([3, 2], 3)
    feed["lengths"][1] = length

    with pytest.raises(Exception, match=rf"lengths\[1\]: expected 0 to 3, got {length}"):
        operator().run(None, feed)


@pytest.mark.parametrize("settings", [{"output_gate": 1}, {**FO_POOL, "zoneout": 1.5}])
def test_wrong_attributes_are_refused_when_the_session_is_made(settings):
    """A node that lacks attributes, or has a zoneout above 1, does not become a kernel."""
    with pytest.raises(Exception, match=r"reverse|zoneout"):
        operator(settings)


def test_a_session_works_on_after_an_error():
    """A refused call changes nothing for the next one."""
    runner, feed = operator(), pool_feed([3, 2], 3)
    want = runner.run(None, feed)

    with pytest.raises(Exception, match="lengths"):
        runner.run(None, {**feed, "lengths": np.array([9, 9], np.int64)})

    for actual, wanted in zip(runner.run(None, feed), want, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_threads_and_sessions_share_the_operator():
    """Two sessions called from eight threads give each caller its own answer, bit for bit."""
    feeds = [pool_feed([length, 40, 1], 40) for length in range(1, 33)]
    alone = [operator().run(None, feed) for feed in feeds]
    runners = [
        operator(),
        session(pool_model(FO_POOL).SerializeToString(), library=True, threads=2),
    ]

    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda job: runners[job % 2].run(None, feeds[job % 32]), range(128))
        )

    for job, answer in enumerate(answers):
        for actual, wanted in zip(answer, alone[job % 32], strict=True):
            np.testing.assert_array_equal(actual, wanted)


def test_a_row_does_not_depend_on_its_batch():
    """A row alone and in a padded batch gives the same numbers."""
    feed = pool_feed([9, 4, 7], 9)
    together, _ = operator().run(None, feed)

    for row, length in enumerate(feed["lengths"]):
        alone = {name: array[row : row + 1] for name, array in feed.items()}
        alone["gates"] = alone["gates"][:, :length]
        hidden, _ = operator().run(None, alone)
        assert max_abs(hidden[0], together[row, :length]) <= SAME_ROWS_FLOAT32_MAX_ABS


def test_thousands_of_runs_and_many_sessions_leak_nothing():
    """Memory stays where it is over runs that succeed, runs that fail, and sessions."""
    runner, feed = operator(), pool_feed([64] * 8, 64)
    wrong = {**feed, "lengths": feed["lengths"] + 1}
    model = pool_model(FO_POOL).SerializeToString()

    def work(times):
        for _ in range(times):
            runner.run(None, feed)
            with pytest.raises(Exception, match="lengths"):
                runner.run(None, wrong)
        for _ in range(times // 50):
            session(model, library=True)

    work(500)
    process = psutil.Process()
    before = process.memory_info().rss
    work(3000)
    grown = process.memory_info().rss - before

    # One leaked output of 10 kB a run would be 30 MB.
    assert grown < 4_000_000


FRESH = """
import sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
if sys.argv[3]:
    options.register_custom_ops_library(sys.argv[3])
runner = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feed = dict(numpy.load(sys.argv[2]))
numpy.savez(sys.argv[2], *runner.run(None, feed))
assert not {"torch", "qrnn_serve", "qrnn_export", "onnx"} & set(sys.modules)
"""


@pytest.mark.parametrize("with_library", [True, False])
def test_a_process_with_onnxruntime_alone_runs_the_model(with_library, tmp_path):
    """The file, the runtime and the path of the library are all that is needed."""
    feed, model = pool_feed([3, 7], 7), tmp_path / "pool.onnx"
    model.write_bytes(pool_model(FO_POOL).SerializeToString())
    np.savez(tmp_path / "feed.npz", **feed)
    library = onnx_ops_library() if with_library else ""

    command = [sys.executable, "-c", FRESH, str(model), str(tmp_path / "feed.npz"), library]
    subprocess.run(command, check=True, cwd=tmp_path)

    answers = np.load(tmp_path / "feed.npz")
    for name, wanted in zip(answers.files, operator().run(None, feed), strict=True):
        assert max_abs(answers[name], wanted) <= SAME_ROWS_FLOAT32_MAX_ABS
