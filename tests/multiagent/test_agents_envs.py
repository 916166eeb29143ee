"""The multi-agent environments: PettingZoo's own tests, the twins against each other, rules, names."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from pettingzoo.test import api_test, max_cycles_test, parallel_api_test, parallel_seed_test, seed_test
from pettingzoo.test.state_test import state_test

import envfleet as ef
from envfleet.envs import connect4_aec, gridworld
from envfleet.envs.connect4 import COLUMNS, ROWS
from envfleet.envs.gridmodel import GridModel
from envfleet.envs.registry import SHORT_NAMES, resolve_env
from envfleet.errors import BadArgument, MissingExtra

SHAPES = [
    {},
    {"size": 4, "num_agents": 3, "num_obstacles": 0},
    {"size": 8, "num_agents": 5, "num_obstacles": 12, "min_distance": 2},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PettingZoo advises against Dict observations, its own games have them
def test_gridworld_passes_pettingzoos_tests(shape):
    api_test(gridworld.env(**shape), num_cycles=150)
    parallel_api_test(gridworld.parallel_env(**shape), num_cycles=150)
    seed_test(lambda: gridworld.env(**shape), num_cycles=60)
    parallel_seed_test(lambda: gridworld.parallel_env(**shape), num_cycles=60)
    state_test(gridworld.env(**shape), gridworld.parallel_env(**shape))


def test_gridworld_passes_max_cycles_test():
    for _ in range(10):  # it draws a grid of its own each time
        max_cycles_test(gridworld)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_connect4_passes_pettingzoos_tests():
    api_test(connect4_aec.env(), num_cycles=200)
    seed_test(connect4_aec.env, num_cycles=100)


def aec_transitions(env, rng, actions):
    """Every agent's (observation, action, reward, terminated, truncated, next observation) under drawn actions."""
    out, pending = [], {}
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, info = env.last()
        if agent in pending:
            out.append((agent, *pending.pop(agent), reward, terminated, truncated, observation, info))
        if terminated or truncated:
            env.step(None)
            continue
        action = int(rng.choice(np.flatnonzero(observation["action_mask"])))
        actions.append((agent, action))
        pending[agent] = (observation, action)
        env.step(action)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reward", ["shaped", "sparse"])
def test_twins_give_equal_transitions(shape, reward):
    rng = np.random.default_rng(1)
    aec, parallel = (make(max_cycles=30, reward=reward, **shape) for make in (gridworld.env, gridworld.parallel_env))
    single_ends = 0
    for seed in range(12):
        aec.reset(seed=seed)
        drawn: list[tuple[str, int]] = []
        from_aec = sorted_by_agent(aec_transitions(aec, rng, drawn))
        observations, _ = parallel.reset(seed=seed)
        from_parallel = []
        while parallel.agents:
            acting = list(parallel.agents)
            actions = dict(drawn[: len(acting)])
            del drawn[: len(acting)]
            assert list(actions) == acting
            after, rewards, terminated, truncated, infos = parallel.step(actions)
            single_ends += 0 < len(parallel.agents) < len(acting)
            for agent in acting:
                from_parallel.append((agent, observations[agent], actions[agent], rewards[agent], terminated[agent],
                                      truncated[agent], after[agent], infos[agent]))  # fmt: skip
            observations = after
        assert not drawn
        np.testing.assert_equal(sorted_by_agent(from_parallel), from_aec)
    assert single_ends  # some agent ended while others went on


def sorted_by_agent(transitions):
    return sorted(transitions, key=lambda one: one[0])


def way_home(world: GridModel, agent: int, rng: np.random.Generator) -> int:
    """The action along the shortest way; now and then another one, so that two who meet do not wait for each other."""
    way, free = world._ways[agent], np.flatnonzero(world.mask(agent)).tolist()
    if rng.random() < 0.2:
        return int(rng.choice(free))
    return min(free, key=lambda action: int(way[world._target(agent, action)]))


