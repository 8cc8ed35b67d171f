"""Artefacts made once for all tests of the scorers."""

from __future__ import annotations

import pytest

from support.artefacts import CONFIGS, shared_artefacts


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory):
    """Every kind of file for each model of CONFIGS."""
    return {name: shared_artefacts(tmp_path_factory, name) for name in CONFIGS}
