"""Every episode runs the task of its ticket, on every backend, and curricula do not depend on timing."""

from __future__ import annotations

import numpy as np
import pytest

import envfleet as ef
from envfleet.adapters.meta_envs import family
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.registry import resolve_env
from envfleet.tasks import SFL, LearningProgress, TaskSource
from envfleet.tasks.task_space import task_key

WAYS = [
    ("serial", None, None),
    ("thread", 3, None),
    ("aio", 2, None),
    ("pipe", 2, "forkserver"),
    ("shm", 2, "spawn"),
    ("shm", 3, "fork"),
]


def collected(backend, workers, method, num_episodes, tasks, mode="sync", slots=8):
    options = {} if method is None else {"start_method": method}
    with ef.make(family("gridnavi", 2), slots, backend=backend, num_workers=workers, **options) as fleet:
        collector = ef.Collector(fleet, random_actions=True, seed=1, tasks=tasks, mode=mode, keep_infos=True)
        return collector.collect(num_episodes)


@pytest.mark.parametrize(("backend", "workers", "method"), WAYS)
def test_every_episode_echoes_the_task_of_its_ticket(backend, workers, method, request):
    tasks = GridNavi().task_space.values
    rollouts = collected(backend, workers, method, 8_000 if request.config.getoption("--full") else 160, tasks)
    for rollout in rollouts:
        assert rollout.task == tasks[rollout.episode % len(tasks)]
        assert rollout.reset_info["task"] == rollout.task
        assert all(info["task"] == rollout.task for info in rollout.infos if "task" in info)  # inner resets too


@pytest.mark.parametrize("env", ["gridnavi", "antdir"])
def test_every_episode_of_the_native_family_runs_the_task_of_its_ticket(env, request):
    """The native life draws no task of its own, and its rows say which one runs; Ant's episodes are long, so there are fewer."""
    if env == "antdir":
        pytest.importorskip("mujoco")
    space = resolve_env(env)().task_space
    tasks = space.values if env == "gridnavi" else space.split(13, 0, 0)[0]
    many = request.config.getoption("--full")
    with ef.make(env, 8, backend="native") as fleet:
        collector = ef.Collector(fleet, random_actions=True, seed=1, tasks=tasks, keep_infos=True)
        rollouts = collector.collect((8_000 if many else 160) if env == "gridnavi" else (160 if many else 16))
        running = fleet.get_attr("task")
    assert all(rollout.task == tasks[rollout.episode % len(tasks)] for rollout in rollouts)
    assert all(rollout.reset_info["task"] == rollout.task for rollout in rollouts if "task" in rollout.reset_info)
    assert {task_key(task) for task in running} <= {task_key(task) for task in tasks}
    if env == "gridnavi":  # the goal pays: where the reward came is where the ticket's goal is
        for rollout in rollouts:
            at = np.asarray(rollout.observations)[1:][np.asarray(rollout.rewards) > 0]
            assert all((int(row[:5].argmax()), int(row[5:10].argmax())) == tuple(rollout.task) for row in at)
        assert sum((np.asarray(rollout.rewards) > 0).any() for rollout in rollouts) > 5


@pytest.mark.parametrize("curriculum", [LearningProgress, SFL])
def test_a_curriculum_deals_the_same_tasks_whatever_the_workers_and_the_mode(curriculum):
    def dealt(backend, workers, mode):
        source = TaskSource(curriculum(GridNavi().task_space), seed=3)
        rollouts = collected(backend, workers, None, 120, source, mode)
        return [rollout.task for rollout in rollouts], source.state_dict()["curriculum"]

    oracle, state = dealt("serial", None, "sync")
    assert len({task_key(task) for task in oracle}) > 5
    for backend, workers, mode in (("shm", 1, "async"), ("shm", 2, "overlap"), ("thread", 4, "async"), ("pipe", 2, "sync")):
        tasks, other = dealt(backend, workers, mode)
        assert tasks == oracle
        assert all((other[name] == state[name]).all() for name in state)


def test_a_ticket_sees_exactly_the_results_before_its_lag():
    class Spy(LearningProgress):
        def __init__(self, tasks):
            super().__init__(tasks)
            self.seen = []

        def assign(self, slots, rng):
            self.seen.append(int(self.counts.sum()))
            return super().assign(slots, rng)

    spy = Spy(GridNavi().task_space)
    collected("shm", 2, None, 60, TaskSource(spy, seed=0), "async", slots=4)
    assert spy.seen == [max(0, ticket - 8) for ticket in range(60)]


def test_a_source_goes_on_from_its_state():
    first = TaskSource(LearningProgress(GridNavi().task_space), seed=3)
    before = [rollout.task for rollout in collected("serial", None, None, 40, first)]
    state = first.state_dict()
    again = TaskSource(LearningProgress(GridNavi().task_space), seed=3)
    again.load_state_dict(state)
    assert [again.task(ticket) for ticket in range(40, 48)] == [first.task(ticket) for ticket in range(40, 48)]
    assert again.num_results == first.num_results and len(before) == 40


def test_a_task_that_the_environment_refuses_is_named_and_the_others_go_on():
    with ef.make("gridnavi", 3, backend="shm", num_workers=2, on_fault="restart") as fleet:
        batch = fleet.reset(seed=0, tasks=[(2, 2), (0, 0), (3, 3)])
        assert batch.faulted.tolist() == [False, True, False]
        assert "task (0, 0)" in str(fleet.faults[0]) and fleet.faults[0].slot == 1
        assert fleet.step([0, 0, 0]).faulted[[0, 2]].tolist() == [False, False]
    with ef.make("gridnavi", 2, backend="serial") as fleet, pytest.raises(ef.errors.EnvFailed, match=r"task \(0, 0\)"):
        fleet.reset(tasks=[(2, 2), (0, 0)])
