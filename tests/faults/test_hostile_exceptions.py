"""Hostile exceptions x backends: the row says FAULT (or the error names the slot), neighbours are right, it can be told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.chaos.scenario import WAYS
from tests.chaos.zoo import ZOO
from tests.support.attack_cases import CORES, Prepared, case, good, with_marks

pytestmark = pytest.mark.timeout(3000)
COMBINATIONS = list(itertools.product(CORES, ("restart", "raise")))
SOME = ("str_raises_base", "notes_none", "reduce_raises_base", "load_exits", "system_exit", "getattribute_raises")


def _cases() -> dict[str, tuple[Any, ...]]:
    """id -> (core, group, case, whether only with the full counts): by default each kind meets each way once."""
    found: dict[str, tuple[Any, ...]] = {}
    for (i, way), (k, kind) in itertools.product(enumerate(WAYS), enumerate(ZOO)):
        for c, (core, on_fault) in enumerate(COMBINATIONS):
            key = f"{way}-{kind}-{on_fault}-{'compiled' if core == '1' else 'python'}"
            what = case("hostile:raised_in_step", 25.0, way=way, on_fault=on_fault, kind=kind)
            rare = (way in ("aio async", "shm parent") and k % 3 > 0) or way == "joined"
            found[key] = core, (way, on_fault), what, rare or (i + k) % 4 != c
    for (i, way), (p, phase), (k, kind) in itertools.product(
        enumerate(WAYS), enumerate(("init", "reset", "call", "render", "close")), enumerate(SOME)
    ):
        core = CORES[(i + p + k) % 2]
        key = f"{way}-{kind}-in-{phase}"
        rare = way == "joined" or (i + p + k) % 6 != 0
        found[key] = core, way, case("hostile:raised_in", 25.0, way=way, phase=phase, kind=kind), rare
    return found


CASES = _cases()


@pytest.fixture(scope="module")
def prepared(request: Any) -> Prepared:
    """The cases that were chosen and are not skipped, two children at a time."""
    return Prepared.chosen(request, "hostile", CASES)


@pytest.mark.parametrize("hostile", with_marks(CASES))
def test_a_hostile_exception_is_a_fault_and_neighbours_are_right(hostile: str, prepared: Prepared) -> None:
    """FAULT before anything is described; nothing is unpickled here to see whether it can be."""
    good(prepared.result(hostile))


def test_there_are_thirty_kinds() -> None:
    assert len(ZOO) >= 30
