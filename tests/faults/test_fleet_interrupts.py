"""Ctrl-C and exceptions of signal handlers at random moments inside every call, against the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.scenario import WAYS
from tests.support.attack_cases import CORES, Prepared, case, good

pytestmark = pytest.mark.timeout(3000)
SHAPES = ("plain", "bulky", "mail", "wide")
FAULTS = ("restart", "raise")


def _cases(count: int, full: bool) -> dict[str, tuple[Any, ...]]:
    """Every way, compiled and not; shapes, policies and kinds of interrupt take turns, or all in the full counts."""
    found = {}
    for i, way in enumerate(WAYS):
        for c, core in enumerate(CORES):
            for v in range(4 if full else 1):
                shape, on_fault = SHAPES[(i + c + v) % 4], FAULTS[(i + v) % 2]
                kinds = (["int"], ["alarm", "base"])[v % 2] if full else ["int", "alarm", "base"]
                key = f"{way}-{'compiled' if core == '1' else 'python'}-{shape}-{on_fault}" + (f"-{v}" if full else "")
                args = {"way": way, "shape": shape, "on_fault": on_fault, "seed": 10 * i + v, "kinds": kinds}
                found[key] = core, key, case("interrupts", 60.0 + count, count=count, **args), full
    return found


SHORT, FULL = _cases(75, False), _cases(1000, True)


@pytest.fixture(scope="module")
def prepared(request: Any) -> Prepared:
    """Each case in a child of its own, two at a time."""
    return Prepared.chosen(request, "interrupted", FULL | SHORT)


PARAMS = [*SHORT, *(pytest.param(key, marks=pytest.mark.full) for key in FULL)]


@pytest.mark.parametrize("interrupted", PARAMS)
def test_an_interrupt_leaves_every_slot_in_a_known_state(interrupted: str, prepared: Prepared) -> None:
    """Each slot is untouched, out, or named as lost; what comes afterwards is right."""
    result = good(prepared.result(interrupted))
    assert result["interrupts"] >= (75 if interrupted in SHORT else 1000) and result["rows"] > 20
