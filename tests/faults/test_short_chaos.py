"""A short run of `make chaos`: one scenario of several kinds, every row checked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.__main__ import case_of
from tests.chaos.scenario import KINDS, WAYS
from tests.support.attack_cases import Prepared, good

pytestmark = pytest.mark.timeout(1500)
SHORT = [(way, theme) for way, theme in KINDS if theme in ("all", "forks") or (theme == "hostile" and not WAYS[way][1])]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    chosen = Prepared()
    for number, kind in enumerate(SHORT):
        what, variables = case_of(number, 1, SHORT, ops=60, budget_s=1.5)
        chosen.add(variables["ENVFLEET_COMPILED"], kind, kind, {**what, "limit_s": 60.0})
    return chosen


@pytest.mark.parametrize("kind", SHORT, ids=" / ".join)
def test_random_attacks_leave_right_rows(kind: Any, prepared: Prepared) -> None:
    assert good(prepared.result(kind))["rows"] > 0
