"""gymnax itself, in a venv of its own: it needs an older Gymnasium than the pinned one."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.gymnax_venv import CACHE, python_with_gymnax
from tests.support.system import child_env

SCRIPT = """
import numpy as np
import envfleet as ef
from envfleet.testing import record

for name in ("CartPole-v1", "Pendulum-v1", "Catch-bsuite", "FourRooms-misc"):
    digests = []
    for _ in range(2):
        with ef.make(f"gymnax:{name}", num_envs=4) as fleet:
            digests.append(record(fleet, 60, seed=3).digest())
    assert digests[0] == digests[1], name
with ef.make("gymnax:CartPole-v1", num_envs=4096) as fleet:
    fleet.reset(seed=0)
    ends = sum(int(fleet.step(np.ones(4096, int)).terminated.sum()) for _ in range(20))
assert 4096 < ends < 3 * 4096, ends
print(fleet.plan)
"""


def test_environments_of_gymnax_run_in_a_fleet() -> None:
    python = python_with_gymnax()
    if python is None:
        pytest.skip(f"gymnax is not in {CACHE.name}/gymnax (`python -m tests.support.gymnax_venv` puts it there)")
    env = {**child_env(), "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    done = subprocess.run([str(python), "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("jax, 1 worker, 4096 slots: the engine of gymnax:CartPole-v1")
