"""Our column of the README's table is what the script says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_our_column_is_what_the_readme_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/side_by_side.py"), "--only", "envfleet"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[2:]
    expected = (
        "killed by signal 9 (SIGKILL)",
        "RuntimeError: planted fault in step`; the other slots made all 100 further steps",
        "EnvFailed: slot 1 failed in init",
        "EnvTimeout: slot 1 timed out in step",
        "0 of 4 processes alive 2 s later",
        "open file descriptors 4 → 4",
        "first episode ran task 7, the next task 7",
    )
    assert len(rows) == len(expected)
    for row, words in zip(rows, expected):
        assert words in row
