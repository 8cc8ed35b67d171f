"""The proof: what it measures, what it lets through and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qrnn_export import ParityError
from qrnn_export.cases import POINTS, Case, bounded_points, load_cases, random_batch, save_cases
from qrnn_export.measure import Measurement, compare
from qrnn_export.proof import Proof, eager_cases, prove, tolerance_of
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from support.exported import MODELS, make_model, write

IDS = MODELS["ids, every pooling, head"]
PLACE = ("model.onnx", "custom op", "T=1 B=1")


def test_cases_cover_the_sizes_that_break_exports():
    """One timestep, one row, a long row, uneven rows, a state or none, padding that is NaN."""
    cases = list(eager_cases(make_model(MODELS["stack windows"])))

    shapes = [case.input.shape[:2] for case in cases]
    assert (1, 1) in shapes
    assert max(t for _, t in shapes) == 500
    assert max(b for b, _ in shapes) == 65
    assert {case.state is None for case in cases} == {True, False}
    uneven = [case for case in cases if case.lengths is not None]
    assert all({1, case.input.shape[1]} <= set(case.lengths.tolist()) for case in uneven)
    assert all(np.isnan(case.input).any() for case in uneven)
    assert len({case.name for case in cases}) == len(cases) == len(POINTS)


def test_cases_come_back_from_their_file(tmp_path):
    """What the other process reads is what was saved, None included."""
    cases = list(eager_cases(make_model(IDS)))
    save_cases(cases, tmp_path / "cases")

    for got, want in zip(load_cases(tmp_path / "cases"), cases, strict=True):
        for field in dataclasses.fields(Case):
            np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name))


def test_cases_of_a_large_model_stay_small():
    """A vocabulary of 267,735 at every timestep is answered for few timesteps, not gigabytes."""
    stack = QRNNConfig(input_size=400, layers=(LayerConfig(hidden_size=400),))
    config = SequenceModelConfig(qrnn=stack, head_size=267_735)

    points = bounded_points(config, 107_000_000)

    assert max(p.timesteps * p.rows for p in points) <= 65
    assert {p.rows for p in points} == {p.rows for p in POINTS}


def arrays(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (arrays(1, np.nan), "output: holds NaN"),
        (arrays(1, np.inf), "output: holds NaN"),
        (arrays(1, 2, 3), "output: expected float32 [2], got float32 [3]"),
        (arrays(1, 2).astype(np.float64), "output: expected float32 [2], got float64 [2]"),
    ],
)
def test_other_shapes_dtypes_and_nan_are_problems(got, problem):
    """None of them is a small difference."""
    expected, state = arrays(1, 2), arrays(0)

    measured = compare(PLACE, [(got, expected), (state, state)])

    assert measured.problem.startswith(problem)


def test_difference_is_the_largest_over_output_and_state():
    """Both tensors count, and the scale is that of the module's values."""
    state = (arrays(0, 8), arrays(0.5, 8))

    measured = compare(PLACE, [(arrays(1, 2), arrays(1, 2.25)), state])

    assert (measured.difference, measured.scale, measured.problem) == (0.5, 8.0, "")


@pytest.mark.parametrize(
    ("measurement", "fails"),
    [
        (Measurement(*PLACE, 9e-6, 1.0), False),
        (Measurement(*PLACE, 1.1e-5, 1.0), True),
        (Measurement(*PLACE, 1.1e-5, 2.0), False),
        (Measurement(*PLACE, float("nan"), 1.0), True),
        (Measurement(*PLACE, 0.0, 1.0, "did not load"), True),
    ],
)
def test_what_fails(measurement, fails):
    """Beyond the tolerance at unit scale, NaN, and everything with a problem."""
    assert bool(Proof((measurement,), FLOAT32_MAX_ABS).failures()) == fails


@pytest.mark.parametrize(
    ("dtype", "zoneout", "rule", "tolerance"),
    [
        (torch.float32, 0.3, "salesforce", FLOAT32_MAX_ABS),
        (torch.float64, 0.25, "salesforce", GOLDEN_FLOAT64_MAX_ABS),
        (torch.float64, 0.3, "fastai", GOLDEN_FLOAT64_MAX_ABS),
        (torch.float64, 0.3, "salesforce", FLOAT32_MAX_ABS),
    ],
)
def test_tolerance_follows_the_dtype(dtype, zoneout, rule, tolerance):
    """float64 is held to float64, unless its zoneout does not fit in an ONNX attribute."""
    layers = (LayerConfig(hidden_size=3, zoneout=zoneout),)
    stack = QRNNConfig(input_size=2, layers=layers, zoneout_rule=rule)

    assert tolerance_of(make_model(SequenceModelConfig(qrnn=stack), dtype)) == tolerance


def test_wrong_artefacts_are_found_in_a_fresh_process(tmp_path):
    """Another model's files, a file that is no model and a good one are told apart in one run."""
    model, other = make_model(IDS), make_model(IDS)
    names = ("good.onnx", "other.onnx", "other.ts.pt", "junk.onnx")
    good, swapped, script, junk = (tmp_path / name for name in names)
    write(model, tmp_path, "onnx")[0].rename(good)
    write(other, tmp_path, "onnx")[0].rename(swapped)
    write(other, tmp_path, "torchscript")[0].rename(script)
    junk.write_bytes(b"no model")

    with pytest.raises(ParityError) as caught:
        prove(model, [good, swapped, script, junk], tmp_path)

    failures = caught.value.proof.failures()
    assert {(m.artefact, m.way) for m in failures} == {
        ("other.onnx", "custom op"),
        ("other.onnx", "function body"),
        ("other.ts.pt", "forward"),
        ("other.ts.pt", "forward_packed"),
        ("junk.onnx", "custom op"),
        ("junk.onnx", "function body"),
    }
    assert len(caught.value.proof.measurements) == 6 * len(POINTS) + 2
    assert "other.onnx, custom op, T=1 B=1: off by" in str(caught.value)


def test_a_process_that_dies_is_a_failed_proof(monkeypatch, tmp_path):
    """When the checking process cannot even start its work, its last words are shown."""
    model = make_model(MODELS["stack one"])
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))

    with pytest.raises(ParityError, match=r"(?s)ended with status 1.*Python") as caught:
        prove(model, [tmp_path / "model.onnx"], tmp_path)

    assert caught.value.proof is None


def test_points_are_the_same_batch_every_time():
    """The batch of a point does not change from process to process, nor do the bytes of a file."""
    first, second = (random_batch(IDS, 4, POINTS[5], np.float32) for _ in range(2))

    np.testing.assert_array_equal(first.input, second.input)
    np.testing.assert_array_equal(first.state, second.state)
