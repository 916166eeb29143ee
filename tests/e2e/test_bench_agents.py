"""The bench of many agents runs and judges its targets; its figures are for quiet machines only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pettingzoo")
ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_bench_of_many_agents_runs():
    pytest.importorskip("supersuit")
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/agents.py"), "--quick", "--only", "twoagents-8|connect-four-64"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    targets = done.stdout.partition("targets:\n")[2].splitlines()
    assert any("over SuperSuit 2 cpus" in line for line in targets)
    assert any("over per-env inference" in line and ("met" in line or "not met" in line) for line in targets)
