"""Every invariant of docs/invariants.md names what tests it, and that exists."""

from __future__ import annotations

import re

import pytest

from envfleet.testing import conformance
from tests.support.system import ROOT

PAGE = (ROOT / "docs/invariants.md").read_text()
CHECKS = {check.__name__ for check in conformance.CHECKS}


def rows() -> list[tuple[str, str]]:
    """(sentence, what tests it) of every row of the tables that say so."""
    found = []
    for table in re.findall(r"^\|.*\| tested by \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE, re.M):
        found += [tuple(line.strip("|").split("|")[-2:]) for line in table.splitlines()]
    return [(sentence.strip(), tests) for sentence, tests in found]


def test_the_page_has_its_tables() -> None:
    assert len(rows()) >= 19 and PAGE.count("tested by |") == 3


@pytest.mark.parametrize(("sentence", "tests"), rows(), ids=[sentence[:40] for sentence, _ in rows()])
def test_an_invariant_names_tests_that_exist(sentence: str, tests: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests)
    checks = [name for part in re.findall(r"conformance ((?:`\w+`(?:, )?)+)", tests) for name in re.findall(r"\w+", part)]
    assert named or checks, "nothing tests it"
    assert set(checks) <= CHECKS, f"no conformance checks: {set(checks) - CHECKS}"
    for path, test in named:
        assert test, f"name a test of {path}"
        assert f"def {test}(" in (ROOT / path).read_text(), f"there is no {test} in {path}"
