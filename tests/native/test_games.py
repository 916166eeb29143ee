"""GridNavi, the team on the grid, and Connect Four in C++ against the Python classes that define them."""

from __future__ import annotations

import functools
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.connect4 import Connect4
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.gridworld_team import GridWorldTeam
from envfleet.envs.native_games import NativeConnect4, NativeGridNavi, NativeGridWorld
from envfleet.testing import canonical, record


def assert_equal_steps(python: Any, native: Any, count: int, seed: int) -> None:
    """The same episodes in both; only `info` differs."""
    rng = np.random.default_rng(seed)
    assert canonical(python.reset(seed=seed)[0]) == canonical(native.reset(seed=seed)[0])
    for _ in range(count):
        action = np.int64(rng.integers(python.action_space.n))
        wanted, got = python.step(action), native.step(action)
        assert canonical(wanted[0]) == canonical(got[0])
        assert canonical(wanted[1:4]) == canonical(got[1:4])
        if wanted[2] or wanted[3]:
            assert canonical(python.reset()[0]) == canonical(native.reset()[0])
            assert python.np_random.bit_generator.state == native.np_random.bit_generator.state


@pytest.mark.parametrize("options", [{}, {"size": 3, "horizon": 4}, {"size": 8, "horizon": 40}])
def test_gridnavi_is_the_python_class(options: dict[str, int]) -> None:
    python, native = GridNavi(**options), NativeGridNavi(**options)
    assert python.observation_space == native.observation_space and python.action_space == native.action_space
    assert native.task is None
    goals = set()
    for seed in range(40):
        assert_equal_steps(python, native, 60, seed)
        assert python.task == native.task
        assert python.task_vector.tolist() == native.task_vector.tolist()
        goals.add(native.task)
    assert len(goals) > 3


def test_gridnavi_takes_its_tasks() -> None:
    python, native = GridNavi(), NativeGridNavi()
    for goal in python.task_space.values:
        for env in (python, native):
            env.set_task(goal)
        assert_equal_steps(python, native, 40, 3)
        assert native.task == goal
    with pytest.raises(ef.BadArgument, match="not in TaskList"):
        native.set_task((0, 0))
    with pytest.raises(ef.BadArgument, match="size from 3"):
        NativeGridNavi(size=2)


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_of_a_fleet_are_as_in_serial(on_end: Any, workers: int) -> None:
    goals = GridNavi().task_space.values
    rows = []
    for env, options in ((GridNavi, {"backend": "serial"}), (NativeGridNavi, {"backend": "native", "num_workers": workers})):
        with ef.make(functools.partial(env, horizon=5), 4, on_end=on_end, **options) as fleet:
            fleet.reset(seed=1)
            space = fleet.action_space
            space.seed(0)
            rng, mine = np.random.default_rng(2), []
            for step in range(120):
                if step > 15 and step % 4 == 0:
                    slots = np.flatnonzero(rng.random(4) < 0.5).tolist() or [0]
                    tasks = [goals[int(rng.integers(len(goals)))] for _ in slots]
                    fleet.assign(slots, tasks=tasks, seeds=rng.integers(0, 99, len(slots)).tolist())
                batch = fleet.step(space.sample())
                told = (fleet.get_attr("task"), batch.task, batch.seed)
                mine.append(canonical((batch.obs, batch.final_obs, batch.reward, batch.ended, batch.episode, *told)))
            rows.append(mine)
    assert rows[0] == rows[1]


GRIDS = [
    {},
    {"size": 2, "num_agents": 1, "num_obstacles": 0, "min_distance": 1, "max_cycles": 3},
    {"size": 3, "num_agents": 2, "num_obstacles": 0, "min_distance": 4},
    {"size": 7, "num_agents": 4, "num_obstacles": 12, "view": 3, "reward": "sparse", "compass": False},
    {"size": 16, "num_agents": 8, "num_obstacles": 60, "max_cycles": 30},
]


def towards(obs: Any, rng: Any, compass: bool) -> Any:
    """Mostly along the compass, so that agents arrive."""
    if not compass or rng.random() < 0.2:
        return rng.integers(0, 5, len(obs))
    return 1 + np.argmax(obs[:, -9:-5] + obs[:, -4:] + 0.1 * rng.random((len(obs), 4)), axis=1)


@pytest.mark.parametrize("options", GRIDS, ids=str)
def test_gridworld_is_the_python_class(options: dict[str, Any]) -> None:
    python, native = GridWorldTeam(**options, render_mode="ansi"), NativeGridWorld(**options, render_mode="ansi")
    assert python.observation_space == native.observation_space and python.action_space == native.action_space
    rng, arrived, truncated = np.random.default_rng(0), 0, 0
    for seed in range(8):
        obs = python.reset(seed=seed)[0]
        assert canonical(obs) == canonical(native.reset(seed=seed)[0])
        for _ in range(80):
            action = towards(obs, rng, options.get("compass", True))
            wanted, got = python.step(action), native.step(action)
            obs = wanted[0]
            assert canonical(wanted[:4]) == canonical(got[:4])
            assert canonical(python.agent_rewards) == canonical(native.agent_rewards)
            assert python.inside.tolist() == native.inside.tolist() and python.render() == native.render()
            arrived, truncated = arrived + wanted[2], truncated + wanted[3]
            if wanted[2] or wanted[3]:
                obs = python.reset()[0]
                assert canonical(obs) == canonical(native.reset()[0])
        assert python.np_random.bit_generator.state == native.np_random.bit_generator.state
    assert arrived + truncated > 5


