"""One Ray for all tests of this folder that do not need machines of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_cluster import SETTINGS, one_machine

HERE = Path(__file__).parent
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process can be connected to one Ray at a time: tests with machines of their own come before the first that uses the one for all."""
    ours = [item for item in items if item.path.parent == HERE]
    ours.sort(key=lambda item: "ray_here" in getattr(item, "fixturenames", ()))
    in_order = iter(ours)
    items[:] = [next(in_order) if item.path.parent == HERE else item for item in items]
