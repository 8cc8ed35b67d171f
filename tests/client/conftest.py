"""A fake server with one model of features, and a client of it."""

from __future__ import annotations

import numpy as np
import pytest

from qrnn_client import Client, RetryPolicy
from qrnn_client.testing import FakeModel, FakeServer

INPUT_SIZE = 3
OUTPUT_SIZE = 2


def scores_of(row):
    """The scores that the fake model gives to a row: they tell every row from every other."""
    values = np.asarray(row, np.float64)
    return np.array([values.sum() + 1000 * len(values), (values**2).sum()])


@pytest.fixture
def model():
    return FakeModel(
        score=scores_of, input_size=INPUT_SIZE, output_size=OUTPUT_SIZE, state_size=4, name="sums"
    )


@pytest.fixture
def server(model):
    with FakeServer(model) as server:
        yield server


@pytest.fixture
def quick_retry():
    """Retries at once, so that tests of retries take no time."""
    return RetryPolicy(first_wait_s=1e-4, max_wait_s=1e-3, total_s=30, connect_s=10)


@pytest.fixture
def client(server, quick_retry):
    with Client(server.target, retry=quick_retry) as client:
        yield client


@pytest.fixture
def rng():
    return np.random.default_rng(20161101)


@pytest.fixture
def make_rows(rng):
    def make(*lengths, width=INPUT_SIZE, dtype=np.float32):
        return [rng.standard_normal((length, width)).astype(dtype) for length in lengths]

    return make


@pytest.fixture
def assert_scored():
    """Check that outputs are the scores of these rows, in this order."""

    def check(outputs, rows):
        expected = np.array([scores_of(row) for row in rows]).reshape(-1, OUTPUT_SIZE)
        np.testing.assert_allclose(np.array(outputs), expected, rtol=1e-6)

    return check