def test_the_team_is_the_parallel_environment() -> None:
    pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
    from envfleet.envs.gridworld import GridWorldEnvParallel

    parallel, team = GridWorldEnvParallel(num_agents=3, size=6), GridWorldTeam(num_agents=3, size=6)
    rng, ended = np.random.default_rng(1), 0
    for seed in range(12):
        seen, obs = parallel.reset(seed=seed)[0], team.reset(seed=seed)[0]
        for _ in range(60):
            for i, agent in enumerate(parallel.possible_agents):
                if agent in seen:
                    assert obs[i].tolist() == [*seen[agent]["observation"].tolist(), *seen[agent]["action_mask"].tolist()]
            if not parallel.agents:
                break
            action = towards(obs, rng, True)
            seen, rewards, terminated, _, _ = parallel.step({agent: action[int(agent[-1])] for agent in parallel.agents})
            obs, reward, all_arrived, late, _ = team.step(action)
            assert team.agent_rewards.tolist() == [rewards.get(agent, 0.0) for agent in parallel.possible_agents]
            assert reward == pytest.approx(sum(rewards.values())) and (all_arrived or late) == (not parallel.agents)
        ended += not parallel.agents
    assert ended == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"render_mode": "rgb_array"}, "render_mode='rgb_array'"),
        ({"render_mode": "human"}, "render_mode='human'"),
        ({"size": 17}, "size=17: the native GridWorld has room for 16"),
        ({"size": 12, "num_agents": 9}, "num_agents=9"),
        ({"view": 17}, "view=17"),
        ({"num_obstacles": 11}, "fill more than half"),
        ({"reward": "other"}, "reward='other'"),
        ({"max_cycles": 0}, "max_cycles=0"),
    ],
)
def test_what_the_native_gridworld_has_not_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ef.BadArgument, match=said):
        NativeGridWorld(**options)


OPTIONS = [
    {},
    {"opponent": "minimax-1", "first": "opponent"},
    {"opponent": "minimax-2", "first": "random", "illegal": "skip"},
    {"first": "random"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_connect4_is_the_python_class(options: dict[str, Any]) -> None:
    python, native = Connect4(**options), NativeConnect4(**options)
    assert python.observation_space == native.observation_space and python.action_space == native.action_space
    for seed in range(4):
        assert_equal_steps(python, native, 250, seed)


def test_connect4_tells_what_info_has() -> None:
    python, native = Connect4(render_mode="ansi"), NativeConnect4(render_mode="ansi")
    python.reset(seed=5)
    native.reset(seed=5)
    for column in [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6]:
        info, ended = (result := python.step(column))[4], result[2]
        native.step(column)
        assert native.action_mask.tolist() == info["action_mask"].tolist() and native.winner == info.get("winner")
        assert native.render() == info["text"] == python.render()
        if ended:
            break
    assert native.winner is not None
    with pytest.raises(RuntimeError, match="the game is over"):
        native.step(0)


def test_connect4_changes_its_opponent() -> None:
    python, native = Connect4(), NativeConnect4()
    for options in ({"level": "hard"}, None, {"opponent": "minimax-1"}):
        for env in (python, native):
            env.reset(seed=1, options=options)
        for column in (3, 3, 2, 6):
            wanted, got = python.step(column), native.step(column)
            assert canonical(wanted[:4]) == canonical(got[:4])
            if wanted[2]:
                break
    with pytest.raises(ef.BadArgument, match="level"):
        native.reset(options={"level": "impossible"})
    with pytest.raises(ef.BadArgument, match="text"):
        NativeConnect4(observation="text")
    raising = NativeConnect4(illegal="raise")
    raising.reset(seed=0)
    raising.state_view[16:58].view(np.int8)[:] = np.resize([1, -1], 42)
    with pytest.raises(RuntimeError, match="column 2 is full"):
        raising.step(2)


class WithoutColumns(Connect4):
    """Columns are filled from `info`, and native environments have none."""

    envfleet_columns: ClassVar[dict[str, Any]] = {}


PYTHON = {
    "gridnavi": GridNavi,
    "gridworld-team": GridWorldTeam,
    "connect4": WithoutColumns,
    "connect4-medium": functools.partial(WithoutColumns, opponent="minimax-1"),
    "connect4-hard": functools.partial(WithoutColumns, opponent="minimax-2"),
}


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("on_end", ["reset", "wait"])
def test_a_fleet_gives_the_bytes_of_serial(name: str, on_end: Any) -> None:
    with ef.make(PYTHON[name], 5, backend="serial", on_end=on_end) as fleet:
        wanted = record(fleet, 60, seed=3, with_info=False).digest()
    for workers, at_least in ((1, None), (2, 2), (3, 1)):
        with ef.make(name, 5, backend="native", num_workers=workers, on_end=on_end) as fleet:
            assert record(fleet, 60, seed=3, at_least=at_least, with_info=False).digest() == wanted, (workers, at_least)


@pytest.mark.parametrize("kind", [NativeGridNavi, NativeConnect4])
def test_a_copy_goes_on_as_the_original(kind: Any) -> None:
    env = kind()
    env.reset(seed=1)
    env.step(2)
    copy = pickle.loads(pickle.dumps(env))
    for action in (2, 1, 3):
        assert canonical(env.step(action)) == canonical(copy.step(action))
    assert canonical(env.reset()) == canonical(copy.reset())
