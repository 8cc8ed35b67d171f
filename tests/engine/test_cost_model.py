"""The cost model: what it finds, how it learns, and what it does not let itself be told."""

from __future__ import annotations

from dataclasses import astuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from qrnn_serve.engine.cost_model import CostModel, CostTerms, Launch

SHAPES = [
    shape
    for n in (1, 2, 8, 32, 128, 512, 2048)
    for shape in ((n, min(n, 100), -(-n // 50)), (n, n, 1), (n, 1, n))
]


def launches_of(terms, shapes=SHAPES, noise=None):
    model = CostModel(terms)
    noise = np.ones(len(shapes)) if noise is None else noise
    return [
        Launch(timesteps=n, longest=t, rows=b, seconds=float(model.seconds(n, t, b) * factor))
        for (n, t, b), factor in zip(shapes, noise, strict=True)
    ]


terms = st.builds(
    CostTerms,
    fixed=st.floats(1e-5, 1e-2),
    per_timestep=st.sampled_from([0.0, 1e-7, 1e-5, 1e-4]),
    per_longest=st.sampled_from([0.0, 1e-6, 1e-4]),
    per_row=st.sampled_from([0.0, 1e-6, 1e-4]),
)


@settings(max_examples=50, deadline=None)
@given(terms)
def test_fit_finds_the_terms_of_exact_times(terms):
    """Times that follow the formula give its terms back, zeros included."""
    fitted = CostModel.fit(launches_of(terms)).terms

    np.testing.assert_allclose(astuple(fitted), astuple(terms), rtol=1e-6, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seconds=st.lists(st.floats(0, 10), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_fit_is_never_negative(seconds):
    """Whatever was measured, no term is negative, so a larger batch is never predicted faster."""
    launches = [
        Launch(timesteps=n, longest=t, rows=b, seconds=s)
        for (n, t, b), s in zip(SHAPES, seconds, strict=True)
    ]

    fitted = CostModel.fit(launches)

    assert min(astuple(fitted.terms)) >= 0
    assert sum(astuple(fitted.terms)) > 0


def test_fit_beats_every_other_choice_of_terms():
    """No point near the fit, nor a plain fit with negatives cut off, has a smaller error."""
    random = np.random.default_rng(0)
    truth = CostTerms(fixed=1e-3, per_timestep=1e-5, per_longest=0.0, per_row=1e-6)
    launches = launches_of(truth, noise=random.uniform(0.7, 1.4, len(SHAPES)))
    seconds = np.array([launch.seconds for launch in launches])
    shapes = np.array([[1, *shape] for shape in SHAPES], float)
    larger = (shapes[None] >= shapes[:, None]).all(axis=2)
    seconds = np.where(larger, seconds, np.inf).min(axis=1)

    def error(x):
        return np.square(shapes @ x / seconds - 1).sum()

    fitted = np.array(astuple(CostModel.fit(launches).terms))
    plain = np.linalg.lstsq(shapes / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]

    assert error(fitted) <= error(np.maximum(plain, 0)) + 1e-12
    for _ in range(500):
        other = np.maximum(fitted * random.uniform(0.9, 1.1, 4) + 1e-9 * random.random(4), 0)
        assert error(fitted) <= error(other)


def test_fit_ignores_launches_that_were_held_up():
    """A small launch that took as long as a large one says nothing about small launches."""
    truth = CostTerms(fixed=1e-3, per_timestep=1e-5, per_longest=0.0, per_row=1e-6)
    noise = np.ones(len(SHAPES))
    noise[[3, 7, 10]] = 20.0

    fitted = CostModel.fit(launches_of(truth, noise=noise))

    for n, t, b in SHAPES:
        assert fitted.seconds(n, t, b) == pytest.approx(CostModel(truth).seconds(n, t, b), rel=0.35)


def test_fit_of_one_launch_predicts_it():
    """A warm-up that got no further than one size is enough to serve."""
    launch = Launch(timesteps=1, longest=1, rows=1, seconds=0.25)

    assert CostModel.fit([launch]).seconds(1, 1, 1) == pytest.approx(0.25)


@pytest.mark.parametrize("factor", [0.25, 4.0], ids=["faster", "slower"])
def test_record_follows_a_device_that_changed(factor):
    """After 150 batches of mixed sizes the predictions are those of the new speed."""
    before = CostTerms(fixed=1e-3, per_timestep=1e-5, per_longest=0.0, per_row=1e-6)
    after = CostTerms(
        fixed=factor * 1e-3, per_timestep=factor * 1e-5, per_longest=0.0, per_row=factor * 1e-6
    )
    model, random = CostModel(before), np.random.default_rng(1)
    for launch in launches_of(after, [SHAPES[i] for i in random.integers(0, len(SHAPES), 150)]):
        model.record(launch)

    for n, t, b in SHAPES:
        assert model.seconds(n, t, b) == pytest.approx(CostModel(after).seconds(n, t, b), rel=0.1)


@settings(max_examples=100, deadline=None)
@given(terms, st.sampled_from(SHAPES), st.sampled_from([1e-9, 1e-3, 0.5, 2.0, 1e3, 1e9]))
def test_one_odd_batch_moves_predictions_by_little(terms, shape, factor):
    """A batch that stalled for an hour changes no prediction by more than 7.2 percent."""
    model = CostModel(terms)
    before = [model.seconds(*other) for other in SHAPES]
    assume(before[0] > 1e-6)
    model.record(
        Launch(
            timesteps=shape[0],
            longest=shape[1],
            rows=shape[2],
            seconds=float(model.seconds(*shape) * factor),
        )
    )

    for old, other in zip(before, SHAPES, strict=True):
        assert 1 / 1.072 <= model.seconds(*other) / old <= 1.072


def test_record_stays_within_bounds():
    """A clock gone wrong cannot make a batch look free or endless."""
    terms = CostTerms(fixed=1e-3, per_timestep=1e-5, per_longest=0.0, per_row=1e-6)
    for seconds in (0.0, 1e9):
        model = CostModel(terms)
        for _ in range(1000):
            model.record(Launch(timesteps=100, longest=10, rows=10, seconds=seconds))
        ratio = model.seconds(100, 10, 10) / CostModel(terms).seconds(100, 10, 10)
        assert 1 / 33 < ratio < 33


def test_work_shares_the_fixed_cost_over_full_batches():
    """Work of ten batches costs ten launches; it is linear, so parts sum to the whole."""
    terms = CostTerms(fixed=0.01, per_timestep=0.001, per_longest=0.5, per_row=0.0)
    model = CostModel(terms)

    assert model.work_s(400, 10, batch_s=0.05) == pytest.approx(10 * 0.05)
    assert model.work_s(40, 1, batch_s=0.05) == pytest.approx(0.05)
