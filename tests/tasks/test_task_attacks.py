"""Tasks under attack: results that are no numbers, stored curricula that were changed, cuts at inner ends, workers that die or are copied."""

from __future__ import annotations

import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.varibad import VariBadWrapper
from envfleet.errors import BadArgument, EnvFailed, FleetClosed, NotPicklable, ResetNeeded, SlotBusy, WorkerLost
from envfleet.tasks import ALPGMM, PLR, SFL, LearningProgress, Levels, TaskBox, TaskSource
from envfleet.tasks.curriculum import TaskResult

CURRICULA = {
    "learning_progress": LearningProgress,
    "sfl": SFL,
    "levels": Levels,
    "levels_by_return": lambda tasks: Levels(tasks, by="return"),
    "plr": lambda tasks: PLR(tasks, min_levels=1, capacity=2),
}


def results(first, **values):
    return [
        TaskResult(first + i, "abc"[i % 3], **{"episode_return": 1.0, "length": 3, "success": 1.0, "value_error": 0.5, **values})
        for i in range(6)
    ]


@pytest.mark.parametrize("curriculum", CURRICULA)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_results_that_are_no_numbers_do_not_stay_in_a_curriculum(curriculum, number):
    ours = CURRICULA[curriculum](["a", "b", "c"])
    for name in ("episode_return", "success", "value_error"):
        ours.update(results(0, **{name: number}))
    ours.update(results(6))
    assert np.isfinite(list(ours.probabilities().values())).all() and sum(ours.probabilities().values()) == pytest.approx(1.0)
    assert len(ours.assign(range(20), np.random.default_rng(0))) == 20


def test_a_level_that_is_scored_nan_does_not_replace_one_that_has_a_score():
    plr = PLR(["a", "b", "c"], capacity=2, min_levels=1)
    plr.update([TaskResult(0, "a", 0.0, 1, value_error=1.0), TaskResult(1, "b", 0.0, 1, value_error=2.0)])
    plr.update([TaskResult(2, "c", 0.0, 1, value_error=np.nan), TaskResult(3, "a", 0.0, 1, value_error=np.nan)])
    assert plr.levels == ["a", "b"] and plr.scores == [1.0, 2.0]


CHANGES = {
    "is missing": lambda values: None,
    "has NaN": lambda values: np.full(np.shape(values), np.nan),
    "is negative": lambda values: np.full(np.shape(values), -1.0),
    "has another shape": lambda values: np.zeros((7, 3)),
    "is text": lambda values: "nothing",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("curriculum", "name"),
    [("learning_progress", "fast"), ("sfl", "p"), ("levels", "counts"), ("plr", "scores"), ("plr", "clock")],
)
def test_a_stored_curriculum_that_was_changed_is_refused_and_the_running_one_stays(curriculum, name, change):
    ours, other = (CURRICULA[curriculum](["a", "b", "c"]) for _ in range(2))
    ours.update(results(0))
    other.update(results(0))
    state = other.state_dict()
    changed = CHANGES[change](state.pop(name))
    before = ours.probabilities()
    with pytest.raises(BadArgument, match="stored curriculum"):
        ours.load_state_dict(state if changed is None else {**state, name: changed})
    assert ours.probabilities() == before


def test_a_stored_level_that_is_no_task_is_refused():
    ours = CURRICULA["plr"](["a", "b", "c"])
    ours.update(results(0))
    state = ours.state_dict()
    with pytest.raises(BadArgument, match="no task of"):
        ours.load_state_dict({**state, "levels": ["z", *state["levels"][1:]]})


@pytest.mark.parametrize(
    "changed",
    [
        {"history": [[0.5]]},
        {"history": [[np.nan, 1.0]]},
        {"mixture": {"mean": np.zeros((1, 2))}},
        {"mixture": {"mean": np.full((1, 2), np.nan), "cov": np.zeros((1, 2, 2))}},
        {"num_results": -1},
    ],
)
def test_a_stored_mixture_that_was_changed_is_refused(changed):
    alp = ALPGMM(TaskBox(0.0, 1.0))
    alp.update([TaskResult(i, i / 10, float(i), 1) for i in range(5)])
    again = ALPGMM(TaskBox(0.0, 1.0))
    again.load_state_dict(alp.state_dict())
    assert again.state_dict() == alp.state_dict()
    with pytest.raises(BadArgument, match="stored curriculum"):
        again.load_state_dict({**alp.state_dict(), **changed})


@pytest.mark.parametrize("changed", [{"dealt": [[1]]}, {"inbox": [[]]}, {"next": "soon"}, {"in": None}, {"lag": []}])
def test_stored_tickets_that_were_changed_are_refused(changed):
    source = TaskSource(["a", "b"], seed=0)
    source.task(0)
    with pytest.raises(BadArgument, match="stored tasks are damaged"):
        TaskSource(["a", "b"]).load_state_dict({**source.state_dict(), **changed})


@pytest.mark.parametrize("cut", [4, 5, 6])
def test_an_outer_episode_that_is_cut_at_an_inner_end_has_no_return_of_the_next(cut):
    env = gym.wrappers.TimeLimit(VariBadWrapper(GridNavi(horizon=5), 3), cut)
    env.reset(options={"task": (4, 4)})
    *_, terminated, truncated, info = [env.step(np.int64(0)) for _ in range(cut)][-1]
    assert (terminated, truncated) == (False, True)
    played = {4: [-0.4], 5: [-0.5], 6: [-0.5, -0.1]}[cut]
    assert info["inner_returns"][: len(played)].tolist() == pytest.approx(played)
    assert np.isnan(info["inner_returns"][len(played) :]).all()
    assert info["inner_episode"] == (cut >= 5) and bool(info["inner_done"]) == (cut == 5)


