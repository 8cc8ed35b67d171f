"""How far a path may be from the float64 reference: one table, the same everywhere.

Tests, the export check and the server's self-check read it. Values are for data of unit scale.
"""

from __future__ import annotations

GOLDEN_FLOAT64_MAX_ABS = 1e-10
"""float64 module against vectors of the original implementations."""

FLOAT32_MAX_ABS = 1e-5
"""float32, any path, against the float64 reference; T up to 10,000."""

SAME_ROWS_FLOAT32_MAX_ABS = 1e-6
"""Packed against alone, split against whole, chunked with state against whole."""

HALF_RELATIVE_NORM = {"float16": 5e-4, "bfloat16": 3e-3}
"""|out - ref| / |ref| against the float64 result of the same rounded inputs."""
