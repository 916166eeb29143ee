"""A pytest plugin for the tests of other projects: puts our classes in the place of theirs, and writes down every outcome.

`-p peer_plugin`, with its folder on the path, and in the environment PEER_SWAP ("gymnasium" or "sb3") and PEER_OUTCOMES, the file
to write.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_outcomes: dict[str, str] = {}


def _swap_gymnasium() -> None:
    import gymnasium

    from envfleet.adapters.gymnasium import AsyncVectorEnv, SyncVectorEnv

    gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv = SyncVectorEnv, AsyncVectorEnv  # type: ignore[misc]


def _swap_sb3() -> None:
    from stable_baselines3.common import vec_env

    from envfleet.adapters.sb3 import DummyVecEnv, SubprocVecEnv

    ours = {vec_env.DummyVecEnv: DummyVecEnv, vec_env.SubprocVecEnv: SubprocVecEnv}
    for module in [module for name, module in sys.modules.items() if name.startswith("stable_baselines3")]:
        for theirs, our in ours.items():
            if getattr(module, theirs.__name__, None) is theirs:
                setattr(module, theirs.__name__, our)


def pytest_configure(config: Any) -> None:
    """Before a test module is imported."""
    {"gymnasium": _swap_gymnasium, "sb3": _swap_sb3, "": lambda: None}[os.environ.get("PEER_SWAP", "")]()


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported is an outcome too."""
    if report.failed:
        _outcomes[report.nodeid] = f"failed: {report.longreprtext[-2000:]}"


def pytest_runtest_logreport(report: Any) -> None:
    """Set-up, call and teardown of a test: the first that does not pass decides."""
    if report.when == "call" or not report.passed:
        said = report.longreprtext[-2000:] if report.failed else ""
        if _outcomes.get(report.nodeid, "passed") == "passed":
            _outcomes[report.nodeid] = f"{report.outcome}: {said}" if said else report.outcome


def pytest_sessionfinish(session: Any) -> None:
    """Hand the outcomes over."""
    Path(os.environ["PEER_OUTCOMES"]).write_text(json.dumps(_outcomes))
