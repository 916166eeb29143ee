"""Stable-Baselines3's own tests, with DummyVecEnv and SubprocVecEnv replaced by ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.peer_suites import outcomes, surprises

RESET = "steps before the first reset, which is refused here"
#: Test -> why it does not pass. A test that is listed and passes is a failure too.
DIFFERENCES = {
    "tests/test_vec_envs.py::test_framestack_vecenv": RESET,
    "tests/test_vec_check_nan.py::test_check_nan": RESET,
    # Not of our doing: these fail on SB3's own classes as well.
    "tests/test_vec_normalize.py::test_discrete_obs": "it needs CliffWalking-v0, which Gymnasium 1.4 does not have",
}
NEEDS = {"test_monitor.py": "pandas", "test_vec_monitor.py": "pandas", "test_utils.py": "ale_py"}
QUICK = ["test_vec_envs.py", "test_vec_check_nan.py", "test_vec_stacked_obs.py", "test_vec_extract_dict_obs.py"]
QUICK += ["test_vec_monitor.py", "test_vec_normalize.py", "test_envs.py"]
#: These train, or their workers import PyTorch.
LONG = "SAC or TD3 or her or ppo or start_method or (SubprocVecEnv and not tuple_spaces)"


def run(folder: Path, files: list[str], scratch: Path, select: str = "") -> None:
    there = [file for file in files if file not in NEEDS or importlib.util.find_spec(NEEDS[file]) is not None]
    if not there:
        pytest.skip(f"SB3's {files[0]} needs {NEEDS[files[0]]}, which is not installed")
    got = outcomes(folder, [f"tests/{file}" for file in there], "sb3", scratch, select)
    assert got and not surprises(got, DIFFERENCES)


def test_sb3s_own_tests(sb3_tests: Path, tmp_path: Path) -> None:
    run(sb3_tests, QUICK, tmp_path, f"not ({LONG})")


@pytest.mark.full
@pytest.mark.parametrize("file", [*QUICK, "test_gae.py", "test_callbacks.py", "test_monitor.py", "test_utils.py"])
def test_sb3s_own_tests_in_full(sb3_tests: Path, file: str, tmp_path: Path) -> None:
    run(sb3_tests, [file], tmp_path)
