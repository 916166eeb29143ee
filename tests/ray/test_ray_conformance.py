"""The suite of every backend, on workers that are Ray actors."""

from __future__ import annotations

from typing import Any

import pytest

from envfleet.testing.conformance import CHECKS, Start

pytestmark = pytest.mark.usefixtures("ray_here")
WAYS = (("stream", "compiled"), ("stream", "python"), ("call", "compiled"))
#: `make test` runs these, and only the first way: actors take seconds to start. The rest is in `make test-ray`.
SHORT = ("a_failing_env_is_a_fault", "tasks_and_seeds_go_ahead")


@pytest.mark.parametrize(
    ("transport", "core"), [pytest.param(*way, marks=[] if way == WAYS[0] else pytest.mark.full) for way in WAYS]
)
@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[] if check.__name__ in SHORT else pytest.mark.full) for check in CHECKS],
    ids=lambda check: check.__name__,
)
def test_ray_passes_the_check(check: Any, transport: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    check(Start("ray", transport=transport, resources={"num_cpus": 0.5}))
