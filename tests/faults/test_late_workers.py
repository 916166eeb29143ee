"""A worker that was given up before its process had started touches nothing when it starts after all."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.slots.layout import FAULT


class Counts(gym.Env[Any, Any]):
    """Observes (its process, its seed, its steps); every process that builds one leaves a file."""

    observation_space = gym.spaces.Box(-1, 2**62, (3,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, str(os.getpid())), "w"):
            pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed, self.steps = -1 if seed is None else seed, 0
        return np.array([os.getpid(), self.seed, 0]), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return np.array([os.getpid(), self.seed, self.steps]), 1.0, False, False, {}


@pytest.mark.parametrize("compiled", ["1", "0"])
@pytest.mark.parametrize("backend", ["shm", "pipe"])
def test_only_the_last_worker_steps(
    backend: str, compiled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_leaks: Any
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    options: dict[str, Any] = {"on_fault": "restart", "max_restarts": 50, "init_timeout_s": 0.6, "start_method": "fork"}
    with ef.make([partial(Counts, str(tmp_path))] * 3, backend=backend, num_workers=1, **options) as fleet:
        fleet.reset(seed=5)
        keeper = fleet._backend._keeper.pid
        os.kill(fleet._backend._workers[0].pid, signal.SIGKILL)
        while fleet._supervisor.num_losses[0] == 0:
            fleet.ready()
            fleet.step([0, 0, 0])
        os.kill(fleet._backend._workers[0].pid, signal.SIGKILL)  # now a restart that its keeper is slow to make
        os.kill(keeper, signal.SIGSTOP)
        going_on = threading.Timer(4.0, os.kill, (keeper, signal.SIGCONT))
        going_on.start()
        try:
            batch = fleet.step([0, 0, 0])
            while (batch.status == FAULT).any() or not going_on.finished.is_set():
                batch = fleet.step([0, 0, 0])
        finally:
            going_on.join()
        assert len(fleet._backend._keeper.pids) > 3, "the keeper was asked once: nothing was given up"
        first = batch.obs.copy()
        assert len(set(first[:, 0].tolist())) == 1
        assert len(os.listdir(tmp_path)) == 3, "a worker that was given up has built environments"
        for i in range(1, 200):
            batch = fleet.step([0, 0, 0])
            assert batch.status.tolist() == [0, 0, 0]
            assert (batch.obs == first + [0, 0, i]).all()
        assert (first[:, 1] >= 0).all(), "a rebuilt env has a seed of its own"
