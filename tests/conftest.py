"""Options and fixtures of the whole suite."""

from __future__ import annotations

import signal
import threading
from typing import Any

import gymnasium
import pytest

from envfleet.testing import Held, leaks_since


def pytest_addoption(parser: Any) -> None:
    """`--backend mine.py:Mine` puts a backend of yours under the conformance suite."""
    parser.addoption("--backend", default=None, metavar="FILE.py:CLASS", help="the backend conformance is to run on")
    parser.addoption("--full", action="store_true", help="run the full counts too")


def pytest_configure(config: Any) -> None:
    """Ctrl-C works in tests and their children, also where pytest was started in the background by a script.

    Such a shell starts it with SIGINT ignored, Python then installs no handler, and every child process inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(config: Any, val: object, argname: str) -> str | None:
    """Bytes do not name a test: compressed ones hold the time, and two workers of one run must collect the same names."""
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) else None


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


@pytest.fixture(scope="module", autouse=True)
def unchanged_registry() -> Any:
    """Fails a module that changes what Gymnasium's ids stand for: later tests of the same process would run something else."""
    before = _registered()
    yield
    after = _registered()
    assert {name: after.get(name) for name in before} == before


def _registered() -> dict[str, Any]:
    return {name: (str(spec.entry_point), spec.max_episode_steps, str(spec.kwargs)) for name, spec in gymnasium.registry.items()}
