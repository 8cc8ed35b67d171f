"""Copies large arrays with several threads: one core does not reach the speed of memory."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# Below, waking the threads takes longer than they save.
_WORTHWHILE_BYTES = 4 << 20
_MOST_THREADS = 4


def copy_array(place: npt.NDArray[np.generic], array: npt.NDArray[np.generic]) -> None:
    """Copy `array` to `place`, which has its shape and dtype."""
    threads = _threads()
    if array.nbytes < _WORTHWHILE_BYTES or threads == 1:
        np.copyto(place, array)
        return
    bounds = np.linspace(0, len(array), threads + 1).astype(int).tolist()
    copies = [
        _pool().submit(np.copyto, place[first:last], array[first:last])
        for first, last in pairwise(bounds)
    ]
    for copy in copies:
        copy.result()


def copy_of(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A new array with the same values, in C order."""
    place = np.empty(array.shape, array.dtype)
    copy_array(place, array)
    return place


@functools.cache
def _threads() -> int:
    """Half of the cores: the others have callers to serve."""
    return max(1, min(len(os.sched_getaffinity(0)) // 2, _MOST_THREADS))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "copy")
