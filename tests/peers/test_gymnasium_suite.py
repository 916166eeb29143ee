"""Gymnasium's own vector tests, with SyncVectorEnv and AsyncVectorEnv replaced by ours.

Its source distribution has no tests: GYMNASIUM_SOURCE names a checkout of its repository.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.support.peer_suites import outcomes, surprises

SOURCE = os.environ.get("GYMNASIUM_SOURCE", "")
FOLDERS = ["tests/vector", "tests/wrappers/vector", "tests/envs/registration/test_make_vec.py"]
#: Test -> why it does not pass. A test that is listed and passes is a failure too.
DIFFERENCES = {
    "tests/vector/test_async_vector_env.py::test_custom_space_async_vector_env_shared_memory": (
        "spaces of your own work with shared memory too, so nothing is refused"
    ),
    "tests/vector/test_async_vector_env.py::test_async_vector_subenv_error": (
        "an environment's error is one EnvFailed that has the traceback, without lines in the log; and a reset is needed first"
    ),
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SOURCE, reason="GYMNASIUM_SOURCE names no checkout of Gymnasium's repository")
def test_gymnasiums_own_tests(tmp_path: Path) -> None:
    # Only the tests: the package itself is the installed one.
    shutil.copytree(Path(SOURCE) / "tests", tmp_path / "tests")
    (tmp_path / "tests" / "wrappers" / "vector" / "test_human_rendering.py").unlink()  # needs a screen
    select = "" if importlib.util.find_spec("cv2") else "not ResizeObservation"
    got = outcomes(tmp_path, FOLDERS, "gymnasium", tmp_path, select, timeout_s=880)
    assert "passed" in got.values()
    assert not surprises(got, DIFFERENCES)
