"""What comes back late, twice, or not where it was asked for: found by a second round of attacks on the core."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.slots.layout import FAULT, QUARANTINED, READY

pytestmark = pytest.mark.timeout(120)
FAIL, LATE, FORK = 901, 902, 903


class _Late:
    """An observation that takes long to be read."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(1.0)
        return self.value


class _Forking:
    """Forks where it is pickled, read as a number or put into words; the child comes back, a moment later, with a lie."""

    def __init__(self, folder: str, value: Any) -> None:
        self.folder, self.value = folder, value

    def fork(self, truth: Any, lie: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            time.sleep(0.05)
            return lie
        Path(self.folder, str(pid)).touch()
        return truth

    def __float__(self) -> float:
        return float(self.fork(self.value, -99.0))

    def __reduce__(self) -> Any:
        return float, (self.fork(self.value, -99.0),)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fork(self.value, self.value * 0 - 99)


class Env(gym.Env):  # type: ignore[type-arg]
    """Tells its action in everything that it returns."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(1000)

    def __init__(self, kind: str = "", folder: str = "") -> None:
        self.kind, self.folder, self.length = kind, folder, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.length = 0
        if self.kind == "reset" and seed == 7:
            return np.array([_Forking(self.folder, 0.0).fork(0.0, -99.0), 0.0]), {}
        return np.zeros(2), {"options": options}

    def step(self, action: Any) -> Any:
        self.length += 1
        obs, reward, info = np.array([self.length, action], np.float64), float(action), {"action": int(action)}
        if action == FAIL:
            raise ValueError("as it was told")
        if action == LATE:
            return _Late(obs), reward, False, False, info
        if action == FORK:
            obs = _Forking(self.folder, obs) if self.kind == "obs" else obs
            reward = _Forking(self.folder, reward) if self.kind == "reward" else reward  # type: ignore[assignment]
            info = {"forking": _Forking(self.folder, 1.0)} if self.kind == "info" else info  # type: ignore[dict-item]
        return obs, reward, self.kind == "reset" and action == FORK, False, info

    def forking(self) -> Any:
        """A result that forks when it is pickled."""
        return _Forking(self.folder, 1.0)

    def pid(self) -> int:
        """Of the worker."""
        return os.getpid()


@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_options_outlive_the_worker_that_was_given_them(backend: str) -> None:
    """A worker that has died unnoticed takes the options of a reset with it; the one that makes the reset has them."""
    with ef.make([Env] * 4, backend=backend, num_workers=2, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        os.kill(fleet.call("pid")[0], signal.SIGKILL)
        time.sleep(0.3)
        batch = fleet.reset(options={"level": 3})
        assert [batch.info[i]["options"] for i in range(4)] == [{"level": 3}] * 4
        batch = fleet.reset()  # and in that reset only
        assert [batch.info[i]["options"] for i in range(4)] == [None] * 4


def test_infos_come_with_slots_that_follow_a_long_message() -> None:
    """Slots behind a message that does not fit into the socket travel over it too; their infos were left in the arena."""
    with ef.make([Env] * 2, backend="shm", num_workers=1) as fleet:
        fleet.reset(seed=0)
        for action in range(1, 4):
            fleet.assign([0], tasks=[os.urandom(6_000_000)])
            batch = fleet.step([action, action + 10])
            assert [batch.info[i] for i in range(2)] == [{"action": action}, {"action": action + 10}]


class _Stop(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stop


@pytest.mark.parametrize("backend", ["thread", "aio"])
@pytest.mark.parametrize("core", ["1", "0"], ids=["compiled", "python"])
def test_a_quarantined_slot_stays_quarantined(backend: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt, what was not begun is begun: not a slot whose row nobody was asked for."""
    monkeypatch.setenv("ENVFLEET_COMPILED", core)
    before = signal.signal(signal.SIGALRM, _stop)
    try:
        with ef.make([Env] * 2, backend=backend, on_fault="restart", max_restarts=0, step_timeout_s=10) as fleet:
            fleet.reset(seed=0)
            assert fleet.step([FAIL, 1]).status.tolist() == [QUARANTINED, READY]
            fleet.send([5, LATE])
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(_Stop):
                fleet.recv([1])
            fleet.ready()
            time.sleep(0.2)
            batch = fleet.recv([0])
            assert (batch.status[0], batch.reward[0]) == (QUARANTINED, 0.0)
            assert fleet.recv([1]).reward[0] == LATE
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("backend", ["thread", "aio"])
@pytest.mark.parametrize("core", ["1", "0"], ids=["compiled", "python"])
def test_a_result_that_is_read_too_late(backend: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up while its observation was being read: it does not write the row when it has been."""
    monkeypatch.setenv("ENVFLEET_COMPILED", core)
    with ef.make([Env] * 2, backend=backend, on_fault="restart", step_timeout_s=0.3) as fleet:
        fleet.reset(seed=0)
        assert fleet.step([LATE, 1]).status.tolist() == [QUARANTINED, READY]
        begin = time.monotonic()
        with pytest.raises(ef.EnvFailed, match="quarantined"):
            fleet.call("pid")
        assert time.monotonic() - begin < 0.3
        fleet.send([5, 6])
        time.sleep(1.2)
        batch = fleet.recv()
        assert batch.status.tolist() == [QUARANTINED, READY] and batch.reward.tolist() == [0.0, 6.0]


@pytest.mark.parametrize("backend", ["pipe", "shm"])
@pytest.mark.parametrize("core", ["1", "0"], ids=["compiled", "python"])
@pytest.mark.parametrize("kind", ["obs", "reward", "info", "reset", "call"])
def test_forks_in_what_an_env_returned(
    backend: str, core: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child comes back out of `__array__`, `__float__`, `__reduce__` or a reset with a seed, and must go no further."""
    monkeypatch.setenv("ENVFLEET_COMPILED", core)
    folder = str(tmp_path)
    makers = [lambda: Env(kind, folder), Env]
    with ef.make(makers, backend=backend, num_workers=1, on_fault="restart", step_timeout_s=20) as fleet:
        fleet.reset(seed=0)
        fleet.step([1, 1])
        fleet.assign([0], seeds=[7])
        if kind == "call":
            assert fleet.call("forking", slots=[0]) == (1.0,)
        for action in (FORK, 4, 5, 6, 7):
            batch = fleet.step([action, action])
            time.sleep(0.04)  # the child comes back in the middle of these
            assert batch.status.tolist() == [READY, READY] and batch.reward.tolist() == [action, action]
            assert (fleet.slab.obs > -50).all() and (batch.obs > -50).all()
        assert not fleet.faults and fleet._backend.num_stale == 0
        children = [int(path.name) for path in tmp_path.iterdir()]
        deadline = time.monotonic() + 10
        while any(map(_lives, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert children and not any(map(_lives, children))


class _Elsewhere:
    """A task that only another process can read."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() == state["pid"]:
            raise KeyError("not in this process")


@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_a_fault_with_a_task_that_only_workers_can_read(backend: str) -> None:
    """The record of the fault needs its task, and must not fail over it: every call afterwards raised the same KeyError."""
    with ef.make([Env] * 2, backend=backend, num_workers=1, on_fault="restart", max_restarts=9) as fleet:
        fleet.reset(tasks=[_Elsewhere(), None])
        assert fleet.step([FAIL, 1]).status.tolist() == [FAULT, READY]
        assert "not in this process" in fleet.faults[0].task
        assert fleet.step([1, 1]).status.tolist() == [READY, READY]


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
