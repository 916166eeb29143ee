"""The attacks of the review on the core, on every backend they concern, compiled and not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.attack_cases import CORES, EVERYWHERE, PROCESSES, Prepared, attack, case, good, with_marks

pytestmark = pytest.mark.timeout(1500)
#: id -> (core, group, case, whether only with the full counts). By default each variant meets each way on one core; of the
#: families in SLOW each variant meets one way on one core.
SLOW = ("fork_back", "idle_trouble", "bad_mail", "dies_writing", "dead_and_spoken_to", "keeper_killed")
CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {}


def _add(name: str, ways: tuple[str, ...], *variants: dict[str, Any]) -> None:
    for (w, way), (v, variant), (c, core) in itertools.product(enumerate(ways), enumerate(variants or ({},)), enumerate(CORES)):
        words = "-".join(str(value) for value in variant.values())
        key = "-".join(filter(None, (name, way, words, "compiled" if core == "1" else "python")))
        CASES[key] = core, way, case(name, way=way, **variant), c != (w + v // 2) % 2 or (name in SLOW and w != v % 2)


def _each(name: str, *values: Any, **fixed: Any) -> list[dict[str, Any]]:
    return [{name: value, **fixed} for value in values]


ENDS = [{"on_fault": on_fault, "kind": kind} for on_fault in ("restart", "raise") for kind in ("int", "foreign")]
FORKS = [{"how": how, "where": where} for how in ("fork_returns_later", "fork_raises") for where in ("step", "reset", "init")]
MAIL = [{"what": what, "on_fault": "restart"} for what in ("mail_bomb", "mail_exit", "mail_lock", "info_bomb")]
CALLS = [{"what": f"call_{what}", "on_fault": "raise"} for what in ("info_bomb", "info_lock", "str_raises_base")]
WRITING = [
    {"how": how, "shape": shape}
    for how, shape in (("dies_in_info", "plain"), ("dies_in_obs", "wide"), ("dies_in_end", "wide"), ("dies_in_reward", "plain"))
] + [{"how": "dies_in_mail", "shape": "mail"}]  # fmt: skip

SPOKEN = [
    {"by": by, "on_fault": on_fault} for by in ("assign", "call", "attribute", "ready") for on_fault in ("restart", "raise")
]

_add("planted_interrupt", EVERYWHERE, *ENDS)
_add("fork_back", PROCESSES, *FORKS)
_add("idle_trouble", PROCESSES, *_each("what", "stop", "hold_gil", "stuck_handler", "daemon"))
_add("bad_mail", PROCESSES, *MAIL, *CALLS)
_add("bad_mail", ("serial", "thread", "aio"), *CALLS)
_add("dies_writing", PROCESSES, *WRITING)
_add("dies_sending", PROCESSES)
_add("torn", PROCESSES, {"kills": 2})
_add("dead_and_spoken_to", PROCESSES, *SPOKEN)
_add("keeper_killed", PROCESSES, *_each("on_fault", "restart", "raise"))
_add("keeper_killed_waiting", PROCESSES)
_add("keeper_stopped", PROCESSES)
_add("deleted_cwd", PROCESSES)
_add("small_files", PROCESSES)
_add("copied", EVERYWHERE)
_add("assigned_order", EVERYWHERE)


@pytest.fixture(scope="module")
def prepared(request: Any) -> Prepared:
    """The cases that were chosen and are not skipped, two children at a time."""
    return Prepared.chosen(request, "attacked", CASES)


@pytest.mark.parametrize("attacked", with_marks(CASES))
def test_an_attack_leaves_right_rows_or_a_fault(attacked: str, prepared: Prepared) -> None:
    """Right rows or a told fault, within the deadline, and nothing left."""
    good(prepared.result(attacked))


@pytest.mark.full
@pytest.mark.parametrize("way", PROCESSES)
@pytest.mark.parametrize("core", CORES, ids=["compiled", "python"])
def test_killed_workers_leave_no_torn_rows_with_full_counts(way: str, core: str) -> None:
    attack("torn", core, 600.0, way=way, kills=80)
