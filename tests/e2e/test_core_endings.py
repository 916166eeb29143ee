"""Whatever ends a program that uses a fleet, nothing is left: no process, no grandchild, no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Launcher
from envfleet.errors import FleetClosed, FleetError
from envfleet.testing import Held, alive, descendants, leaks_since, wait_until
from tests.support.system import child_env

METHODS = ("fork", "forkserver", "spawn")


def run(script: str, tmp_path: Path, *args: str, **options: Any) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, str(path), *args], env=child_env(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


BUSY = """
    import os, sys
    import envfleet as ef
    from envfleet.envs.probe import Launcher, Waiting
    envs = [lambda: Launcher(), lambda: Launcher(detach=True), lambda: Waiting(0.01), lambda: Waiting(1000.0)]
    fleet = ef.make(envs, backend=sys.argv[1], num_workers=4, start_method=sys.argv[2])
    fleet.reset(seed=0)
    children = fleet.get_attr("child", slots=[0, 1])
    fleet.send([0, 0, 0, 0])
    try:
        print(*children, flush=True)  # from here on the interrupt may come
        fleet.recv()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if sys.argv[3:] == ["close"]:
            fleet.close(timeout_s=0.5)
        raise SystemExit(130)
"""


@pytest.mark.parametrize(("backend", "method"), [("shm", m) for m in METHODS] + [("pipe", "fork")])
def test_sigkill_of_the_parent_leaves_nothing(backend: str, method: str, tmp_path: Path) -> None:
    """Invariant 7: SIGKILL in the middle of a step; children, grandchildren and detached ones end too."""
    shm = set(os.listdir("/dev/shm"))
    process = run(BUSY, tmp_path, backend, method)
    assert process.stdout is not None
    grandchildren = [int(word) for word in process.stdout.readline().split()]
    below = descendants(process.pid)
    assert len(grandchildren) == 2 and all(alive(pid) for pid in grandchildren) and len(below) >= 5
    process.kill()
    process.wait()
    everyone = {*below, *grandchildren}
    assert wait_until(lambda: not any(alive(pid) for pid in everyone), 10), [p for p in everyone if alive(p)]
    assert set(os.listdir("/dev/shm")) <= shm
    process.communicate()


@pytest.mark.parametrize("how", ["", "close"])
def test_ctrl_c_propagates_and_leaves_nothing(how: str, tmp_path: Path) -> None:
    """The whole foreground group gets SIGINT, as from a terminal: workers ignore it, the parent's exception ends it all."""
    process = run(BUSY, tmp_path, "shm", "fork", *([how] if how else []), start_new_session=True)
    assert process.stdout is not None
    grandchildren = [int(word) for word in process.stdout.readline().split()]
    everyone = {*descendants(process.pid), *grandchildren}
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted" in out, err
    assert wait_until(lambda: not any(alive(pid) for pid in everyone), 10)


UNGUARDED = """
    import sys
    import gymnasium as gym, numpy as np
    import envfleet as ef
    class Mine(gym.Env):
        observation_space = gym.spaces.Box(-9, 9, (1,))
        action_space = gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.float32([seed or 0]), {}
        def step(self, action):
            return np.float32([action]), 1.0, False, False, {}
    gym.register("Mine-v0", entry_point=Mine)
    gym.register("ByName-v0", entry_point="__main__:Mine")
    offset = 3
    for env in (lambda: gym.wrappers.TransformReward(Mine(), lambda r: r + offset), Mine, "Mine-v0", "ByName-v0"):
        with ef.make(env, 2, backend="shm", num_workers=2, start_method=sys.argv[1]) as fleet:
            fleet.reset(seed=1)
            print(fleet.step([0, 1]).reward.tolist(), flush=True)
    print("once")
"""


@pytest.mark.parametrize("method", METHODS)
def test_an_unguarded_script_runs_under_every_start_method(method: str, tmp_path: Path) -> None:
    process = run(UNGUARDED, tmp_path, method)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines() == ["[4.0, 4.0]", "[1.0, 1.0]", "[1.0, 1.0]", "[1.0, 1.0]", "once"], out + err


def test_what_the_script_had_printed_is_printed_once(tmp_path: Path) -> None:
    """Forked workers inherit unflushed output; it must not come out again when they end."""
    script = """
        import envfleet as ef
        print("only once", end=" ")
        ef.make("CartPole-v1", 2, backend="shm", num_workers=2, start_method="fork").close()
    """
    out, err = run(script, tmp_path).communicate(timeout=30)
    assert out == "only once ", out + err


def test_a_fork_of_the_users_process_cannot_use_or_end_the_fleet() -> None:
    """A forked child is refused, its exit does not close the parent's fleet, and the parent's close is still quick."""
    before = Held.now()
    fleet = ef.make(Launcher, 2, backend="shm", num_workers=2, start_method="fork")
    fleet.reset(seed=0)
    grandchildren = fleet.get_attr("child")
    release, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        code = 1
        try:
            fleet.step([0, 0])
        except FleetClosed:
            fleet.close()
            code = 0
        os.read(release, 1)  # lives on, with copies of every socket, until the parent is done
        os._exit(code)
    os.close(release)
    assert fleet.step([0, 0]).reward.tolist() == [1.0, 1.0]
    fleet.close(timeout_s=2.0)
    assert not any(alive(child) for child in grandchildren)
    os.close(held)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert leaks_since(before) == {}


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_a_killed_keeper_is_a_clear_error(method: str, on_fault: str) -> None:
    before = Held.now()
    fleet = ef.make(Launcher, 2, backend="shm", num_workers=2, start_method=method, on_fault=on_fault)
    fleet.reset(seed=0)
    everyone = {*descendants(os.getpid()), *fleet.get_attr("child")} - before.processes
    os.kill(fleet._backend._keeper.pid, signal.SIGKILL)
    with pytest.raises(FleetError, match="worker"):
        for _ in range(1_000_000):  # the kernel ends the workers soon, not at once: a step takes microseconds
            fleet.step([0, 0])
    with pytest.raises(FleetError):
        fleet.reset(seed=0)
    fleet.close(timeout_s=1.0)
    assert wait_until(lambda: not any(alive(pid) for pid in everyone), 5)
    del fleet
    assert leaks_since(before) == {}


class Detacher(Counting):
    """Leaves a detached process that inherits whatever is inheritable, then dies."""

    def step(self, action: Any) -> Any:
        os.system("setsid sleep 1000 &")
        os._exit(5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_a_dead_worker_is_noticed_though_its_child_lives_on(backend: str, method: str) -> None:
    """Invariant 4: a detached child of the env must not keep the worker's socket open."""
    with pytest.raises(ef.WorkerLost, match="exited with code 5"):
        with ef.make(Detacher, 1, backend=backend, start_method=method, step_timeout_s=9.0) as fleet:
            fleet.reset(seed=0)
            fleet.send([0])
            fleet.recv(timeout_s=6.0)
