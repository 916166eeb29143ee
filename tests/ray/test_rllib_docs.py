"""Every block of docs/rllib.md runs as it stands, in the venv that has RLlib."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.system import child_env

WHY = "RLlib is not installed here: `make test-ray` runs this in a venv that has it"
pytest.importorskip("ray.rllib", reason=WHY, exc_type=ImportError)

BLOCKS = re.findall(r"^```py\n(.*?)^```", (Path(__file__).parents[2] / "docs" / "rllib.md").read_text(), re.M | re.S)
#: RLlib would start Ray by itself; here it stays small and on loopback (tests/ray/conftest.py sets the variables).
START = "import ray\nray.init(address='local', num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False)\n"


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_a_block_of_the_guide_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(f"{START}{code}\nray.shutdown()\n")
    done = subprocess.run(
        [sys.executable, str(script)], env=child_env(), cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "False" not in done.stdout
