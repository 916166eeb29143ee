"""The views of many agents: a dict by agent, and agents as rows of one batch."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import envfleet as ef

pytest.importorskip("pettingzoo")

from pettingzoo import ParallelEnv

from tests.support.agent_loops import Crowd, crowd_aec, plain_parallel

STEADY = dict(num_agents=2, death=0.0, birth=0.0, max_cycles=3)


def views(env: Any, count: int = 3, **options: Any) -> Any:
    return ef.AsyncPettingZooVecEnv([env] * count, backend="serial", **options)


def test_a_dict_by_agent_is_what_the_envs_gave() -> None:
    table = np.random.default_rng(0).integers(0, 3, (30, 3, 4))
    make = functools.partial(Crowd, mixed=True)
    wanted = [plain_parallel(make(), lambda t, s=slot: table[t, s], 30, seed=slot) for slot in range(3)]
    with views(make) as envs:
        agents = make().possible_agents
        assert envs.agents == envs.possible_agents == agents and envs.num_agents == 4 and envs.num_envs == len(envs) == 3
        obs, infos = envs.reset(seed=0)
        for t in range(31):
            for slot in range(3):
                row = wanted[slot][t]
                assert {a for a in agents if infos[a]["active"][slot]} == row["active"]
                for agent in row["active"]:
                    if agent.startswith("guard"):
                        assert (obs[agent]["watch"][slot] == row["obs"][agent]["watch"]).all()
                        assert (infos[agent]["action_mask"][slot] == row["obs"][agent]["action_mask"]).all()
                    else:
                        assert (obs[agent][slot] == row["obs"][agent]).all()
                for agent, last in row["final"].items():
                    kept = infos[agent]["final_obs"]
                    assert infos[agent]["_final_obs"][slot] and infos[agent]["_final_info"][slot]
                    assert (kept["watch"][slot] == last["watch"]).all() if "guard" in agent else (kept[slot] == last).all()
            if t == 30:
                break
            obs, rewards, terminated, truncated, infos = envs.step({a: table[t, :, i] for i, a in enumerate(agents)})
            for slot in range(3):
                for agent, (reward, ends, cut) in wanted[slot][t + 1]["scored"].items():
                    assert infos[agent]["scored"][slot] and rewards[agent][slot] == reward
                    assert terminated[agent][slot] == ends and truncated[agent][slot] == cut
            for agent in agents:
                assert terminated[agent].dtype == truncated[agent].dtype == bool and np.isfinite(rewards[agent]).all()
                said = infos[agent].get("chance")
                assert said is None or (said[infos[agent]["_chance"]] > 0.9).all()


@pytest.mark.parametrize("env", [Crowd, crowd_aec])
def test_truncated_episodes_begin_anew(env: Any) -> None:
    with views(functools.partial(env, **STEADY)) as envs:
        envs.reset(seed=0)
        ends = 0
        for _ in range(24):
            *_, truncated, infos = envs.step({agent: np.ones(3, int) for agent in envs.agents})
            for agent in envs.agents:
                if truncated[agent].any():
                    ends += 1
                    assert (infos[agent]["final_obs"][:, 0] == 3.0).all()
        assert ends == (16 if env is Crowd else 8)


def test_actions_may_come_by_env_and_may_be_left_out() -> None:
    with views(functools.partial(Crowd, **STEADY), count=2) as envs:
        envs.reset(seed=0)
        rewards = envs.step([[1, 2], [3, 4]])[1]
        assert [int(rewards[a][slot]) for slot in (0, 1) for a in envs.agents] == [1, 2, 3, 4]
        rewards = envs.step([{"walker_0": 4, "walker_1": 3}, {"walker_0": 2, "walker_1": 1}])[1]
        assert [int(rewards[a][slot]) for slot in (0, 1) for a in envs.agents] == [4, 3, 2, 1]
        with pytest.raises(ef.BadArgument, match=r"'walker_1' is active in envs \[0, 1\], but has no action"):
            envs.step({"walker_0": [0, 0]})
        with pytest.raises(ef.BadArgument, match="'ghost'"):
            envs.step({"ghost": [0, 0]})
        with pytest.raises(ef.BadArgument, match="shape"):
            envs.step({"walker_0": [0, 0, 0], "walker_1": [0, 0]})
        with pytest.raises(ef.BadArgument, match="safely"):
            envs.step({"walker_0": [0.5, 0], "walker_1": [0, 0]})


class _TwoLeaves(ParallelEnv):
    """One agent whose action has two parts; its reward is their sum."""

    metadata: ClassVar = {"name": "two_leaves"}
    possible_agents: ClassVar = ["a"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def action_space(self, agent: str) -> Any:
        return spaces.Dict(x=spaces.Box(-9, 9, (1,), np.float32), y=spaces.Box(-9, 9, (1,), np.float32))

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents = ["a"]
        return {"a": 0}, {"a": {}}

    def step(self, actions: Any) -> Any:
        reward = float(actions["a"]["x"][0] + actions["a"]["y"][0])
        return {"a": 0}, {"a": reward}, {"a": False}, {"a": False}, {"a": {}}


def test_every_part_of_an_action_must_be_given() -> None:
    envs = ef.AsyncPettingZooVecEnv([_TwoLeaves] * 2, backend="serial")
    envs.reset()
    whole, holes = np.ones((2, 1), np.float32), np.array([[1.0], [np.nan]], np.float32)
    assert envs.step({"a": {"x": whole, "y": whole}})[1]["a"].tolist() == [2.0, 2.0]
    for action in ({"x": holes, "y": whole}, {"x": whole, "y": holes}):
        with pytest.raises(ef.errors.BadArgument, match=r"only a part of its action in envs \[1\]"):
            envs.step({"a": action})
    envs.close()


def test_a_dead_agents_action_is_ignored_or_refused() -> None:
    turns = functools.partial(crowd_aec, **STEADY)
    with views(turns, count=2) as envs:
        envs.reset(seed=0)
        assert [envs.active[agent].tolist() for agent in envs.agents] == [[True, True], [False, False]]
        envs.step({"walker_0": [1, 1], "walker_1": [1, 1]})
        assert [envs.active[agent].tolist() for agent in envs.agents] == [[False, False], [True, True]]
        envs.step({"walker_1": [1, 1]})  # nor need an agent be named that nobody waits for
    with views(turns, count=2, dead_actions="refuse") as envs:
        envs.reset(seed=0)
        with pytest.raises(ef.BadArgument, match=r"agent 'walker_1' in envs \[0, 1\], where it is not active"):
            envs.step({"walker_0": [1, 1], "walker_1": [1, 1]})
        envs.step({"walker_0": [1, 1], "walker_1": [np.nan, np.nan]})
        envs.step({"walker_0": [None, None], "walker_1": [1, 1]})
        envs.step({"walker_0": [1, 1], "walker_1": np.ma.masked_all(2, int)})
    with pytest.raises(ef.BadArgument, match="dead_actions"):
        views(turns, dead_actions="eat")


def test_the_rest_of_the_interface() -> None:
    with ef.AsyncPettingZooVecEnv([functools.partial(Crowd, render_mode="rgb_array", **STEADY)] * 4, context="fork") as envs:
        envs.reset(seed=0, options={"task": {"max_cycles": 2}})
        assert envs.get_attr("max_cycles") == (2,) * 4
        envs.set_attr("max_cycles", [5, 6, 7, 8])
        assert envs.call("max_cycles") == (5, 6, 7, 8)
        assert [int(frame.mean()) for frame in envs.render()] == [2] * 4
        assert envs.single_observation_space("walker_0").shape == (4,) and envs.action_space("walker_1").shape == (4,)
        assert envs.observation_space("walker_0").shape == (4, 4) and envs.single_action_space("walker_1").n == 5
        assert envs.metadata["name"] == "crowd" and envs.render_mode == "rgb_array" and envs.unwrapped is envs
        envs.step_async({agent: np.zeros(4, int) for agent in envs.agents})
        assert len(envs.step_wait()) == 5
    assert envs.closed
    with pytest.raises(ef.BadArgument, match="one agent"):
        ef.AsyncPettingZooVecEnv([lambda: __import__("gymnasium").make("CartPole-v1")], backend="serial")


def test_agents_as_rows_of_one_batch() -> None:
    with ef.make(Crowd, 3, backend="serial") as fleet, ef.make(Crowd, 3, backend="serial") as twin:
        rows = ef.AgentsAsBatch(fleet)
        obs, infos = rows.reset(seed=4)
        batch = twin.reset(seed=4)
        assert rows.num_envs == 12 and rows.single_action_space.n == 5 and rows.observation_space.shape == (12, 4)
        for step in range(25):
            actions = np.random.default_rng(step).integers(0, 5, 12)
            obs, reward, terminated, truncated, infos = rows.step(actions)
            batch = twin.step(actions.reshape(3, 4))
            assert (obs == batch.obs.reshape(12, 4)).all() and (reward == batch.reward.reshape(12)).all()
            assert (terminated == batch.terminated.reshape(12)).all() and (truncated == batch.truncated.reshape(12)).all()
            assert (infos["active"] == batch.active.reshape(12)).all()
            assert (infos["scored"] == batch.scored.reshape(12)).all()
            ends = terminated | truncated
            assert ("final_obs" in infos) == ends.any()
            if ends.any():
                assert (infos["_final_obs"] == ends).all()
                assert (infos["final_obs"] == batch.final_obs.reshape(12, 4)).all()
        rows.close()
    with ef.make(functools.partial(Crowd, mixed=True), 2, backend="serial") as fleet:
        with pytest.raises(ef.BadArgument, match=r"walker_0, walker_2, walker_3: Box.*guard_1: Dict"):
            ef.AgentsAsBatch(fleet)
    with ef.make("CartPole-v1", 2, backend="serial") as fleet:
        with pytest.raises(ef.BadArgument, match="one agent"):
            ef.AgentsAsBatch(fleet)


class _Informed(_TwoLeaves):
    """The first env's infos are narrower than the second's."""

    made = 0

    def __init__(self) -> None:
        self.number = _Informed.made % 2
        _Informed.made += 1

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        return *result[:4], {"a": [{"score": 1, "flag": True}, {"score": 2.7, "flag": 7}][self.number]}


def test_infos_are_not_cut_to_the_type_of_the_first_env() -> None:
    _Informed.made = 0
    envs = ef.AsyncPettingZooVecEnv([_Informed] * 2, backend="serial")
    envs.reset()
    ones = np.ones((2, 1), np.float32)
    infos = envs.step({"a": {"x": ones, "y": ones}})[4]["a"]
    assert infos["score"].tolist() == [1, 2.7] and infos["flag"].tolist() == [True, 7]
    envs.close()
