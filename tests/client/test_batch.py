"""Cutting rows into calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrnn_client import Batching, InputError
from qrnn_client._batch import cut, refuse_oversized
from qrnn_client._checks import check_rows
from qrnn_client._models import Catalogue
from qrnn_client._plan import Options, row_sizes
from support.client_wire import make_info

sizes = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), max_size=60)
limits = st.builds(
    Batching,
    max_bytes=st.integers(1, 500),
    max_timesteps=st.integers(1, 200),
    max_rows=st.integers(1, 20),
)


def fits(rows, batching):
    return (
        sum(size for size, _ in rows) <= batching.max_bytes
        and sum(timesteps for _, timesteps in rows) <= batching.max_timesteps
        and len(rows) <= batching.max_rows
    )


@given(rows=sizes, batching=limits)
def test_cut_covers_each_row_once_within_the_limits(rows, batching):
    """Calls hold every row once and in order, keep to the limits, and are as full as they allow."""
    row_bytes = np.array([size for size, _ in rows], np.int64)
    timesteps = np.array([length for _, length in rows], np.int64)

    parts = list(cut(row_bytes, timesteps, batching))

    places = [place for part in parts for place in range(part.start, part.stop)]
    assert places == list(range(len(rows)))
    for number, part in enumerate(parts):
        assert part.stop - part.start == 1 or fits(rows[part], batching)
        if number + 1 < len(parts):
            assert not fits(rows[part.start : part.stop + 1], batching)


@pytest.mark.parametrize("per_timestep", [False, True])
@pytest.mark.parametrize("return_state", [False, True])
def test_row_sizes_count_the_larger_message(per_timestep, return_state, make_rows):
    """A row's size is that of the request or of the reply, whichever is larger."""
    info = make_info(input_size=3, output_size=11, output_per_timestep=per_timestep, state_size=5)
    rows = check_rows(make_rows(1, 4, 40), info)

    sizes = row_sizes(rows, info, Options(return_state=return_state))

    lengths = np.array([1, 4, 40])
    request = lengths * 3 * 4 + 8
    reply = (lengths if per_timestep else 1) * 11 * 4 + return_state * 5 * 4 + 16
    np.testing.assert_array_equal(sizes, np.maximum(request, reply))


def test_row_that_fits_no_message_gets_its_error(make_rows):
    """A row above the server's limits is an error with size and limit; the others stay."""
    info = make_info(input_size=3)
    rows = check_rows(make_rows(5, 2000, 7, 900), info)
    catalogue = Catalogue(models=(info,), max_message_bytes=8 * 2048, max_request_timesteps=800)

    sizes = row_sizes(rows, info, Options())
    kept = refuse_oversized(rows, sizes, catalogue)

    assert kept.index.tolist() == [0, 2]
    assert [error.row for error in kept.errors] == [1, 3]
    assert (kept.errors[0].expected, kept.errors[0].got) == (
        "at most 14,336 bytes in one message",
        "24,008 bytes",
    )
    assert (kept.errors[1].expected, kept.errors[1].got) == (
        "at most 800 timesteps in one request",
        "900 timesteps",
    )


@pytest.mark.parametrize("field", ["max_bytes", "max_timesteps", "max_rows", "in_flight"])
def test_batching_refuses_nonsense(field):
    """A limit below one is named."""
    with pytest.raises(InputError, match=field):
        Batching(**{field: 0})
