"""The flatten wrapper: Gymnasium's checker, joint values against the environment's own, SB3 on top."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

pytest.importorskip("pettingzoo")

from pettingzoo import ParallelEnv

import envfleet as ef
from envfleet.envs import connect4_aec, gridworld
from envfleet.envs.registry import resolve_env

MAKERS = [gridworld.env, gridworld.parallel_env]


def flat(make=gridworld.parallel_env, *, wrapper=None, **kwargs):
    return ef.FlattenMultiAgentWrapper(make(**kwargs), **(wrapper or {}))


class Script(ParallelEnv):
    """Agents a, b, c come and go as a script says: rows of (who lives after the step, who is cut off)."""

    metadata = {"name": "script"}  # noqa: RUF012
    possible_agents = ["a", "b", "c"]  # noqa: RUF012

    def __init__(self, script, action_space=None):
        self.script = script
        self.spaces = {agent: action_space or spaces.Discrete(3, start=5) for agent in self.possible_agents}
        self.seen = {agent: spaces.Box(1, 50, (2,), np.float64) for agent in self.possible_agents}
        self.given = []

    def observation_space(self, agent):
        return self.seen[agent]

    def action_space(self, agent):
        return self.spaces[agent]

    def _observations(self, agents):
        return {agent: np.full(2, 1.0 + self.time + 10 * self.possible_agents.index(agent)) for agent in agents}

    def reset(self, seed=None, options=None):
        self.time, self.agents = 0, ["a", "b"]
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.given.append(dict(actions))
        living, cut = self.script[self.time]
        self.time += 1
        before, self.agents = self.agents, list(living)
        everybody = [agent for agent in self.possible_agents if agent in before or agent in living]
        return (
            self._observations(everybody),
            {agent: 1.0 + self.possible_agents.index(agent) for agent in before},
            {agent: agent not in living and agent not in cut for agent in everybody},
            {agent: agent in cut for agent in everybody},
            {agent: {} for agent in everybody},
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", MAKERS)
def test_gymnasium_checks_it(make):
    check_env(flat(make), skip_render_check=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["rps", "tictactoe", "connect-four", "simple-spread", "simple-push"])
def test_gymnasium_checks_it_on_other_peoples_environments(name):
    if name.startswith("simple"):
        pytest.importorskip("mpe2")
    env = ef.FlattenMultiAgentWrapper(resolve_env(name)())
    if name in ("tictactoe", "connect-four"):
        # Their own illegal moves end the game; what is checked here is the shape of everything, over legal games.
        for seed in range(5):
            observation, _ = env.reset(seed=seed)
            assert observation in env.observation_space
            ended = False
            while not ended:
                masks = env.action_masks().reshape(2, -1)
                observation, reward, terminated, truncated, _ = env.step(masks.argmax(1))
                ended = terminated or truncated
                assert observation in env.observation_space and isinstance(reward, float)
    else:
        check_env(env, skip_render_check=True)


def test_continuous_actions_make_one_box():
    pytest.importorskip("mpe2")
    env = ef.FlattenMultiAgentWrapper(resolve_env("simple-spread")(continuous_actions=True, N=2, max_cycles=5))
    assert isinstance(env.action_space, spaces.Box) and env.action_space.shape == (10,)
    env.reset(seed=0)
    ends = [env.step(env.action_space.sample())[2:4] for _ in range(5)]
    assert ends[-1] == (False, True) and not any(map(any, ends[:-1]))


def test_aec_and_parallel_give_the_same_episodes():
    aec, parallel = (flat(make, max_cycles=25, size=4) for make in MAKERS)
    rng = np.random.default_rng(0)
    partly = 0
    for seed in range(15):
        first, second = aec.reset(seed=seed), parallel.reset(seed=seed)
        np.testing.assert_equal(first, second)
        ended = False
        while not ended:
            np.testing.assert_equal(aec.action_masks(), parallel.action_masks())
            action = [rng.choice(np.flatnonzero(mask)) for mask in aec.action_masks().reshape(2, 5)]
            first, second = aec.step(action), parallel.step(action)
            np.testing.assert_equal(first, second)
            ended = first[2] or first[3]
            partly += first[4]["active"].sum() == 1
        assert first[4]["is_success"] == first[2]
    assert partly


def test_joint_values_births_deaths_and_the_end():
    # b dies, c is born, then b cannot come back; a is cut off at the very end.
    env = Script([("ab", ""), ("a", ""), ("ac", ""), ("a", ""), ("", "a")])
    joint = ef.FlattenMultiAgentWrapper(env)
    assert joint.action_space == spaces.MultiDiscrete([3, 3, 3])
    observation, info = joint.reset()
    assert observation.tolist() == [1, 1, 11, 11, 0, 0] and info["active"].tolist() == [1, 1, 0]
    rows = [joint.step([0, 1, 2]) for _ in range(5)]
    assert [row[0].tolist() for row in rows] == [
        [2, 2, 12, 12, 0, 0],
        [3, 3, 13, 13, 0, 0],  # b ends here: its own last observation
        [4, 4, 0, 0, 24, 24],
        [5, 5, 0, 0, 25, 25],  # c ends
        [6, 6, 0, 0, 0, 0],
    ]
    assert all(row[0] in joint.observation_space for row in rows)
    assert [row[1] for row in rows] == [3.0, 3.0, 1.0, 4.0, 1.0]
    assert [row[2:4] for row in rows] == [(False, False)] * 4 + [(False, True)]
    assert [row[4]["active"].tolist() for row in rows] == [[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert env.given == [{"a": 5, "b": 6}] * 2 + [{"a": 5}, {"a": 5, "c": 7}, {"a": 5}]


@pytest.mark.parametrize(
    "script, expected",
    [([("a", "b"), ("", "")], (True, False)), ([("a", ""), ("", "a")], (False, True)), ([("", "b")], (False, True))],
)
def test_what_ends_the_episode_is_who_ended_last(script, expected):
    joint = ef.FlattenMultiAgentWrapper(Script(script))
    joint.reset()
    assert [joint.step([0, 0, 0]) for _ in script][-1][2:4] == expected


@pytest.mark.parametrize("reward, expected", [("sum", 3.0), ("mean", 1.5), (lambda each: max(each.values()), 2.0)])
def test_rewards_are_joined_as_asked(reward, expected):
    joint = ef.FlattenMultiAgentWrapper(Script([("ab", "")]), reward=reward)
    joint.reset()
    assert joint.step([0, 0, 0])[1] == expected


def test_actions_for_nobody_are_ignored_or_refused():
    ignoring, refusing = (
        ef.FlattenMultiAgentWrapper(Script([("a", ""), ("a", ""), ("", "")]), dead_actions=how) for how in ("ignore", "refuse")
    )
    for joint in (ignoring, refusing):
        joint.reset()
        joint.step([1, 1, 0])
    ignoring.step([1, 1, 0])
    with pytest.raises(ef.BadArgument, match=r"an action for b, which is not there.*dead_actions='ignore'"):
        refusing.step([1, 1, 0])
    refusing.step([1, 0, 0])


def test_what_cannot_be_joined_is_refused():
    mixed = Script([])
    mixed.spaces["b"] = spaces.Box(-1, 1, (2,))
    with pytest.raises(ef.BadArgument, match="the actions of b do not go into one joint action"):
        ef.FlattenMultiAgentWrapper(mixed)
    endless = Script([])
    endless.seen["c"] = spaces.Sequence(spaces.Discrete(2))
    with pytest.raises(ef.BadArgument, match="the observations of c cannot be flattened"):
        ef.FlattenMultiAgentWrapper(endless)
    import gymnasium as gym

    with pytest.raises(ef.BadArgument, match="has no possible_agents"):
        ef.FlattenMultiAgentWrapper(gym.make("CartPole-v1"))
    for bad in ({"reward": "max"}, {"dead_actions": "raise"}):
        with pytest.raises(ef.BadArgument, match=next(iter(bad))):
            flat(wrapper=bad)
    joint = flat()
    joint.reset(seed=0)
    with pytest.raises(ef.BadArgument, match=r"the joint action has shape \(3,\), the space \(2,\)"):
        joint.step([0, 0, 0])


def test_several_choices_and_rows_of_choices():
    joint = ef.FlattenMultiAgentWrapper(Script([("ab", "")], spaces.MultiDiscrete([2, 4], start=[1, 1])))
    joint.reset()
    joint.step([0, 1, 1, 3, 0, 0])
    assert {agent: given.tolist() for agent, given in joint.env.given[0].items()} == {"a": [1, 2], "b": [2, 4]}
    with pytest.raises(ef.BadArgument, match="needs Discrete actions; a has"):
        joint.action_masks()


def test_both_sides_of_a_game_cancel_out():
    """Why the documentation calls it wrong for competitive games: whatever is played, the sum is zero."""
    joint = ef.FlattenMultiAgentWrapper(connect4_aec.env())
    rng = np.random.default_rng(0)
    for _ in range(5):
        joint.reset()
        ended = False
        while not ended:
            _, reward, ended, _, _ = joint.step(rng.integers(7, size=2))
            assert reward == 0


@pytest.mark.parametrize("kind", ["DummyVecEnv", "SubprocVecEnv"])
@pytest.mark.parametrize("make", MAKERS)
def test_sb3_trains_on_it(kind, make):
    sb3 = pytest.importorskip("stable_baselines3")
    envs = getattr(ef.adapters.sb3, kind)([lambda: flat(make, size=4, max_cycles=12)] * 4)
    try:
        model = sb3.PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
        model.learn(256)
        assert model.num_timesteps == 256
        envs.seed(3)
        observation = envs.reset()
        ends = []
        for _ in range(30):
            observation, _, done, infos = envs.step(model.predict(observation)[0])
            ends += [info for info, ended in zip(infos, done) if ended]
        assert ends and all(info["terminal_observation"].shape == observation.shape[1:] for info in ends)
        assert all(info["TimeLimit.truncated"] != info["is_success"] for info in ends)
    finally:
        envs.close()


def test_the_same_steps_in_workers_as_in_this_process():
    pytest.importorskip("stable_baselines3")
    from envfleet.adapters.sb3 import DummyVecEnv, SubprocVecEnv

    make = [lambda: flat(size=4, max_cycles=9)] * 3
    near, far = DummyVecEnv(make), SubprocVecEnv(make, num_workers=2)
    try:
        for envs in (near, far):
            envs.seed(5)
        np.testing.assert_equal(near.reset(), far.reset())
        rng = np.random.default_rng(0)
        for _ in range(40):
            action = rng.integers(5, size=(3, 2))
            for one, other in zip(near.step(action), far.step(action)):
                np.testing.assert_equal(one, other)
    finally:
        near.close()
        far.close()


def test_masks_reach_maskable_ppo():
    contrib = pytest.importorskip("sb3_contrib")
    env, legal, masks = flat(max_cycles=10), [], []
    step = env.step

    def watched(actions):
        masks.append(env.action_masks().reshape(2, 5))
        legal.append(masks[-1][np.arange(2), actions].all())
        return step(actions)

    env.step = watched
    contrib.MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0).learn(64)
    assert len(legal) == 64 and all(legal), "a masked action was taken"
    assert not np.all(masks), "no action was ever masked, so the test shows nothing"