def test_who_walks_the_shortest_way_succeeds():
    env, rng = gridworld.parallel_env(size=6, num_agents=3, num_obstacles=6, reward="shaped"), np.random.default_rng(0)
    solved = 0
    for seed in range(20):
        env.reset(seed=seed)
        steps = [int(env._world._ways[i][env._world.cells[i]]) for i in range(3)]
        assert min(steps) >= 6
        total, success, took = dict.fromkeys(env.agents, 0.0), {}, dict.fromkeys(env.agents, 0)
        while env.agents:
            acting = list(env.agents)
            actions = {agent: way_home(env._world, env._number[agent], rng) for agent in acting}
            _, rewards, _, _, infos = env.step(actions)
            for agent in acting:
                total[agent] += rewards[agent]
                took[agent] += 1
                success.update({agent: infos[agent]["is_success"]} if infos[agent] else {})
        for i, agent in enumerate(env.possible_agents):
            # What shaping pays in all is known beforehand: the way that was gone, less the time it took.
            left = int(env._world._ways[i][env._world.cells[i]])
            expected = 0.1 * (steps[i] - left) - 0.01 * took[agent] + success[agent]
            assert total[agent] == pytest.approx(expected)
        solved += all(success.values())
    assert solved >= 18


def test_moves_collide_in_order_and_masks_tell():
    world = GridModel(size=3, num_agents=2, num_obstacles=0, view=1, reward="sparse", min_distance=None)
    world.reset(np.random.default_rng(0))
    world.occupied[:] = 0
    world.cells, world.goals = [(0, 0), (0, 1)], [(2, 2), (2, 0)]
    for cell in world.cells:
        world._put(cell, 1.0)
    assert world.mask(0).tolist() == [1, 0, 1, 0, 0]  # a wall above and left, agent 1 to the right
    world.cycle({0: 4, 1: 2})  # agent 0 moves first and finds the cell taken
    assert world.cells == [(0, 0), (1, 1)]
    world.cycle({0: 2, 1: 3})  # both want (1, 0)
    assert world.cells == [(1, 0), (1, 1)]
    _, arrived = world.cycle({0: 2, 1: 0})
    assert not arrived
    rewards, arrived = world.cycle({0: 4, 1: 4})
    assert world.cells == [(2, 1), (1, 2)] and not arrived and rewards == {0: 0.0, 1: 0.0}
    rewards, arrived = world.cycle({0: 4, 1: 2})  # agent 0 arrives and leaves, so agent 1 may enter its cell
    assert arrived == {0} and rewards[0] == 1.0 and world.cells[1] == (2, 2)
    assert world.mask(0).tolist() == [1, 0, 0, 0, 0]


def test_free_cells_stay_connected():
    world = GridModel(size=7, num_agents=2, num_obstacles=18, view=2, reward="sparse", min_distance=3)
    for seed in range(30):
        world.reset(np.random.default_rng(seed))
        assert world._inner().sum() == 18
        assert (world._steps_to(world.cells[0]) >= 0).sum() == 49 - 18


def test_the_compass_points_along_the_shortest_way():
    env, blind = gridworld.parallel_env(num_obstacles=6), gridworld.parallel_env(num_obstacles=6, compass=False)
    for seed in range(5):
        observations, _ = env.reset(seed=seed)
        unguided, _ = blind.reset(seed=seed)
        for i, agent in enumerate(env.agents):
            seen, world = observations[agent]["observation"], env._world
            row, column = world.cells[i]
            for value, (down, right) in zip(seen[-4:], [(-1, 0), (1, 0), (0, -1), (0, 1)]):
                place = (row + down, column + right)
                free = min(place) >= 0 and max(place) < 5 and not world._inner()[place]
                shorter = free and world._steps_to(world.goals[i])[place] < world._steps_to(world.goals[i])[row, column]
                assert value == (1.0 if shorter else -1.0)
            assert unguided[agent]["observation"].tolist() == seen[:-4].tolist()


