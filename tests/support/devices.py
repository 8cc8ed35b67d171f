"""Test parameters that run a test on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
