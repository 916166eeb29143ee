"""A fleet in a thread, and what another thread or a signal handler does to it meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.core.one_thread import other_caller
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


class Echo(gym.Env):
    """Observes its action."""

    observation_space = action_space = gym.spaces.Box(-1e9, 1e9, (500,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(500), {}

    def step(self, action: Any) -> Any:
        return np.array(action), 1.0, False, False, {}


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_come_at_the_same_moment_do_not_get_rows_of_each_other(way: str) -> None:
    wrong: list[Any] = []
    right: list[int] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(fleet: ef.Fleet, sign: int) -> None:
        try:
            for i in range(1500):
                actions = np.full((2, 500), sign * (i + 1.0))
                try:
                    obs = fleet.step(actions).obs
                except FleetError:  # the other thread is in a call
                    continue
                if np.array_equal(obs, actions):
                    right.append(sign)
                else:
                    wrong.append((actions[:, 0], obs[:, 0]))
        except BaseException as error:
            wrong.append(error)

    try:
        with starter(way)(Echo, 2, 2) as fleet:
            fleet.reset(seed=0)
            threads = [threading.Thread(target=work, args=(fleet, sign), daemon=True) for sign in (-1, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads) and not wrong, wrong[:3]
            assert right
            fleet.drop()  # a step is two calls on some paths, of which the second may have been refused
            actions = np.full((2, 500), 0.5)
            assert np.array_equal(fleet.step(actions).obs, actions)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("raised", [None, KeyboardInterrupt, SystemExit, ValueError], ids=str)
@pytest.mark.parametrize("way", ["serial", "pipe", "shm"])
def test_the_end_of_a_call_that_a_handler_closed_in_is_the_end_of_the_fleet(way: str, raised: Any) -> None:
    """However the call ends: it may be the last one."""
    fleet = starter(way)(Waiting, 4, 2)
    fleet.reset(seed=0)
    backend = fleet._backend
    closed: list[int] = []
    real, backend.close = backend.close, lambda timeout_s: (closed.append(1), real(timeout_s))[1]  # type: ignore[method-assign]

    def handler(*_: Any) -> None:
        fleet.close()
        assert not closed
        if raised is not None:
            raise raised

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while not fleet._closed:
            _step(fleet, [])
    except (FleetClosed, KeyboardInterrupt, SystemExit, ValueError):
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert closed == [1]


def test_a_handler_and_another_thread_that_close_at_once_do_not_wait_for_each_other() -> None:
    fleet = starter("pipe")(Waiting, 4, 2)
    fleet.reset(seed=0)
    other = threading.Thread(target=fleet.close, args=(1e6,), daemon=True)

    def handler(*_: Any) -> None:
        other.start()
        while not fleet._closing.locked():
            pass  # it waits for the call that is interrupted here
        fleet.close()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(FleetClosed):
            while True:
                _step(fleet, [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    other.join(30)
    assert not other.is_alive()


def _own_share() -> ef.Fleet:
    return ef.make(lambda: Waiting(0.8), num_envs=4, backend="shm", num_workers=2, isolate=False, start_method="fork")


def _joined() -> ef.Fleet:
    return ef.join([starter(way)(lambda: Waiting(0.8), 2, 1) for way in ("serial", "pipe", "shm")])


@pytest.mark.parametrize("make", [_own_share, _joined])
def test_a_call_in_the_callers_own_env_tells_that_the_fleet_is_closed(make: Any) -> None:
    """The env in this process cannot be left in time, and what the call finds then is a fleet without workers."""
    fleet = make()
    fleet.reset(seed=0)
    driver = Driver(fleet, _step)
    driver.start()
    assert not driver.some.wait(0.2), driver.error
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        fleet.close(timeout_s=0.2)
    driver.join(30)
    assert not driver.is_alive() and type(driver.error) is FleetClosed, driver.error


class SlowToPack(Waiting):
    """Copying it takes longer than closing."""

    def __getstate__(self) -> Any:
        time.sleep(20)
        return self.__dict__


def test_a_resize_ends_when_the_fleet_is_closed() -> None:
    fleet = starter("pipe")(SlowToPack, 2, 1)
    fleet.reset(seed=0)
    driver = Driver(fleet, lambda fleet, calls: fleet.resize(2))
    driver.start()
    while other_caller(fleet) is None:
        pass
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # the worker was killed
        fleet.close(timeout_s=0.3)
    driver.join(15)
    assert not driver.is_alive() and type(driver.error) is FleetClosed, driver.error


class Closing(Waiting):
    """Closes its own fleet in its third step."""

    fleet: ef.Fleet

    def step(self, action: Any) -> Any:
        if self.t == 2:
            self.fleet.close()
        return super().step(action)


@pytest.mark.parametrize("way", ["serial", "thread", "aio"])
def test_an_env_may_close_its_own_fleet(way: str, no_leaks: None) -> None:
    fleet = Closing.fleet = starter(way)(Closing, 4, 2)
    fleet.reset(seed=0)
    with pytest.raises(FleetClosed):
        for _ in range(4):
            _step(fleet, [])
    fleet.close()
    assert fleet.faults == []
    del Closing.fleet


class Collecting(Waiting):
    """The garbage collector runs in its steps, in whichever thread these are."""

    closed: ClassVar[list[int]] = []

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        gc.collect()
        return super().step(action)

    def close(self) -> None:
        self.closed.append(1)


class CollectingOnTheLoop(Collecting):
    """The same, awaited."""

    async def step(self, action: Any) -> Any:
        return Collecting.step(self, action)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(("way", "env"), [("thread", Collecting), ("aio", Collecting), ("aio", CollectingOnTheLoop)])
def test_a_fleet_that_is_collected_in_a_thread_of_its_own_is_closed(way: str, env: Any, no_leaks: None) -> None:
    env.closed.clear()
    gc.disable()
    try:
        fleet = starter(way)(env, 4, 2)
        fleet.reset(seed=0)
        fleet.itself = fleet  # type: ignore[attr-defined]  # only the garbage collector can drop it
        fleet.send(np.zeros(4, np.int64))
        del fleet
        deadline = time.monotonic() + 30
        while len(env.closed) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert len(env.closed) == 4


def test_a_forked_child_and_a_refused_thread_read_nothing_of_the_backend() -> None:
    """What they read of the keeper's messages would be missing where it belongs."""
    with starter("pipe")(lambda: Waiting(0.3), 2, 2) as fleet:
        fleet.reset(seed=0)
        pid = os.fork()
        if pid == 0:
            fleet._backend.check = lambda: os._exit(3)  # type: ignore[method-assign]
            try:
                fleet.ready()
            except FleetClosed:
                os._exit(0)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        driver = Driver(fleet, _step)
        driver.start()
        while not fleet.is_out.any():
            pass
        real, checked = fleet._backend.check, []
        fleet._backend.check = lambda: (checked.append(threading.current_thread().name), real())[1]  # type: ignore[method-assign, func-returns-value]
        for _ in range(20):
            with pytest.raises(FleetError, match="one thread at a time"):
                fleet.ready()
        assert threading.current_thread().name not in checked
    driver.join(30)


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
