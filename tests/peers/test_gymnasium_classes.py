"""What users of Gymnasium's SyncVectorEnv and AsyncVectorEnv rely on, on our classes of the same names."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import error, spaces
from gymnasium.vector import AutoresetMode

import envfleet as ef
from envfleet.adapters.gymnasium import AsyncVectorEnv, SyncVectorEnv
from envfleet.envs.probe import Waiting
from tests.support.light_envs import Custom

OURS = {
    "sync": SyncVectorEnv,
    "thread": partial(ef.make_vec, backend="thread"),
    "shm": partial(AsyncVectorEnv, context="fork"),
    "pipe": partial(AsyncVectorEnv, shared_memory=False, context="fork"),
}
ACTIONS = np.array([0, 1, 0])
# Of Gymnasium's own workings, which are other ones here.
INNER = {"parent_pipes", "processes", "error_queue", "observations"}


@pytest.fixture(params=OURS)
def kind(request: Any) -> Any:
    return OURS[request.param]


class Bounded(Custom):
    def __init__(self, high: float, size: int = 2) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-high, high, (size,), np.float32)


class Raises(Custom):
    """Raises what its action names."""

    def step(self, action: Any) -> Any:
        if action:
            raise (ValueError("a wrong value"), KeyError("a key"), SpecialError("more", "than one text"))[int(action) - 1]
        return super().step(0)


Raises.action_space = spaces.Discrete(4)  # type: ignore[assignment]


class SpecialError(AssertionError):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one, two)


class Tells(Custom):
    """Puts every step into a queue of multiprocessing's manager."""

    def __init__(self, queue: Any) -> None:
        super().__init__()
        self.queue = queue

    def step(self, action: Any) -> Any:
        self.queue.put(int(action))
        return super().step(action)


@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_constructors_and_names_are_gymnasiums(name: str) -> None:
    ours, theirs = globals()[name], getattr(gym.vector, name)
    mine = list(inspect.signature(ours).parameters)
    assert mine[: len(inspect.signature(theirs).parameters)] == list(inspect.signature(theirs).parameters)
    assert issubclass(ours, gym.vector.VectorEnv)
    envs, wanted = ours([Custom] * 2), theirs([Custom] * 2)
    assert {name for name in dir(wanted) if not name.startswith("_")} - set(dir(envs)) <= INNER
    assert repr(envs) == repr(wanted)
    for attribute in ("num_envs", "metadata", "render_mode", "spec", "copy", "autoreset_mode", "observation_mode", "closed"):
        assert getattr(envs, attribute) == getattr(wanted, attribute), attribute
    envs.close(), wanted.close()


def test_arguments_by_position() -> None:
    with SyncVectorEnv([Custom], False, "same", AutoresetMode.SAME_STEP) as envs:
        assert not envs.copy and envs.autoreset_mode is AutoresetMode.SAME_STEP
        assert envs.reset()[0] is not envs.reset()[0] and np.shares_memory(envs.reset()[0], envs.reset()[0])
    with AsyncVectorEnv([Custom] * 3, False, True, "fork", True, None, "same", "SameStep", 2) as many:
        assert (many.fleet.plan.backend, many.fleet.plan.num_workers, many.fleet.plan.start_method) == ("pipe", 2, "fork")
    with AsyncVectorEnv([Custom] * 3, context="fork") as many:
        assert (many.fleet.plan.backend, many.fleet.plan.num_workers) == ("shm", 3)


@pytest.mark.parametrize(
    "bad", [{"worker": print}, {"context": "nothing"}, {"max_concurrency": 0}, {"max_concurrency": 1.5}, {"on_end": "wait"}]
)
def test_arguments_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(next(iter(bad))) if "context" not in bad else "cannot find context"):
        AsyncVectorEnv([Custom] * 2, **bad)


