"""After Ctrl-C or a failing environment a view gives no row of another call for a step's, and can be reset."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import envfleet as ef
from envfleet.errors import EnvFailed, FleetError, SlotBusy

pytestmark = pytest.mark.timeout(120)
FAIL, WAIT = 8, 7


class Gated(gym.Env[Any, Any]):
    """Waits for the gate in a reset with options, or for the action `WAIT`; fails for the action `FAIL`."""

    observation_space, action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(9)

    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.num_steps = gate, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options:
            self.gate.wait(60)
        self.num_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == WAIT:
            self.gate.wait(60)
        if action == FAIL:
            raise ValueError("a failing environment")
        self.num_steps += 1
        return np.full(1, self.num_steps, np.float32), 1.0, False, False, {}


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Makes a call that waits for the gate, and interrupts it."""

    def raises(*_: Any) -> None:
        raise KeyboardInterrupt

    def call(what: Callable[[], Any]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            what()

    before = signal.signal(signal.SIGALRM, raises)
    yield call
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def _gymnasium(gate: threading.Event) -> Any:
    return ef.make_vec(lambda: Gated(gate), 3, backend="thread", num_workers=3)


def _sb3(gate: threading.Event) -> Any:
    pytest.importorskip("stable_baselines3")
    from envfleet.adapters.sb3 import SubprocVecEnv

    return SubprocVecEnv([lambda: Gated(gate)] * 3, backend="thread")


@pytest.fixture(params=[_gymnasium, _sb3])
def envs(request: Any, gate: threading.Event) -> Iterator[Any]:
    envs = request.param(gate)
    envs.reset()
    yield envs
    gate.set()
    envs.close()


def _slow_reset(envs: Any) -> Callable[[], Any]:
    if not hasattr(envs, "set_options"):
        return lambda: envs.reset(options={"wait": True})
    envs.set_options({"wait": True})
    return lambda: envs.reset()


def _goes_on(envs: Any) -> None:
    envs.reset()
    assert envs.step(np.zeros(3, np.int64))[0].tolist() == [[1.0]] * 3


def test_an_interrupted_reset_is_not_taken_for_a_step(envs: Any, gate: threading.Event, interrupted: Any) -> None:
    interrupted(_slow_reset(envs))
    gate.set()
    with pytest.raises(FleetError, match=r"slots \[0, 1, 2\] have no result of a step"):
        envs.step_wait()
    _goes_on(envs)


@pytest.mark.parametrize("what", ["reset", "step"])
def test_after_an_interrupt_and_a_refused_call_a_reset_still_works(
    what: str, envs: Any, gate: threading.Event, interrupted: Any
) -> None:
    interrupted(_slow_reset(envs) if what == "reset" else lambda: envs.step(np.full(3, WAIT)))
    with pytest.raises(SlotBusy):
        envs.step(np.zeros(3, np.int64))
    gate.set()
    _goes_on(envs)


def test_a_reset_drops_what_an_interrupt_between_two_calls_has_left(envs: Any) -> None:
    envs.fleet.send_reset()  # as if the interrupt had come right after this, and before the result was waited for
    with pytest.raises(FleetError, match="have no result of a step"):
        envs.step_wait()
    _goes_on(envs)


def test_an_episode_that_ended_in_a_dropped_row_is_not_stepped() -> None:
    envs = ef.make_vec(lambda: gym.make("CartPole-v1", max_episode_steps=2), 2, backend="serial", autoreset_mode="Disabled")
    envs.reset(seed=0)
    envs.step([0, 0])
    envs.fleet.send([0, 0])  # a step that was interrupted; it ends both episodes
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(gym.error.ResetNeeded, match=r"slots \[1\]"):
        envs.step([0, 0])
    envs.close()


def test_an_interrupted_step_can_be_waited_for(envs: Any, gate: threading.Event, interrupted: Any) -> None:
    interrupted(lambda: envs.step(np.full(3, WAIT)))
    gate.set()
    assert envs.step_wait()[0].tolist() == [[1.0]] * 3


def test_after_a_fault_the_rows_of_the_others_are_not_taken_for_a_whole_batch(envs: Any) -> None:
    envs.step_async(np.array([0, FAIL, 0]))
    with pytest.raises(EnvFailed):
        envs.step_wait()
    with pytest.raises(FleetError, match=r"slots \[1\] have no result of a step"):
        envs.step_wait()
    _goes_on(envs)


def test_a_masked_reset_that_is_interrupted_gives_no_short_batch(gate: threading.Event, interrupted: Any) -> None:
    envs = _gymnasium(gate)
    envs.reset()
    mask = np.array([True, False, True])
    interrupted(lambda: envs.reset(options={"reset_mask": mask, "wait": True}))
    gate.set()
    with pytest.raises(FleetError, match="have no result of a step"):
        envs.step_wait()
    _goes_on(envs)
    envs.close()
