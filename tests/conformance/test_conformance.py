"""One suite for every backend: pytest tests/conformance --backend mine.py:Mine runs it on yours."""

from __future__ import annotations

from typing import Any

import pytest

from envfleet.testing.conformance import CHECKS, Start
from tests.support.ways import WAYS, MovingShm, SharingPipe, load_backend


def pytest_generate_tests(metafunc: Any) -> None:
    if "start" in metafunc.fixturenames:
        mine = metafunc.config.getoption("--backend")
        if mine:
            starts = [pytest.param(Start(load_backend(mine)), id=mine)]
        else:
            ways = {**WAYS, "shm and parent": ("shm", {"start_method": "fork", "isolate": False})}
            ways["pipe and threads"] = (SharingPipe, {})
            ways["shm and moving slots"] = (MovingShm, {})
            starts = [pytest.param(Start(backend, **options), id=name) for name, (backend, options) in ways.items()]
        metafunc.parametrize("start", starts)


@pytest.mark.parametrize("core", ["compiled", "python"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_backend_passes_the_check(start: Start, check: Any, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if core == "python" and start.backend is MovingShm:
        pytest.skip("slots move only between compiled lives")
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    check(start)
