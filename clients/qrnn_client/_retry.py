"""When a failed call is sent again, and after how long. Pure: time and chance come from the caller.

A timeout is a length of time, a deadline is a moment on the monotonic clock. `timeout_s` bounds one
attempt; `RetryPolicy.total_s` bounds a call with all its attempts and waits: it sets the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from qrnn_client._errors import InputError

_RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
_DEADLINE_RETRIES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How failed calls are retried. Scoring changes nothing on the server: sending again is safe.

    UNAVAILABLE and RESOURCE_EXHAUSTED are retried until the attempts or the time run out,
    DEADLINE_EXCEEDED once, and nothing else ever. Waits grow, and each is drawn between half and
    the whole of its length so that many clients do not return at the same moment. A server that
    says how long to wait (trailer `grpc-retry-pushback-ms`) is obeyed.

    Attributes:
        max_attempts: Most times one call is sent; 1 never retries.
        total_s: Most seconds for one call with all attempts and waits; a longer timeout_s wins.
        connect_s: The same for the very first call of a client, unless it has wait_for_ready: a
            wrong address is reported this soon.
        first_wait_s: Longest wait before the second attempt.
        wait_growth: Factor from one longest wait to the next.
        max_wait_s: No wait is longer, unless the server asks for it.
    """

    max_attempts: int = 100
    total_s: float = 120.0
    connect_s: float = 5.0
    first_wait_s: float = 0.1
    wait_growth: float = 2.0
    max_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InputError(f"max_attempts: expected at least 1, got {self.max_attempts}")
        if self.wait_growth < 1:
            raise InputError(f"wait_growth: expected at least 1, got {self.wait_growth}")
        for name in ("total_s", "connect_s", "first_wait_s", "max_wait_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InputError(f"{name}: expected seconds above 0 and finite, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed attempt.

    Attributes:
        code: Its gRPC status.
        pushback_ms: The server's `grpc-retry-pushback-ms` trailer, or None. Below 0, or no number:
            the server asks not to be called again.
    """

    code: grpc.StatusCode
    pushback_ms: str | None = None


@dataclass(slots=True)
class Attempts:
    """The attempts of one call: how long the next may take, and whether there is a next.

    Attributes:
        policy: The rules.
        started_s: When the first attempt began.
        deadline_s: No attempt or wait goes on past it.
    """

    policy: RetryPolicy
    started_s: float
    deadline_s: float
    sent: int = 0
    _deadline_failures: int = field(default=0, repr=False)

    def next_timeout_s(self, now_s: float, timeout_s: float) -> float:
        """Count one more attempt and return the time it may take."""
        self.sent += 1
        return max(min(timeout_s, self.deadline_s - now_s), 0.0)

    def wait_s(self, failure: Failure, now_s: float, chance: float) -> float | None:
        """Return how long to wait before the next attempt, or None to give up.

        Args:
            failure: How the last attempt ended.
            now_s: The time now.
            chance: A random number from 0 to 1.
        """
        if failure.code not in _RETRIED or self.sent >= self.policy.max_attempts:
            return None
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._deadline_failures += 1
            if self._deadline_failures > _DEADLINE_RETRIES:
                return None
        wait_s = self._asked_wait_s(failure, chance)
        if wait_s is None or now_s + wait_s >= self.deadline_s:
            return None
        return wait_s

    def _asked_wait_s(self, failure: Failure, chance: float) -> float | None:
        if failure.pushback_ms is None:
            return _longest_wait_s(self.policy, self.sent) * (0.5 + chance / 2)
        if not (failure.pushback_ms.isascii() and failure.pushback_ms.isdigit()):
            return None
        # Never sooner than asked; the spread keeps clients that were told the same apart.
        return int(failure.pushback_ms) / 1000 * (1 + chance / 5)


def start_attempts(policy: RetryPolicy, now_s: float, *, total_s: float | None = None) -> Attempts:
    """Begin a call at `now_s`; `total_s` stands in for the policy's own."""
    total_s = policy.total_s if total_s is None else total_s
    return Attempts(policy, started_s=now_s, deadline_s=now_s + total_s)


def _longest_wait_s(policy: RetryPolicy, sent: int) -> float:
    wait_s = policy.first_wait_s
    for _ in range(sent - 1):
        wait_s *= policy.wait_growth
        if wait_s >= policy.max_wait_s:
            break
    return min(wait_s, policy.max_wait_s)
