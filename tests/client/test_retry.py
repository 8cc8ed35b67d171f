"""Retries: which codes, how long, and never past the deadline."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrnn_client import InputError, RetryPolicy
from qrnn_client._retry import Failure, start_attempts

RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 12),
    total_s=st.floats(0.01, 100),
    first_wait_s=st.floats(1e-3, 5),
    wait_growth=st.floats(1, 10),
    max_wait_s=st.floats(1e-3, 20),
)
failures = st.builds(
    Failure,
    code=st.sampled_from(list(grpc.StatusCode)),
    pushback_ms=st.one_of(
        st.none(), st.integers(-5, 50_000).map(str), st.sampled_from(["", "soon", "1.5", "²"])
    ),
)


class Clock:
    def __init__(self):
        self.now_s = 1000.0


def run(policy, timeout_s, outcomes, clock):
    """Play a call whose attempts end as given; return the span of each attempt and the waits."""
    attempts = start_attempts(policy, clock.now_s)
    spans, waits = [], []
    for failure, share, chance in outcomes:
        allowed_s = attempts.next_timeout_s(clock.now_s, timeout_s)
        began = clock.now_s
        clock.now_s += allowed_s * share
        spans.append((began, clock.now_s, failure))
        wait_s = attempts.wait_s(failure, clock.now_s, chance)
        if wait_s is None:
            break
        waits.append(wait_s)
        clock.now_s += wait_s
    return spans, waits


outcomes = st.lists(st.tuples(failures, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20)


@given(policy=policies, timeout_s=st.floats(0.01, 100), outcomes=outcomes)
def test_retry_keeps_to_its_limits(policy, timeout_s, outcomes):
    """Whatever fails and however long it takes: deadline, attempts and codes are kept to."""
    clock = Clock()
    spans, waits = run(policy, timeout_s, outcomes, clock)
    deadline_s = 1000.0 + policy.total_s
    retried = [failure.code for _, _, failure in spans[: len(waits)]]

    assert len(spans) <= policy.max_attempts
    assert all(end <= deadline_s + 1e-9 for _, end, _ in spans)
    assert all(end + wait < deadline_s for (_, end, _), wait in zip(spans, waits, strict=False))
    assert set(retried) <= set(RETRIED)
    assert retried.count(grpc.StatusCode.DEADLINE_EXCEEDED) <= 1
    for (_, _, failure), wait in zip(spans, waits, strict=False):
        if failure.pushback_ms is None:
            assert 0 < wait <= policy.max_wait_s
        else:
            assert wait >= int(failure.pushback_ms) / 1000


def test_retry_waits_grow_with_jitter():
    """Each wait lies between half and the whole of a length that doubles up to its limit."""
    policy = RetryPolicy(first_wait_s=1, wait_growth=2, max_wait_s=5, total_s=1000)
    failure = Failure(code=grpc.StatusCode.UNAVAILABLE)

    _, shortest = run(policy, 1, [(failure, 0, 0.0)] * 5, Clock())
    _, longest = run(policy, 1, [(failure, 0, 1.0)] * 5, Clock())

    assert longest == [1, 2, 4, 5, 5]
    assert shortest == [0.5, 1, 2, 2.5, 2.5]


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c not in RETRIED])
def test_retry_gives_up_at_once(code):
    """A code that sending again cannot mend is never retried."""
    attempts = start_attempts(RetryPolicy(), 0.0)
    attempts.next_timeout_s(0.0, 60.0)

    assert attempts.wait_s(Failure(code=code), 1.0, 0.5) is None


@pytest.mark.parametrize("pushback_ms", ["-1", "", "later", "1.5", "²"])
def test_retry_obeys_a_server_that_asks_to_stay_away(pushback_ms):
    """A pushback that is negative or no number means: do not come back."""
    attempts = start_attempts(RetryPolicy(), 0.0)
    attempts.next_timeout_s(0.0, 60.0)
    failure = Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, pushback_ms=pushback_ms)

    assert attempts.wait_s(failure, 1.0, 0.5) is None


def test_retry_of_a_deadline_happens_once():
    """The second attempt without an answer in time is the last, whatever fails between."""
    late = Failure(code=grpc.StatusCode.DEADLINE_EXCEEDED)
    away = Failure(code=grpc.StatusCode.UNAVAILABLE)
    steps = [(late, 1, 0.5), (away, 0, 0.5), (late, 1, 0.5), (late, 1, 0.5)]

    spans, _ = run(RetryPolicy(), 2.0, steps, Clock())

    assert len(spans) == 3


def test_retry_cuts_the_last_attempt_at_the_deadline():
    """An attempt gets the caller's timeout, or what is left until the deadline."""
    attempts = start_attempts(RetryPolicy(total_s=10), 100.0)

    assert attempts.next_timeout_s(100.0, 4.0) == 4.0
    assert attempts.next_timeout_s(108.0, 4.0) == 2.0
    assert attempts.next_timeout_s(111.0, 4.0) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("wait_growth", 0.5),
        ("total_s", 0.0),
        ("total_s", float("inf")),
        ("first_wait_s", -1.0),
        ("max_wait_s", float("nan")),
    ],
)
def test_retry_policy_refuses_nonsense(field, value):
    """A setting that makes no sense is named."""
    with pytest.raises(InputError, match=field):
        RetryPolicy(**{field: value})
