"""One Ray for all tests of this folder that do not need machines of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.ray_cluster import SETTINGS, one_machine

os.environ.update(SETTINGS)  # before a test module imports Ray


@pytest.fixture(scope="session")
def ray_here() -> Any:
    """A cluster of one machine with four CPUs."""
    pytest.importorskip("ray", reason="pip install 'envfleet[ray]'")
    with one_machine() as ray:
        yield ray


@pytest.fixture
def cluster(ray_here: Any) -> Any:
    """The same, by the name that the tests of RLlib use."""
    return ray_here
