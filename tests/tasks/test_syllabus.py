"""Curricula of Syllabus in our runs: a small object of the same interface, and the package itself where it is installed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.unlock import Unlock
from envfleet.errors import BadArgument
from envfleet.tasks import SyllabusCurriculum, TaskResult, TaskSource

TASKS = ["easy", "medium", "hard"]


class LeastSeen:
    """The interface of Syllabus, with encoded tasks everywhere: a task that had the fewest results, by the global random numbers."""

    requires_step_updates = False

    def __init__(self, tasks=TASKS):
        self.task_space = SimpleNamespace(tasks=list(tasks), encode=list(tasks).index, decode=list(tasks).__getitem__)
        self.counts = np.zeros(len(tasks), int)
        self.told = []

    def sample(self, k=1):
        return np.random.choice(np.flatnonzero(self.counts == self.counts.min()), k)

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.counts[task] += 1
        self.told.append((episode_return, length, task, progress))

    def update_task_progress(self, task, progress, env_id=None):
        self.told.append((task, progress))


def assigned(curriculum, first, last):
    """Tickets, each with its result at once."""
    out = []
    source = TaskSource(curriculum, seed=4)
    for ticket in range(first, last):
        out.append(source.task(ticket))
        source.add(TaskResult(ticket, out[-1], 1.0, 5))
        source.advance()
    return out


def test_results_arrive_encoded_and_tasks_leave_decoded():
    theirs = LeastSeen()
    curriculum = SyllabusCurriculum(theirs)
    curriculum.update([TaskResult(0, "hard", 2.5, 7, success=0.5), TaskResult(1, "easy", 0.0, 3)])
    assert theirs.told == [(2, 0.5), (2.5, 7, 2, 0.5), (0, 0.0), (0.0, 3, 0, 0.0)]
    assert curriculum.assign([0, 1], np.random.default_rng(0)) == ["medium", "medium"] and curriculum.space.size == 3


def test_what_is_assigned_does_not_depend_on_the_global_random_numbers_and_leaves_them_alone():
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate()
    first = assigned(SyllabusCurriculum(LeastSeen()), 0, 30)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    np.random.seed(2)
    assert assigned(SyllabusCurriculum(LeastSeen()), 0, 30) == first and len(set(first[:3])) == 3


def test_a_restored_curriculum_goes_on_as_the_stored_one_would():
    whole = assigned(SyllabusCurriculum(LeastSeen()), 0, 30)
    stored = SyllabusCurriculum(LeastSeen())
    first = assigned(stored, 0, 11)
    restored = SyllabusCurriculum(LeastSeen())
    restored.load_state_dict(stored.state_dict())
    assert first + assigned(restored, 11, 30) == whole


class Stored(LeastSeen):
    """The same, with a state of its own."""

    def state_dict(self):
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state):
        self.counts = np.array(state["counts"])


def test_a_curriculum_with_a_state_is_restored_exactly_from_one_that_does_not_grow():
    whole = assigned(SyllabusCurriculum(LeastSeen()), 0, 30)
    stored = SyllabusCurriculum(Stored())
    first = assigned(stored, 0, 11)
    state = stored.state_dict()
    assert state == {"state": {"counts": stored.curriculum.counts.tolist()}}
    restored = SyllabusCurriculum(Stored())
    restored.load_state_dict(state)
    assert first + assigned(restored, 11, 30) == whole
    with pytest.raises(BadArgument, match="load_state_dict"):
        SyllabusCurriculum(LeastSeen()).load_state_dict(state)
    calls = SyllabusCurriculum(LeastSeen())
    assigned(calls, 0, 11)
    late = SyllabusCurriculum(Stored())  # the methods came after the checkpoint
    late.load_state_dict(calls.state_dict())
    assert first + assigned(late, 11, 30) == whole


def test_a_collector_deals_its_tasks():
    theirs = LeastSeen(range(10))
    with ef.make("unlock", num_envs=2, backend="serial") as fleet:
        ef.Collector(fleet, random_actions=True, seed=1, tasks=TaskSource(SyllabusCurriculum(theirs))).collect(40)
    assert theirs.counts.sum() >= 30 and theirs.counts.min() >= 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (type("StepByStep", (LeastSeen,), {"requires_step_updates": True})(), "StepByStep needs an update at every step"),
        (Unlock(), "Unlock has no sample, update_on_episode, update_task_progress"),
    ],
)
def test_objects_that_cannot_be_used_are_refused_by_name(wrong, said):
    with pytest.raises(BadArgument, match=said):
        SyllabusCurriculum(wrong)


def test_curricula_of_the_package_itself_deal_tasks_and_learn_from_results():
    pytest.importorskip("syllabus", reason="pip install syllabus-rl")
    from syllabus.curricula import DomainRandomization, PrioritizedLevelReplay, SequentialCurriculum
    from syllabus.task_space import DiscreteTaskSpace

    def stages():
        """Easy and medium tasks for ten episodes, then the hard one."""
        return SyllabusCurriculum(SequentialCurriculum([TASKS[:2], TASKS[2:]], ["episodes>=10"], DiscreteTaskSpace(3, TASKS)))

    assert set(assigned(SyllabusCurriculum(DomainRandomization(DiscreteTaskSpace(3, TASKS))), 0, 30)) == set(TASKS)
    whole = assigned(stages(), 0, 20)
    assert set(whole[:10]) == {"easy", "medium"} and set(whole[10:]) == {"hard"}
    stored, restored = stages(), stages()
    assert assigned(stored, 0, 7) == whole[:7]
    restored.load_state_dict(stored.state_dict())
    assert assigned(restored, 7, 20) == whole[7:]
    with pytest.raises(BadArgument, match="PrioritizedLevelReplay needs an update at every step"):
        SyllabusCurriculum(PrioritizedLevelReplay(DiscreteTaskSpace(3), (2,), num_steps=4, num_processes=1))
