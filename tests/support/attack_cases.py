"""Attack cases for pytest: what a child process of `tests/chaos` found, as passes and failures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.child import run_batches, run_cases

CORES = ("1", "0")
PROCESSES = ("pipe", "shm")
EVERYWHERE = ("serial", "thread", "aio", "pipe", "shm")


def attack(name: str, core: str = "1", limit_s: float = 60.0, **args: Any) -> dict[str, Any]:
    """Run one attack in a child of its own; fails with what it found."""
    (result,) = run_cases([case(name, limit_s, **args)], {"ENVFLEET_COMPILED": core})
    return good(result)


def case(name: str, limit_s: float = 60.0, **args: Any) -> dict[str, Any]:
    """A case for a child."""
    return {"call": name if ":" in name else f"attacks:{name}", "args": args, "limit_s": limit_s}


def good(result: dict[str, Any]) -> dict[str, Any]:
    """The result, if there is nothing wrong with it."""
    assert not result["problems"], "\n".join(result["problems"])
    return result


def wants_full(config: Any) -> bool:
    """Whether the full counts are run."""
    return bool(config.getoption("--full")) or config.getoption("-m") == "full"


def with_marks(cases: dict[str, Any]) -> list[Any]:
    """Parameters: those whose last value is true belong to the full counts."""
    return [pytest.param(key, marks=pytest.mark.full if it[-1] else ()) for key, it in cases.items()]


class Prepared:
    """Many cases, run together when the first is asked for: as many to a child as there are of a kind, two at a time."""

    def __init__(self) -> None:
        self._batches: dict[Any, dict[Any, dict[str, Any]]] = {}
        self._results: dict[Any, dict[str, Any]] | None = None

    @classmethod
    def chosen(cls, request: Any, parameter: str, cases: dict[str, tuple[str, Any, dict[str, Any], bool]]) -> Prepared:
        """The cases of this test run: key -> (core, group, case, whether only with the full counts), by the name of the parameter."""
        found, full = cls(), wants_full(request.config)
        for item in request.session.items:
            key = getattr(getattr(item, "callspec", None), "params", {}).get(parameter)
            if key in cases and (full or not cases[key][3]):
                core, group, what, _ = cases[key]
                found.add(core, group, key, what)
        return found

    def add(self, core: str, group: Any, key: Any, case: dict[str, Any]) -> None:
        """`group`: cases that may share a child."""
        self._batches.setdefault((core, group), {})[key] = case

    def result(self, key: Any) -> dict[str, Any]:
        """What one case gave."""
        if self._results is None:
            given = [(list(cases.values()), {"ENVFLEET_COMPILED": core}) for (core, _), cases in self._batches.items()]
            found = run_batches(given)
            self._results = {
                key: result for cases, results in zip(self._batches.values(), found) for key, result in zip(cases, results)
            }
        return self._results[key]