def test_reset_in_two_halves_is_reset(kind: Any) -> None:
    with kind([Custom] * 3) as envs:
        wanted, told = envs.reset(seed=[5, 6, 7], options={"offset": 100})
        envs.reset_async(seed=[5, 6, 7], options={"offset": 100})
        got, said = envs.reset_wait(timeout=60)
        assert (got == wanted).all() and said["seed"].tolist() == told["seed"].tolist() == [5, 6, 7]
        step = envs.step(ACTIONS)[0]
        envs.reset_async(5, {"reset_mask": np.array([True, False, False])})
        got, _ = envs.reset_wait()
        assert got[0, 0] == 0 and (got[1:] == step[1:]).all()


def test_calls_out_of_order(kind: Any) -> None:
    """Both libraries' classes, the name of the call, and nothing is lost by asking wrongly."""
    envs = kind([Custom] * 3)
    for call, name in ((envs.reset_wait, "reset"), (envs.step_wait, "step"), (envs.call_wait, "call")):
        with pytest.raises(error.NoAsyncCallError) as raised:
            call()
        assert raised.value.name == name and isinstance(raised.value, ef.FleetError)
    envs.reset(seed=0)
    envs.step_async(ACTIONS)
    for call in (
        partial(envs.step_async, ACTIONS),
        partial(envs.step, ACTIONS),
        envs.reset,
        envs.reset_async,
        partial(envs.call, "render"),
        partial(envs.call_async, "render"),
        partial(envs.set_attr, "mark", 1),
    ):
        with pytest.raises(error.AlreadyPendingCallError) as pending:
            call()
        assert pending.value.name == "step" and isinstance(pending.value, ef.errors.SlotBusy)
    with pytest.raises(error.NoAsyncCallError):
        envs.reset_wait()
    assert envs.step_wait()[0][:, 0].tolist() == [1, 1, 1]
    envs.call_async("double", 4, plus=1)
    with pytest.raises(error.AlreadyPendingCallError):
        envs.step(ACTIONS)
    assert envs.call_wait() == (14, 14, 14)
    assert envs.step(ACTIONS)[0][:, 0].tolist() == [2, 2, 2]
    envs.step_async(ACTIONS)
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close()
    envs.close(terminate=True)


def test_after_close(kind: Any) -> None:
    envs = kind([Custom] * 2)
    envs.close()
    assert envs.closed
    calls = (envs.reset, envs.reset_async, envs.reset_wait, partial(envs.step, [0, 0]), partial(envs.step_async, [0, 0]))
    calls += (envs.step_wait, partial(envs.call, "render"), envs.call_wait, partial(envs.set_attr, "mark", 1), envs.render)
    for call in calls:
        with pytest.raises(error.ClosedEnvironmentError) as closed:
            call()
        assert isinstance(closed.value, ef.errors.FleetClosed)


@pytest.mark.parametrize("name", ["thread", "shm", "pipe"])
def test_a_result_that_is_late_can_still_be_fetched(name: str) -> None:
    with OURS[name]([lambda: Waiting(0.2, limit=5)] * 2) as envs:
        envs.reset(seed=0)
        envs.step_async(np.array([0, 0]))
        with pytest.raises(multiprocessing.TimeoutError) as late:
            envs.step_wait(timeout=0.01)
        assert isinstance(late.value, TimeoutError) and isinstance(late.value, ef.errors.RecvTimeout)
        with pytest.raises(error.AlreadyPendingCallError):
            envs.reset_async()
        assert envs.step_wait()[0][:, 0].tolist() == [1, 1]


def test_actions_and_episodes_that_are_not_there(kind: Any) -> None:
    with kind([Custom] * 3, autoreset_mode="Disabled") as envs:
        with pytest.raises(error.ResetNeeded) as needed:
            envs.step(ACTIONS)
        assert isinstance(needed.value, AssertionError)
        envs.reset()
        for wrong in (ACTIONS[:2], np.array([0, 1, 0, 1])):
            with pytest.raises(ValueError):
                envs.step(wrong)
        for one in (0, 1.0, np.int64(1)):
            with pytest.raises(TypeError, match="one action"):
                envs.step(one)
        for _ in range(5):
            envs.step(ACTIONS)
        with pytest.raises(AssertionError):  # all have ended
            envs.step(ACTIONS)


