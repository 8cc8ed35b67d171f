"""When a replica counts as hung, and whether and when one that failed is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from qrnn_serve.core.errors import ConfigError

# Batches take longer than their estimate when the machine is busy, never this much longer.
_HANG_FACTOR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """How long a replica may take, and how often it may fail.

    Attributes:
        hang_timeout_s: Seconds beside 20 times the expected ones after which a batch is given up.
        start_timeout_s: Seconds to load the model, and seconds to warm it up.
        first_wait_s: Seconds between a first failure and the next start; they double with each
            failure in a row.
        max_wait_s: The most that they grow to.
        max_failed_starts: Starts without success in a row after which a replica is given up.
        stable_s: Seconds of service after which the wait is `first_wait_s` again.
    """

    hang_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0
    max_failed_starts: int = 5
    stable_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("hang_timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")

    def batch_timeout_s(self, expected_s: float) -> float:
        """Seconds after which a batch that should take `expected_s` counts as hung."""
        return self.hang_timeout_s + _HANG_FACTOR * expected_s


class Restarts:
    """Remembers the failures of one replica."""

    def __init__(
        self, config: SupervisionConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._failures = 0
        self._failed_starts = 0
        self._serving_since_s: float | None = None

    def serving(self) -> None:
        """The replica started."""
        self._failed_starts = 0
        self._serving_since_s = self._clock()

    def wait_s(self) -> float | None:
        """The replica failed: seconds until it is to be started again, None to give it up."""
        config, since_s = self._config, self._serving_since_s
        if since_s is None:
            self._failed_starts += 1
        elif self._clock() - since_s >= config.stable_s:
            self._failures = 0
        self._serving_since_s = None
        if self._failed_starts >= config.max_failed_starts:
            return None
        wait_s = min(config.first_wait_s * 2.0**self._failures, config.max_wait_s)
        # No more than it takes to reach the longest wait.
        self._failures += wait_s < config.max_wait_s
        return wait_s
