"""backend="auto" is safe: failed probes, whose code may run in the caller, and what is remembered for how long."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import envfleet as ef
from envfleet.autotune.auto import Probe, cache_path
from envfleet.autotune.probe_cache import KEPT_DAYS, key_of, remembered
from envfleet.autotune.trust import may_run_here, trust_of
from envfleet.envs.probe import Counting, Faulty
from envfleet.envs.tmaze import TMaze
from envfleet.slots.factories import Recipe, factories_for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_CACHE_DIR", str(tmp_path / "cache"))


def recipe(env: Any, count: int = 2, **more: Any) -> Recipe:
    factories, spec = factories_for(env, None if isinstance(env, list) else count, more.get("kwargs"), more.get("wrappers", ()))
    return Recipe(factories, spec=spec)


@pytest.mark.parametrize(
    ("phase", "how", "said"),
    [
        ("step", "exit", "exited with code 7"),
        ("step", "segv", "SIGSEGV"),
        ("step", "kill", "SIGKILL"),
        ("step", "hang", "step_timeout_s=0.3"),
        ("step", "raise", "planted fault in step"),
        ("step", "bad", "TypeError: step() returned"),
        ("reset", "exit", "exited with code 7"),
        ("reset", "hang", "reset_timeout_s=0.3"),
        ("reset", "raise", "planted fault in reset"),
    ],
)
@pytest.mark.parametrize("isolate", [None, False])
def test_a_probe_that_fails_leads_to_workers_with_deadlines(phase: str, how: str, said: str, isolate: Any) -> None:
    options: dict[str, Any] = {"step_timeout_s": 0.3, "reset_timeout_s": 0.3} if how == "hang" else {}
    with ef.make(lambda: Faulty(phase, how), 2, isolate=isolate, on_fault="restart", **options) as fleet:
        assert fleet.plan.backend == "shm" and fleet._backend.can_kill
        assert "isolated, because the probe failed" in fleet.plan.reason and said in fleet.plan.reason
        assert os.getpid() not in {worker.pid for worker in fleet._backend._workers}


@pytest.mark.parametrize("how", ["exit", "hang", "raise"])
def test_a_constructor_that_fails_once_only_costs_the_probe(how: str, tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    with ef.make(lambda: Faulty("init", how, once_file=once), 2, init_timeout_s=5) as fleet:
        assert fleet.plan.backend == "shm" and "the probe failed" in fleet.plan.reason
        assert fleet.reset(seed=0).obs.tolist() == [[0.0], [0.0]]


class DiesLate(Counting):
    """Well behaved for as long as any probe looks, then it takes its process with it."""

    def step(self, action: Any) -> Any:
        if action == 1:
            os._exit(9)
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 2, 8])
@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_what_crashes_long_after_the_probe_does_not_end_the_caller(num_envs: int, on_fault: str, monkeypatch: Any) -> None:
    calm = functools.partial(DiesLate)  # its probe must not draw the deadly action
    monkeypatch.setattr("envfleet.autotune.auto._probe", lambda recipe: Probe(2e-6, 2e-6, 8))
    with ef.make(calm, num_envs, on_fault=on_fault) as fleet:
        fleet.reset(seed=0)
        fleet.step([0] * num_envs)
        if on_fault == "raise":
            with pytest.raises(ef.WorkerLost, match="exited with code 9"):
                fleet.step([1] * num_envs)
        else:
            assert fleet.step([1] * num_envs).faulted.all()
            assert not fleet.step([0] * num_envs).faulted.any()


def test_only_code_that_is_known_by_name_is_trusted() -> None:
    assert {trust_of(recipe(name)) for name in ("CartPole-v1", "FrozenLake-v1", "tmaze", "catch", TMaze)} == {"pure"}
    assert {trust_of(recipe(name)) for name in ("Ant-v5", "LunarLander-v3")} == {"compiled"}
    limit = functools.partial(gym.wrappers.TimeLimit, max_episode_steps=5)
    assert trust_of(recipe("CartPole-v1", wrappers=[limit, gym.wrappers.RecordEpisodeStatistics])) == "pure"

    class Mine(CartPoleEnv):
        pass

    lying = type("TMaze", (Counting,), {"__module__": "envfleet.envs.tmaze"})
    strange = [
        recipe(Counting),
        recipe(Mine),
        recipe(lying),
        recipe(lambda: gym.make("CartPole-v1")),
        recipe("CartPole-v1", wrappers=[lambda env: env]),
        recipe("CartPole-v1", wrappers=[functools.partial(gym.wrappers.TransformReward, func=abs)]),
        recipe("CartPole-v1", kwargs={"render_mode": "human"}),
        recipe("CartPole-v1", kwargs={"sutton_barto_reward": print}),
        recipe([TMaze, TMaze, Counting]),
    ]
    assert [trust_of(one) for one in strange] == ["unknown"] * len(strange)


def test_who_may_step_in_the_callers_process() -> None:
    for on_fault in ("raise", "restart"):
        assert may_run_here("pure", None, on_fault) and not may_run_here("unknown", None, on_fault)
        assert may_run_here("unknown", False, on_fault) and not may_run_here("pure", True, on_fault)
    assert may_run_here("compiled", None, "raise") and not may_run_here("compiled", None, "restart")


# -- remembered for the code, and not for ever ------------------------------------------------------------------------


ENV_MODULE = """
import gymnasium as gym
from {helper} import LIMIT
from envfleet.envs.probe import Counting