def test_what_an_environment_raises_can_be_caught_by_its_class(kind: Any) -> None:
    for action, caught in ((1, ValueError), (2, KeyError), (3, AssertionError)):
        with kind([Raises] * 2) as envs:
            envs.reset()
            with pytest.raises(LookupError if caught is KeyError else caught) as raised:
                envs.step([0, action])
            assert isinstance(raised.value, ef.EnvFailed) and raised.value.fault.slot == 1
            assert type(raised.value.__cause__).__name__ in (caught.__name__, "SpecialError")
            assert "slot 1 failed in step" in str(raised.value) and "\n" in str(raised.value)
            copy = pickle.loads(pickle.dumps(raised.value))
            assert type(copy) is ef.EnvFailed and str(copy) == str(raised.value)
            envs.reset()
    with kind([Custom] * 2) as envs:
        with pytest.raises(AttributeError, match="nonsense"):
            envs.get_attr("nonsense")
        with pytest.raises(AttributeError, match="nonsense"):
            envs.call("nonsense")


def test_environments_themselves() -> None:
    with SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=5)] * 2) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.array([0, 1]))
        assert [type(env.unwrapped).__name__ for env in envs.envs] == ["CartPoleEnv"] * 2
        assert envs.envs[0] is envs.envs[0] is not envs.envs[1]
        assert envs.envs[1]._elapsed_steps == 3  # also where the compiled loop counts
        envs.envs[0].unwrapped.gravity = 3.0
        assert envs.get_attr("gravity") == (3.0, 9.8)
        assert envs.step(np.array([0, 1]))[3].tolist() == [False, False]
        assert envs.step(np.array([0, 1]))[3].tolist() == [True, True]
    with OURS["shm"]([Custom]) as far:
        assert not hasattr(far, "envs")


@pytest.mark.parametrize("options", [{"backend": "serial"}, {"backend": "thread"}, {"backend": "shm", "num_workers": 1}])
def test_one_environment_in_two_slots_is_refused(options: dict[str, Any]) -> None:
    env = Custom()
    same = lambda: gym.wrappers.TimeLimit(env, 5)
    with pytest.raises(ValueError, match="slots 0 and 2 got the same environment object"):
        ef.make_vec([same, Custom, same], **options)


def test_observation_spaces_that_differ(kind: Any) -> None:
    fns = [partial(Bounded, high) for high in (1.0, 2.0, 3.0)]
    with pytest.raises(RuntimeError, match="observation_mode='different'") as raised:
        kind(fns)
    assert isinstance(raised.value, ef.errors.SpacesDiffer) and isinstance(raised.value, ValueError)
    with kind(fns, observation_mode="different") as envs:
        assert envs.observation_space.high[:, 0].tolist() == [1, 2, 3]
        assert envs.single_observation_space == fns[0]().observation_space
        envs.reset()
        assert envs.step(ACTIONS)[0].shape == (3, 2)
    single, batch = spaces.Box(-9, 9, (2,), np.float32), spaces.Box(-9, 9, (3, 2), np.float32)
    with kind(fns, observation_mode=(batch, single)) as envs:
        assert envs.single_observation_space is single and envs.observation_space is batch
    for wrong, mode in (([*fns[:2], partial(Bounded, 1.0, 3)], "different"), (fns, (batch, spaces.Box(-9, 9, (4,))))):
        with pytest.raises(RuntimeError):
            kind(wrong, observation_mode=mode)
    with pytest.raises(ValueError, match="observation_mode"):
        kind(fns, observation_mode="anything")


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_managers_queue_reaches_the_workers(context: str) -> None:
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        with AsyncVectorEnv([partial(Tells, queue)] * 2, context=context) as envs:
            envs.reset()
            envs.step([0, 1])
        assert sorted(queue.get(timeout=20) for _ in range(2)) == [0, 1]
