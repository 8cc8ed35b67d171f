"""A model on a GPU: shared memory that the GPU uses itself, CUDA graphs, and its own process."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest
import torch

from qrnn_serve.core.errors import ConfigError, KernelError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.engine.types import ScorerDeadError
from qrnn_serve.scorers import ScorerSpec, load_checked, load_scorer
from qrnn_serve.scorers.batch_memory import BatchLayout, BatchMemory
from qrnn_serve.scorers.graphs import BatchGraphs, Bucket
from qrnn_serve.scorers.process import ProcessScorer, worker_command
from qrnn_serve.scorers.torch_scorer import scorer_on
from support import gpu_worker
from support.artefacts import CONFIGS, packed, random_rows, scores_by_hand
from support.scorers import FEATURE_SCHEMA, whole_number_rows

BATCHES = {
    "one timestep": [1],
    "full bucket": [16, 16],
    "uneven": [3, 1, 40, 2, 2, 9, 129],
    "single steps": [1] * 33,
    "long": [5000, 5],
}


def gpu_scorer(artefacts, name, **options):
    return load_scorer(artefacts[name].paths["native"], "cuda:0", threads=1, **options)


@contextlib.contextmanager
def process(artefacts, name="features", **faults):
    spec = ScorerSpec(path=str(artefacts[name].paths["native"]), device="cuda:0")
    scorer = ProcessScorer(gpu_worker.command(spec, **faults))
    try:
        yield scorer
    finally:
        scorer.close()


def assert_same(scored, expected):
    np.testing.assert_array_equal(scored.output, expected.output, strict=True)
    np.testing.assert_array_equal(scored.state, expected.state, strict=True)


def assert_near(scored, expected):
    for got, right in ((scored.output, expected.output), (scored.state, expected.state)):
        np.testing.assert_allclose(got, right, rtol=0, atol=SAME_ROWS_FLOAT32_MAX_ABS)


def test_weights_on_another_device_are_refused():
    """A model that is not where it was asked for never serves."""
    weights = {"w": torch.zeros(2, 2, device="meta")}
    with pytest.raises(ConfigError, match=r"was to be on cpu, and is on \['meta'\]"):
        scorer_on(
            torch.device("cpu"),
            lambda *_: (torch.zeros(0), torch.zeros(0)),
            FEATURE_SCHEMA,
            engine="native",
            max_timesteps=1,
            threads=1,
            graph_bytes=0,
            weights=weights,
        )


@pytest.mark.parametrize("timesteps", [1, 2, 15, 16, 17, 32, 33, 4095, 4096, 4097])
def test_bucket_is_the_smallest_that_holds_a_batch_and_its_padding(timesteps):
    """Powers of two from 16 timesteps on; a batch that is padded has a row for it."""
    for rows in {1, 2, 3, timesteps // 2, timesteps - 1, timesteps} - {0, -1}:
        bucket = Bucket.holding(timesteps, rows)
        needed = rows + (timesteps < bucket.timesteps)
        assert bucket.timesteps >= timesteps
        assert bucket.timesteps == 16 or bucket.timesteps < 2 * timesteps
        assert needed <= bucket.rows < 2 * needed
        assert {size.bit_count() for size in bucket} == {1}


def test_memory_is_pinned_each_time_that_it_is_mapped_and_let_go_before_it_is_unmapped():
    """Pin and unpin alternate, whatever the sizes, and nothing stays pinned after the end."""
    calls = []

    def pin(memory):
        calls.append(("pin", len(memory)))
        return lambda: calls.append(("unpin", len(memory)))

    owner = BatchMemory(os.memfd_create("test"))
    memory = BatchMemory(os.dup(owner._fd), pin)
    sizes = []
    for nbytes in (5000, 5000, 90_000, 10):
        owner.make_room(nbytes)
        memory.map(owner.size)
        sizes.append(owner.size)
    memory.close()
    owner.close()

    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]
    expected = [("pin", sizes[0]), ("unpin", sizes[0]), ("pin", sizes[2]), ("unpin", sizes[2])]
    assert calls == expected


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["native", "torchscript"])
@pytest.mark.parametrize("name", CONFIGS)
def test_process_on_a_gpu_scores_as_the_reference_and_as_a_thread(artefacts, name, engine):
    """First batches, replays, states and sizes without a graph, each against float64 loops."""
    spec = ScorerSpec(path=str(artefacts[name].paths[engine]), device="cuda:0", threads=1)
    thread = load_checked(spec)
    process = ProcessScorer(worker_command(spec))
    try:
        assert (process.device, process.engine) == ("cuda:0", engine)
        for lengths in BATCHES.values():
            rows = random_rows(CONFIGS[name], lengths)
            expected = scores_by_hand(artefacts[name].model, rows)
            fresh = process.score(packed(rows))
            for _ in range(3):
                again = process.score(packed(rows))
                assert_same(again, fresh)
            np.testing.assert_allclose(fresh.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
            assert_same(thread.score(packed(rows)), fresh)
            carried = process.score(packed(rows, state=fresh.state))
            assert_same(thread.score(packed(rows, state=fresh.state)), carried)
            assert np.abs(carried.state - fresh.state).max() > 0
    finally:
        process.close()
        thread.close()


@pytest.mark.gpu
def test_model_and_its_work_are_on_the_gpu(artefacts):
    """The weights and what a batch computes take memory of the device that was asked for."""
    before = torch.cuda.memory_allocated(0)
    scorer = gpu_scorer(artefacts, "features", graph_memory_mb=0)
    weights = sum(p.nbytes for p in artefacts["features"].model.parameters())
    loaded = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    rows = packed(random_rows(CONFIGS["features"], [50_000]))
    scorer.score(rows)
    peak = torch.cuda.max_memory_allocated(0)
    scorer.close()

    assert loaded - before >= weights
    assert peak - loaded >= rows.values.nbytes * 4


@pytest.mark.gpu
def test_gpu_uses_shared_memory_without_copies(artefacts):
    """Rows and answers lie in pinned memory, in its first form and grown, and are right there."""
    scorer = gpu_scorer(artefacts, "features")
    owner = BatchMemory(os.memfd_create("test"))
    memory = BatchMemory(os.dup(owner._fd), scorer.pin)
    for lengths in ([3, 9], [20_000, 77], [5]):
        rows = packed(random_rows(CONFIGS["features"], lengths))
        layout = BatchLayout(scorer.schema, rows.rows, rows.timesteps, with_state=False)
        layout.put_rows(rows, owner.make_room(layout.nbytes))
        shared = memory.map(owner.size)
        there, place = layout.rows_in(shared), layout.place_in(shared)
        for array in (there.values, place.output, place.state):
            assert torch.from_numpy(array).is_pinned()
        scored = scorer.score_into(there, place)
        assert scored.output is place.output
        assert min(scored.times.upload_s, scored.times.compute_s, scored.times.download_s) > 0
        assert_same(place, scorer.score(rows))
        del there, place, scored
    memory.close()
    owner.close()
    scorer.close()


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_serves_all_the_same(artefacts, caplog):
    """Without pinning, which is said, the numbers are the same."""
    scorer = gpu_scorer(artefacts, "features")
    owner = BatchMemory(os.memfd_create("test"))
    rows = packed(random_rows(CONFIGS["features"], [30, 9]))
    layout = BatchLayout(scorer.schema, rows.rows, rows.timesteps, with_state=False)
    shared = owner.make_room(layout.nbytes)
    layout.put_rows(rows, shared)
    first, second = scorer.pin(shared), scorer.pin(shared)
    first()
    second()
    place = scorer.score_into(layout.rows_in(shared), layout.place_in(shared))
    owner.close()

    assert_same(place, scorer.score(rows))
    assert "cannot read shared memory itself" in caplog.text
    scorer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["native", "torchscript"])
@pytest.mark.parametrize("name", CONFIGS)
def test_replays_have_the_bits_of_eager_calls_of_their_size(artefacts, name, engine):
    """In a bucket without padding a replay is eager to the bit; with padding it is within 1e-6."""
    path = artefacts[name].paths[engine]
    graphs = load_scorer(path, "cuda:0", threads=1)
    eager = load_scorer(path, "cuda:0", threads=1, graph_memory_mb=0)
    for lengths in ([16], [7, 9], [64] * 8, [1] * 32, [15], [3, 1, 40, 2], [1] * 33, [257, 3]):
        exact = sum(lengths) in {16, 32, 512}
        first = random_rows(CONFIGS[name], lengths, seed=1)
        graphs.score(packed(first))
        replayed = graphs._graphs.replayed
        for seed in range(2, 5):
            rows = random_rows(CONFIGS[name], lengths, seed=seed)
            got, expected = graphs.score(packed(rows)), eager.score(packed(rows))
            (assert_same if exact else assert_near)(got, expected)
            got, expected = (s.score(packed(rows, expected.state)) for s in (graphs, eager))
            (assert_same if exact else assert_near)(got, expected)
        assert graphs._graphs.replayed == replayed + 6
    # [15] runs in the bucket of [7, 9].
    assert graphs._graphs.captured == 7
    assert eager._graphs.captured == eager._graphs.replayed == 0
    graphs.close()
    eager.close()


@pytest.mark.gpu
def test_padding_of_a_replay_is_dropped_and_harms_nobody(artefacts):
    """What an earlier batch left in the buffers, NaN too, is in no later answer."""
    scorer = gpu_scorer(artefacts, "features")
    eager = gpu_scorer(artefacts, "features", graph_memory_mb=0)
    nan = [np.full((length, 5), np.nan, np.float32) for length in (20, 9)]
    state = np.full((2, scorer.schema.state_size), np.nan, np.float32)
    rows = packed(random_rows(CONFIGS["features"], [17]))
    scorer.score(rows)
    for _ in range(3):
        scorer.score(packed(nan, state))
        assert_near(scorer.score(rows), eager.score(rows))
    scorer.close()
    eager.close()


@pytest.mark.gpu
def test_graphs_keep_to_their_memory_and_say_so_once(caplog):
    """Past the cap batches run without a graph, right all the same; earlier graphs go on."""
    caplog.set_level("INFO")
    device = torch.device("cuda:0")

    def doubles(values, offsets, state, longest):
        # 8 MiB that each graph keeps, as its output lies there.
        room = values.new_zeros(1 << 21)
        output = room[: 2 * len(state)].view(-1, 2)
        output.copy_(values[offsets[1:] - 1] * 2)
        return output, state + 1

    scorer = scorer_on(
        device,
        doubles,
        FEATURE_SCHEMA,
        engine="native",
        max_timesteps=1 << 20,
        threads=1,
        graph_bytes=64 << 20,
        weights={"weight": torch.ones(1, device=device)},
    )
    for length in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        for lengths in ([length], [length - 7, 7]):
            rows = whole_number_rows(lengths, seed=length, with_state=True)
            last = np.cumsum(lengths) - 1
            for _ in range(3):
                scored = scorer.score(rows)
                np.testing.assert_array_equal(scored.output, rows.values[last] * 2)
                np.testing.assert_array_equal(scored.state, rows.state + 1)
    first = [scorer.score(whole_number_rows([16])).replayed, scored.replayed]
    captured = scorer._graphs.captured
    scorer.close()

    assert first == [1, 0]
    assert 2 <= captured <= 8
    assert caplog.text.count("no more CUDA graphs") == 1


@pytest.mark.gpu
def test_model_that_cannot_be_captured_runs_eagerly(caplog):
    """That a model waits for the GPU, and so has no graph, is said once; its answers are right."""
    device = torch.device("cuda:0")

    def waits(values, offsets, state, longest):
        assert longest > 0
        scale = 1.0 if values.sum().item() is not None else 0.0
        totals = torch.cumsum(values.double(), 0)
        return totals[offsets[1:] - 1].float() * scale, state * 2.0

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        graphs = BatchGraphs(waits, FEATURE_SCHEMA, device, multiplications=1, max_bytes=1 << 28)
        rows = whole_number_rows([16], with_state=True)
        assert graphs.bucket_of(rows) == Bucket(16, 1)
        graphs.put(rows, Bucket(16, 1))
        output, state = graphs.run(rows, Bucket(16, 1))
        np.testing.assert_array_equal(output.cpu().numpy(), rows.values.sum(0, keepdims=True))
        np.testing.assert_array_equal(state.cpu().numpy(), rows.state * 2)
        after = (torch.ones(3, device=device) * 2).tolist()

    assert after == [2, 2, 2]
    assert graphs.bucket_of(rows) is None
    assert caplog.text.count("no CUDA graphs: the capture of") == 1


@pytest.mark.gpu
def test_device_without_memory_is_a_memory_error_of_one_batch(artefacts):
    """A batch past the memory raises MemoryError; those that fit are right before and after."""
    small = random_rows(CONFIGS["features"], [40, 3])
    with process(artefacts, memory_bytes=64 << 20) as scorer:
        before = scorer.score(packed(small))
        with pytest.raises(MemoryError, match="out of memory on cuda:0"):
            scorer.score(packed(random_rows(CONFIGS["features"], [1_000_000])))
        after = scorer.score(packed(small))

    expected = scores_by_hand(artefacts["features"].model, small)
    np.testing.assert_allclose(before.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
    assert_same(after, before)


@pytest.mark.gpu
def test_kernels_with_wrong_numbers_never_become_ready(artefacts):
    """The check against the reference runs on the GPU, in the process, before it says ready."""
    with (
        pytest.raises(KernelError, match="kernels on cuda:0 give wrong numbers: fo_pool"),
        process(artefacts, wrong_kernels=True),
    ):
        pass


@pytest.mark.gpu
def test_hanging_kernel_ends_with_its_process(artefacts):
    """A kernel that does not end holds up one batch; interrupt ends it, and another can start."""
    rows = random_rows(CONFIGS["features"], [4])
    with process(artefacts) as scorer:
        rows[0][0, 0] = gpu_worker.HANGS_THE_GPU
        threading.Timer(1.0, scorer.interrupt).start()
        with pytest.raises(ScorerDeadError, match="killed by SIGKILL"):
            scorer.score(packed(rows))
    rows = random_rows(CONFIGS["features"], [4])
    with process(artefacts) as scorer:
        scored = scorer.score(packed(rows))

    expected = scores_by_hand(artefacts["features"].model, rows)
    np.testing.assert_allclose(scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
