"""Gymnasium's own vector wrappers, many slots under few descriptors, and Ctrl-C in the middle of a step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Waiting
from envfleet.testing import Held, canonical, leaks_since, record
from envfleet.testing.conformance import Start
from tests.support.system import child_env
from tests.support.ways import WAYS


@pytest.mark.parametrize("way", ["serial", "shm"])
def test_gymnasiums_vector_wrappers(way: str, tmp_path: Path) -> None:
    """RecordEpisodeStatistics and NormalizeObservation give what they give over SyncVectorEnv; RecordVideo writes."""
    backend, options = WAYS[way]
    fns = [lambda: gym.make("CartPole-v1", max_episode_steps=10)] * 3
    results = []
    for envs in (
        gym.vector.SyncVectorEnv(fns),
        ef.make_vec(fns, backend=backend if isinstance(backend, str) else backend(), **options),
    ):
        wrapped = gym.wrappers.vector.NormalizeObservation(gym.wrappers.vector.RecordEpisodeStatistics(envs))
        wrapped.action_space.seed(0)
        out = [canonical(wrapped.reset(seed=1)[0])]
        for _ in range(40):
            obs, reward, terminated, truncated, infos = wrapped.step(wrapped.action_space.sample())
            infos.get("episode", {}).pop("t", None)  # seconds
            out.append(canonical((obs, reward, terminated, truncated, infos)))
        results.append(out)
        wrapped.close()
    assert results[0] == results[1]
    pytest.importorskip("moviepy")
    video = gym.wrappers.vector.RecordVideo(
        ef.make_vec(lambda: Counting(4, render_mode="rgb_array"), 2, backend=backend, **options),
        str(tmp_path),
        step_trigger=lambda step: step == 0,
        video_length=5,
    )
    video.reset(seed=0)
    for _ in range(8):
        video.step(np.zeros(2, int))
    video.close()
    assert list(tmp_path.glob("*.mp4"))


def test_a_thousand_slots_under_1024_descriptors() -> None:
    code = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        import envfleet as ef
        from envfleet.envs.probe import Counting
        for backend in ("serial", "thread", "aio", "pipe", "shm"):
            with ef.make(Counting, 1000, backend=backend) as fleet:
                fleet.reset(seed=0)
                print(backend, fleet.step([0] * 1000).reward.sum())
    """
    out = subprocess.run([sys.executable, "-c", code], env=child_env(), text=True, capture_output=True, timeout=100)
    assert [line.split()[1] for line in out.stdout.splitlines()] == ["1000.0"] * 5, out.stderr


@pytest.mark.parametrize("way", [name for name in WAYS if name != "scripted"])
def test_ctrl_c_in_a_step_propagates_and_the_fleet_can_go_on(way: str) -> None:
    """KeyboardInterrupt reaches the caller; after it a reset gives the same bytes as a new fleet; close leaves nothing."""
    backend, options = WAYS[way]
    before = Held.now()
    with Start(backend, **options)(lambda: Waiting(0.2, limit=5), 2, 2) as fleet:
        fleet.reset(seed=0)
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                fleet.step([0, 0])
        timer.join()
        if (fleet._table.state == 1).any():
            # Workers went on undisturbed: what was sent comes back. In our own thread the interrupt hit the env itself.
            with pytest.raises(ef.EnvFailed) if way == "serial" else contextlib.nullcontext():
                fleet.recv()
        batch = fleet.reset(seed=3)
        assert batch.obs[:, 0].tolist() == [0.0, 0.0] and batch.seed.tolist() == [3, 4]
        assert fleet.step([0, 0]).obs[:, 0].tolist() == [1.0, 1.0]
    del fleet, batch, timer
    assert leaks_since(before) == {}


class Loud(Counting):
    """Prints, writes to stderr and closes its standard input, as envs do."""

    def step(self, action: Any) -> Any:
        print("noise " * 1000)
        print("more", file=sys.stderr)
        return super().step(action)


@pytest.mark.parametrize("way", ["pipe", "shm"])
def test_envs_that_print_do_no_harm(way: str, capfd: Any) -> None:
    backend, options = WAYS[way]
    with ef.make(Counting, 2, backend="serial") as fleet:
        wanted = record(fleet, 20).digest()
    with Start(backend, **options)(Loud, 2, 2) as fleet:
        assert record(fleet, 20).digest() == wanted
    capfd.readouterr()
