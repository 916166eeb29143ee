"""Task spaces: values, splits that cannot leak, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from envfleet.envs.attribute_tasks import AttributeTasks
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.mujoco_tasks import AntDir
from envfleet.envs.point_robot import PointRobot
from envfleet.envs.registry import IDS, resolve_env
from envfleet.errors import BadArgument
from envfleet.tasks import TaskBox, TaskList, TaskSampler
from envfleet.tasks.task_space import task_key

SPACES = {
    "gridnavi": GridNavi().task_space,
    "box": TaskBox([-1.0, 0.0], [1.0, 2.0]),
    "semicircle": PointRobot("semicircle").task_space,
    "sampler": TaskSampler(lambda rng: {"length": float(rng.uniform())}),
}


@pytest.mark.parametrize("name", SPACES)
def test_training_and_evaluation_tasks_are_disjoint_for_100_seeds(name):
    for seed in range(100):
        train, held_out = SPACES[name].split(12, 8, seed)
        keys = {task_key(task) for task in train}
        assert len(train) == len(keys) == 12 and len(held_out) == 8
        assert not keys & {task_key(task) for task in held_out}
    assert [task_key(task) for task in SPACES[name].split(12, 8, 3)[0]] == [
        task_key(task) for task in SPACES[name].split(12, 8, 3)[0]
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: TaskList([1, -1]).split(50, 20, 0), "the family has 2 tasks"),
        (lambda: TaskList([1, -1]).split(0, 1, 0), "num_train_tasks=0"),
        (lambda: TaskList([1, -1]).split(1.5, 1, 0), "num_train_tasks=1.5"),
        (lambda: TaskList([]), "at least one task"),
        (lambda: TaskList([(1, 2), [1, 2]]), "one task twice"),
        (lambda: TaskBox(1.0, 1.0), "each low below its high"),
        (lambda: TaskBox(0.0, np.inf), "finite"),
        (lambda: TaskSampler(lambda rng: 1).split(2, 1, 0), "fewer than 3 different tasks"),
        (lambda: GridNavi().set_task((0, 0)), r"task \(0, 0\) is not in"),
        (lambda: PointRobot("sparse").set_task((0.1, 0.1)), "is not in"),
        (lambda: PointRobot().set_task("left"), "is not in"),
        (lambda: AntDir(0), "directions=0"),
    ],
)
def test_what_is_not_a_task_is_refused_and_named(wrong, said):
    with pytest.raises(BadArgument, match=said):
        wrong()


def test_the_directions_of_ant_are_half_a_turn_apart():
    env = AntDir("forward-backward")
    ahead, back = (np.array(env.task_space.vector(task)) for task in env.task_space.values)
    assert np.allclose(ahead, -back, atol=1e-6)
    env.set_task(env.task_space.values[1])
    env.reset(seed=0)
    _, reward, *_, info = env.step(np.zeros(8, np.float32))
    assert reward == pytest.approx(-info["x_velocity"] + info["reward_ctrl"] + info["reward_survive"], abs=1e-6)
    env.close()


def test_attributes_are_set_before_the_reset_and_stay():
    import gymnasium as gym

    env = AttributeTasks(gym.make("CartPole-v1"), {"length": (0.3, 1.0)})
    first = env.reset(seed=1)[1]["task"]["length"]
    assert 0.3 <= first <= 1.0 and env.unwrapped.length == first
    assert env.reset(seed=1)[1]["task"]["length"] == first
    env.set_task({"length": 0.5})
    assert env.reset()[1]["task"] == {"length": 0.5} and env.reset()[1]["task"] == {"length": 0.5}
    with pytest.raises(BadArgument, match="no attribute 'lenght'"):
        AttributeTasks(gym.make("CartPole-v1"), {"lenght": (0.3, 1.0)})


@pytest.mark.parametrize("name", [name for name in IDS.values() if not name.startswith(("ant", "half", "cage2"))])
def test_environments_with_tasks_can_be_pickled(name):
    """Slots that move between processes take their environment along as a pickle."""
    env = resolve_env(name)()
    env.reset(seed=0)
    copy = pickle.loads(pickle.dumps(env))
    assert task_key(copy.task) == task_key(env.task)


@pytest.mark.parametrize("action", [-1, 5])
def test_gridnavi_refuses_an_action_that_is_none_of_its_own(action):
    """-1 was the last one, as Python counts."""
    env = GridNavi()
    env.reset(seed=0)
    with pytest.raises(BadArgument, match=rf"action {action} is not in Discrete\(5\)"):
        env.step(action)
