"""The tests of other projects, where their source distributions are on disk."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.support.peer_suites import SDISTS, unpack_tests


@pytest.fixture(scope="session")
def sb3_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with Stable-Baselines3's own tests, of the version that is installed."""
    try:
        version = importlib.metadata.version("stable_baselines3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("stable-baselines3 is not installed")
    sdist = SDISTS / f"stable_baselines3-{version}.tar.gz"
    if not sdist.exists():
        pytest.skip(f"{sdist.name} is not in .envs/sdists (`make setup` puts it there if it can be downloaded)")
    return unpack_tests(sdist, tmp_path_factory.mktemp("sb3"))