def test_pictures_change_with_the_game():
    env = gridworld.parallel_env(size=4, render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    assert first.shape == (96, 96, 3) and first.dtype == np.uint8
    env.step({agent: int(env.observe(agent)["action_mask"].nonzero()[0][-1]) for agent in env.agents})
    assert (env.render() != first).any()
    assert gridworld.env().render() is None
    board = connect4_aec.env(render_mode="rgb_array")
    board.reset()
    empty = board.render()
    board.step(3)
    assert empty.shape == (ROWS * 32, COLUMNS * 32, 3) and (board.render() != empty).any()


@pytest.mark.parametrize(
    "bad",
    [{"size": 1}, {"num_agents": 0}, {"num_obstacles": 12}, {"max_cycles": 0}, {"reward": "dense"}, {"view": 0},
     {"render_mode": "hologram"}, {"min_distance": 9}],
)  # fmt: skip
def test_gridworld_refuses_what_cannot_be(bad):
    with pytest.raises(BadArgument, match=next(iter(bad)).replace("num_obstacles", "obstacles")):
        gridworld.env(**bad)


def test_gridworld_wants_an_action_of_everybody_and_a_known_one():
    env = gridworld.parallel_env()
    env.reset(seed=0)
    with pytest.raises(BadArgument, match="no action for agent_1"):
        env.step({"agent_0": 0})
    with pytest.raises(BadArgument, match="action 5"):
        env.step({"agent_0": 5, "agent_1": 0})


def test_connect4_is_zero_sum_and_an_illegal_move_loses():
    env, rng = connect4_aec.env(), np.random.default_rng(0)
    results = []
    for game in range(60):
        env.reset()
        total = dict.fromkeys(env.agents, 0.0)
        for agent in env.agent_iter():
            observation, reward, terminated, _, _ = env.last()
            total[agent] += reward
            legal = np.flatnonzero(observation["action_mask"])
            full = np.flatnonzero(observation["action_mask"] == 0)
            cheat = game % 3 == 0 and len(full) and not terminated
            env.step(None if terminated else int(rng.choice(full if cheat else legal)))
        assert sum(total.values()) == 0
        results.append(total["player_0"])
    assert {1.0, -1.0} <= set(results)
    strict = connect4_aec.env(illegal="raise")
    strict.reset()
    for column in [0] * 6:
        strict.step(column)
    with pytest.raises(BadArgument, match="column 0 is full"):
        strict.step(0)
    with pytest.raises(BadArgument, match="column must be"):
        strict.step(7)


def test_a_full_board_is_a_draw():
    env = connect4_aec.env()
    env.reset()
    # Columns in an order known to give no line of four.
    for column in [0, 1] * 3 + [1, 0] * 3 + [2, 3] * 3 + [3, 2] * 3 + [4, 5] * 3 + [5, 4] * 3 + [6] * 6:
        assert not any(env.terminations.values())
        env.step(column)
    assert all(env.terminations.values()) and not any(env.rewards.values())


MULTIAGENT_NAMES = {
    "gridworld-aec": "gridworld_v0",
    "gridworld-parallel": "gridworld_v0",
    "connect4-aec": "connect4_aec_v0",
    "tictactoe": "tictactoe_v3",
    "connect-four": "connect_four_v3",
    "rps": "rps_v2",
    "pettingzoo:classic/tictactoe_v3": "tictactoe_v3",
    "pettingzoo:classic/connect_four-v3": "connect_four_v3",
    "pettingzoo.classic.rps_v2:env": "rps_v2",
    "pettingzoo.classic:rps_v2": "rps_v2",
}


@pytest.mark.parametrize("name", MULTIAGENT_NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PettingZoo's old modules, by which most people know the games
def test_names_lead_to_environments(name):
    env = resolve_env(name)()
    env.reset(seed=0)
    assert env.metadata["name"] == MULTIAGENT_NAMES[name] and len(env.agents) == 2


@pytest.mark.parametrize("name", ["gridworld-aec", "connect4-aec", "pettingzoo:classic/tictactoe_v3", "rps"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fleet_is_made_by_name(name):
    with ef.make(name, num_envs=2, backend="serial") as fleet:
        batch = fleet.reset(seed=0)
        assert fleet.num_agents == 2 and batch.active.sum() == (4 if name == "rps" else 2)


@pytest.mark.parametrize("name", ["simple-spread", "simple-push", "mpe2:simple_spread_v3"])
def test_names_of_mpe2(name):
    pytest.importorskip("mpe2")
    env = resolve_env(name)()
    assert hasattr(env, "step") and not hasattr(env, "agent_iter")  # the parallel one


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_without_environments_is_named():
    with pytest.raises(BadArgument, match=r"pettingzoo\.utils has no parallel_env or env"):
        resolve_env("pettingzoo:utils")
    with pytest.raises(BadArgument, match="no_such_game"):
        resolve_env("pettingzoo:classic/no_such_game_v1")


class Absent:
    """A finder for which the packages are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pettingzoo", "mpe2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_package_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("pettingzoo", "mpe2")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for name in ("envfleet.envs.gridworld", "envfleet.envs.connect4_aec"):
        monkeypatch.delitem(sys.modules, name)
    for name in ("gridworld-aec", "connect4-aec", "tictactoe", "simple-spread", "pettingzoo:classic/rps_v2"):
        with pytest.raises(MissingExtra, match=r'pip install "envfleet\[multiagent\]"'):
            resolve_env(name)


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_short_name_is_loadable_without_a_warning(name):
    if SHORT_NAMES[name].startswith("mpe2"):
        pytest.importorskip("mpe2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(resolve_env(name))
