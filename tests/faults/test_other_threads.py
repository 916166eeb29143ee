"""A fleet in a thread, and what another thread or a signal handler does to it meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import FleetClosed, FleetError
from tests.support.ways import starter

WAYS = ("serial", "thread", "aio", "pipe", "shm")
pytestmark = pytest.mark.timeout(120)


class Waiting(gym.Env):
    """A step takes a few milliseconds, so that whoever comes finds the fleet in a call."""

    observation_space = gym.spaces.Box(0.0, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, step_s: float = 0.005) -> None:
        self.t, self.step_s = 0, step_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        time.sleep(self.step_s)
        return np.full(1, self.t, np.float32), 1.0, False, False, {}

    def work(self) -> int:
        """A call that takes as long."""
        time.sleep(self.step_s)
        return self.t


def _step(fleet: ef.Fleet, calls: list[Any]) -> None:
    calls.append(float(fleet.step(np.zeros(fleet.num_envs, np.int64)).obs.sum()))


def _some(fleet: ef.Fleet, calls: list[Any]) -> None:
    slots = fleet.recv(at_least=1).slots
    fleet.send(np.zeros(len(slots), np.int64), slots)
    calls.append(1)


def _call(fleet: ef.Fleet, calls: list[Any]) -> None:
    calls.append(fleet.call("work"))


class Driver(threading.Thread):
    """Makes calls until one is refused."""

    def __init__(self, fleet: ef.Fleet, call: Any) -> None:
        super().__init__(name="driver", daemon=True)
        self.fleet, self.call = fleet, call
        self.calls: list[Any] = []
        self.some = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                self.call(self.fleet, self.calls)
                if len(self.calls) == 3:
                    self.some.set()
        except BaseException as error:
            self.error = error
            self.some.set()


@pytest.mark.parametrize("call", [_step, _some, _call], ids=["step", "recv", "call"])
@pytest.mark.parametrize("way", WAYS)
def test_any_thread_may_close(way: str, call: Any) -> None:
    fleet = starter(way)(Waiting, 4, 2)
    fleet.reset(seed=0)
    if call is _some:
        fleet.send(np.zeros(4, np.int64))
    driver = Driver(fleet, call)
    driver.start()
    assert driver.some.wait(30)
    fleet.close()
    driver.join(30)
    assert not driver.is_alive() and type(driver.error) is FleetClosed, driver.error
    assert fleet.faults == []


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_waits_ends_when_the_fleet_is_closed(way: str) -> None:
    """Also where the environment is stuck for longer than closing takes."""
    fleet = starter(way)(lambda: Waiting(0.8), 2, 2)
    fleet.reset(seed=0)
    driver = Driver(fleet, _step)
    driver.start()
    assert not driver.some.wait(0.2), driver.error
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # "still stuck", or "was killed"
        fleet.close(timeout_s=0.3)
    driver.join(30)
    assert not driver.is_alive() and type(driver.error) is FleetClosed, driver.error


@pytest.mark.parametrize("way", WAYS)
def test_a_call_while_another_thread_is_in_one_is_refused(way: str) -> None:
    """And nothing happens to the rows of the thread that was there."""
    with starter(way)(Waiting, 4, 2) as fleet:
        fleet.reset(seed=0)
        driver = Driver(fleet, _step)
        driver.start()
        refused = 0
        while refused < 20 and driver.is_alive():
            try:
                fleet.assign([0], tasks=[3])
            except FleetError as error:
                assert "'driver'" in str(error) and "one thread at a time" in str(error), error
                refused += 1
            try:
                fleet.ready()
            except FleetError:
                refused += 1
        assert driver.some.wait(30) and driver.error is None
    driver.join(30)
    assert type(driver.error) is FleetClosed, driver.error
    assert driver.calls == [4.0 * (i + 1) for i in range(len(driver.calls))]


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_handler_may_close(way: str) -> None:
    fleet = starter(way)(Waiting, 4, 2)
    fleet.reset(seed=0)
    before = signal.signal(signal.SIGALRM, lambda *_: fleet.close())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(FleetClosed):
            for _ in range(2000):
                _step(fleet, [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_threads_that_close_at_once_close_once() -> None:
    fleet = starter("pipe")(Waiting, 4, 2)
    fleet.reset(seed=0)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            fleet.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads) and not errors


AT_EXIT = """
import atexit, sys
from tests.faults.test_other_threads import Driver, Waiting, _step
from tests.support.ways import starter

if __name__ == "__main__":
    driver = Driver(None, _step)
    atexit.register(lambda: (driver.join(30), print(type(driver.error).__name__)))  # registered first: runs last
    driver.fleet = starter(sys.argv[1])(Waiting, 4, 2)
    driver.fleet.reset(seed=0)
    driver.start()
    assert driver.some.wait(30)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_thread_may_be_in_a_call_when_the_interpreter_ends(way: str, tmp_path: Path) -> None:
    (tmp_path / "at_exit.py").write_text(AT_EXIT)
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    ran = subprocess.run([sys.executable, tmp_path / "at_exit.py", way], env=env, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout.split()) == (0, ["FleetClosed"]), ran
    assert "Traceback" not in ran.stderr, ran.stderr
