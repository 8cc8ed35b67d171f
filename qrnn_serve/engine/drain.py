"""How fast the replicas work off the queue, so that a refused caller is told when to come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_HALF_LIFE_S = 10.0
_UNKNOWN_RETRY_S = 1.0
_MIN_RETRY_S = 0.01
_MAX_RETRY_S = 60.0


class DrainRate:
    """Timesteps a second of all replicas together, over about the last ten seconds of work."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas = 1
        self._timesteps = 0.0
        self._busy_s = 0.0
        self._updated_s = clock()

    def set_replicas(self, replicas: int) -> None:
        """Say how many replicas work side by side."""
        with self._lock:
            self._replicas = max(replicas, 1)

    def record(self, timesteps: int, busy_s: float) -> None:
        """Count one batch: its timesteps and the seconds that one replica spent on it."""
        with self._lock:
            now_s = self._clock()
            kept = 0.5 ** ((now_s - self._updated_s) / _HALF_LIFE_S)
            self._updated_s = now_s
            self._timesteps = self._timesteps * kept + timesteps
            self._busy_s = self._busy_s * kept + busy_s

    def seconds_for(self, timesteps: int) -> float:
        """Seconds to work off that many timesteps, from 0.01 to 60; 1 while nothing is known."""
        with self._lock:
            if self._timesteps <= 0 or self._busy_s <= 0:
                return _UNKNOWN_RETRY_S
            rate = self._replicas * self._timesteps / self._busy_s
        return min(max(timesteps / rate, _MIN_RETRY_S), _MAX_RETRY_S)
