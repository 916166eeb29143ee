"""Options and fixtures of the whole suite."""

from __future__ import annotations

from typing import Any

import pytest

from envfleet.testing import Held, leaks_since


def pytest_addoption(parser: Any) -> None:
    """`--backend mine.py:Mine` puts a backend of yours under the conformance suite."""
    parser.addoption("--backend", default=None, metavar="FILE.py:CLASS", help="the backend conformance is to run on")
    parser.addoption("--full", action="store_true", help="run the full counts too")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """The full counts run with `--full`, or when asked for by -m."""
    if config.getoption("--full") or "full" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="full counts: run with --full (make test-full)")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def no_leaks() -> Any:
    """Fails a test that leaves descriptors, threads, processes or shared memory behind."""
    before = Held.now()
    yield
    assert leaks_since(before) == {}