class Own(Counting):
    def __init__(self, limit=LIMIT):
        super().__init__(limit)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: Any) -> Iterator[tuple[str, Path, Path]]:
    """An env of the user's in a module with a helper beside it, registered by its entry point."""
    name, helper, env_id = "auto_own_env", "auto_own_helper", "AutoOwn-v0"
    (tmp_path / f"{helper}.py").write_text("LIMIT = 5\n")
    (tmp_path / f"{name}.py").write_text(ENV_MODULE.format(helper=helper))
    monkeypatch.syspath_prepend(str(tmp_path))
    gym.register(env_id, entry_point=f"{name}:Own")
    yield env_id, tmp_path / f"{name}.py", tmp_path / f"{helper}.py"
    del gym.registry[env_id]
    for one in (name, helper):
        sys.modules.pop(one, None)


def test_a_probe_is_remembered_for_the_code_of_its_env(own_module: tuple[str, Path, Path]) -> None:
    env_id, module, helper = own_module
    for changed in (module, helper):
        ef.make(env_id, 2).close()
        assert remembered(recipe(env_id)) is not None
        about = os.stat(changed)
        text = changed.read_text()
        changed.write_text(text.replace("L", "M", 1))
        os.utime(changed, ns=(about.st_atime_ns, about.st_mtime_ns))  # neither its time nor its size tells
        assert remembered(recipe(env_id)) is None
        changed.write_text(text)
    ef.make(env_id, 2).close()
    module.unlink()
    assert remembered(recipe(env_id)) is None


def test_a_probe_is_of_no_use_where_its_module_is_another(
    own_module: tuple[str, Path, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    env_id, module, _ = own_module
    ef.make(env_id, 2).close()
    assert remembered(recipe(env_id)) is not None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / module.name).write_text(module.read_text())
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert remembered(recipe(env_id)) is None


def test_a_probe_is_forgotten_after_a_while_and_on_another_machine(monkeypatch: Any) -> None:
    mine = recipe("CartPole-v1")
    ef.make("CartPole-v1", 2).close()
    (entry,) = json.loads(cache_path().read_text()).values()
    day = 86400.0
    assert remembered(mine, now=entry["at"] + (KEPT_DAYS - 1) * day) is not None
    assert remembered(mine, now=entry["at"] + (KEPT_DAYS + 1) * day) is None
    assert remembered(mine, now=entry["at"] - day) is None  # a clock that was put back
    monkeypatch.setattr("envfleet.autotune.probe_cache.usable_cpus", lambda: 77)
    assert remembered(mine) is None


def test_what_has_no_lasting_name_is_not_remembered() -> None:
    assert key_of(recipe("CartPole-v1")) is not None
    assert key_of(recipe("CartPole-v1", kwargs={"sutton_barto_reward": True})) != key_of(recipe("CartPole-v1"))
    assert key_of(recipe("CartPole-v1", wrappers=[gym.wrappers.ClipReward])) not in (None, key_of(recipe("CartPole-v1")))
    assert key_of(recipe("CartPole-v1", wrappers=[lambda env: env])) is None
    assert key_of(recipe(Counting)) is None and key_of(recipe([TMaze, Counting])) is None
    gym.register("AutoLocal-v0", entry_point=lambda: Counting())
    try:
        assert key_of(recipe("AutoLocal-v0")) is None
    finally:
        del gym.registry["AutoLocal-v0"]
