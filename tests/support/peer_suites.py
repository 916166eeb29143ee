"""The tests of other projects, run on our classes in a child process and compared with the list of deliberate differences."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.system import PACKAGES, ROOT

PLUGIN = ROOT / "tests" / "support" / "peer_plugin.py"
SDISTS = ROOT / ".envs" / "sdists"  # filled by `make setup`; nothing is fetched here


def unpack_tests(sdist: Path, into: Path) -> Path:
    """Unpack only the tests of a source distribution: the package itself is the installed one."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if "/tests/" in member.name]
        archive.extractall(into, members, filter="data")
    return next(into.iterdir())


def outcomes(
    folder: Path, files: Iterable[str], swap: str, scratch: Path, select: str = "", timeout_s: float = 280
) -> dict[str, str]:
    """Test id -> "passed", "skipped", or "failed: " and the end of its report."""
    (scratch / "pytest.ini").write_text("[pytest]\n")  # not the project's own settings, which name plugins we do not have
    found = scratch / "outcomes.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peer_plugin", "-p", "no:cacheprovider"]
    command += ["-c", str(scratch / "pytest.ini"), f"--rootdir={folder}", "-k", select, *files]
    # Not as tests.support.peer_plugin: their folder is called "tests" too, and comes first.
    (scratch / "plugin").mkdir(exist_ok=True)
    shutil.copy(PLUGIN, scratch / "plugin")
    paths = [str(scratch / "plugin"), str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PEER_SWAP": swap, "PEER_OUTCOMES": str(found), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert found.exists(), done.stdout[-4000:] + done.stderr[-2000:]
    return {name.replace("\\", "/"): said for name, said in json.loads(found.read_text()).items()}


def surprises(got: Mapping[str, str], differences: Mapping[str, str]) -> list[str]:
    """Failures that are not in the list, and tests of the list that pass."""
    out = []
    for name, said in got.items():
        listed = differences.get(name.split("[")[0])
        if said.startswith("failed") and listed is None:
            out.append(f"{name} {said}")
        elif said == "passed" and listed is not None:
            out.append(f"{name} passes, but is listed as a deliberate difference: {listed}")
    return out