def test_the_mean_of_inner_episodes_is_over_those_that_were_played():
    pytest.importorskip("torch")
    from envfleet.train.evaluate import Evaluation

    found = Evaluation.of([3.0, 1.0], [6, 2], inner_returns=[[1.0, 2.0, np.nan], [1.0, np.nan, np.nan]])
    assert found.mean_inner_returns[:2] == [1.0, 2.0] and np.isnan(found.mean_inner_returns[2])


class WithPid(GridNavi):
    def pid(self):
        return os.getpid()


def test_pipes_are_answered_in_any_order_and_wrong_orders_are_refused_without_harm():
    with ef.ParallelEnvManager([GridNavi] * 3) as manager:
        remotes = manager.remotes
        with pytest.raises(ResetNeeded):
            remotes[0].send(("step", 1))
        for remote, task in zip(remotes, [(2, 2), (3, 3), (4, 4)]):
            remote.send(("reset", {"task": task}))
        assert [remotes[i].recv()[1]["task"] for i in (2, 0, 1)] == [(4, 4), (2, 2), (3, 3)]
        remotes[1].send(("step", 1))
        for message in (("step", 1), ("get_attr", "task"), ("reset", None)):
            with pytest.raises(BadArgument, match="not received"):
                remotes[1].send(message)
        with pytest.raises(SlotBusy):
            manager.step([1, 1, 1])
        assert len(remotes[1].recv()) == 5
        manager.step_async([1, 1, 1])
        assert [remotes[i].recv()[1] for i in (2, 1, 0)] == [-0.1] * 3
        assert manager.fleet.slab.head["now_length"].tolist() == [1, 2, 1]
        remotes[1].send(("close", None))
        with pytest.raises(BadArgument, match="worker 1 was closed"):
            remotes[1].send(("step", 1))
        remotes[0].send(("step", 1))
        assert len(remotes[0].recv()) == 5
        for remote in remotes:  # as scripts with pipes end
            remote.send(("close", None))
        with pytest.raises(FleetClosed):
            manager.reset()


@pytest.mark.parametrize(
    ("task", "error"),
    [((np.nan, 2), EnvFailed), (threading.Lock(), NotPicklable), ("x" * 1_000_000, EnvFailed), ([[]], EnvFailed)],
)
def test_a_task_that_cannot_be_is_named_shortly_and_the_worker_takes_the_next(task, error):
    with ef.ParallelEnvManager([GridNavi]) as manager:
        remote = manager.remotes[0]
        with pytest.raises(error) as refused:
            remote.send(("reset", {"task": task}))
            remote.recv()
        assert "task" in str(refused.value) and len(str(refused.value)) < 10_000
        remote.send(("reset", {"task": (2, 2)}))
        assert remote.recv()[1]["task"] == (2, 2)


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_a_worker_that_was_killed_is_named_once_and_takes_its_task_after_a_reset(on_fault):
    with ef.make_parallel_env(WithPid, 2, 3, on_fault=on_fault) as penv:
        penv.reset(tasks=[(2, 2), (3, 3), (4, 4)])
        os.kill(penv.call("pid")[1], signal.SIGKILL)
        if on_fault == "raise":
            with pytest.raises(WorkerLost, match=r"slot 1 .*task \(3, 3\)"):
                penv.reset_one(1, task=(2, 3))
        penv.reset_one(1, task=(2, 3))
        assert penv.current_tasks() == [(2, 2), (2, 3), (4, 4)]
        os.kill(penv.call("pid")[2], signal.SIGKILL)
        penv.step_async([1, 1, 1])
        if on_fault == "raise":
            with pytest.raises(WorkerLost, match="slot 2"):
                penv.step_wait()
            assert penv.step_wait()[0].tolist() == [0, 1]
        else:
            ids, _, _, dones, infos = penv.step_wait()
            assert ids.tolist() == [0, 1, 2] and dones.tolist() == [False, False, True] and infos[2]["envfleet.fault"]
        penv.reset(tasks=[(4, 4), (3, 3), (2, 2)])
        assert penv.current_tasks() == [(4, 4), (3, 3), (2, 2)]


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_a_pipe_to_a_worker_that_was_killed_answers_once_and_can_be_reset(on_fault):
    with ef.ParallelEnvManager([WithPid] * 2, on_fault=on_fault) as manager:
        manager.reset(tasks=[(2, 2), (3, 3)])
        os.kill(manager.call("pid")[0], signal.SIGKILL)
        remote = manager.remotes[0]
        remote.send(("step", 1))
        if on_fault == "raise":
            with pytest.raises(WorkerLost, match=r"slot 0 .*task \(2, 2\)"):
                remote.recv()
        else:
            assert remote.recv()[2:] == (False, True, {"task": (2, 2), "envfleet.fault": True})
        with pytest.raises(BadArgument, match="nothing was sent"):
            remote.recv()
        remote.send(("reset", {"task": (4, 4)}))
        assert remote.recv()[1] == {"task": (4, 4)}
        manager.remotes[1].send(("step", 1))
        assert manager.remotes[1].recv()[1] == -0.1


def test_a_forked_process_is_refused_and_leaves_the_workers_to_its_parent():
    with ef.ParallelEnvManager([GridNavi] * 2) as manager:
        manager.reset(tasks=[(2, 2), (3, 3)])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # no test of this process may run on in it
            try:
                try:
                    manager.remotes[0].send(("step", 1))
                except FleetClosed:
                    manager.close()
                    os.write(writer, b"refused")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        with os.fdopen(reader, "rb") as said:
            assert said.read() == b"refused"
        assert manager.step([1, 1])[1].tolist() == [-0.1, -0.1]
