"""Views of meta-learning scripts under attack: interrupts, killed workers, a close in the middle, wrong calls. The data stay the same."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest

pytest.importorskip("torch")

import envfleet as ef
from envfleet.adapters.meta_envs import make_parallel_env
from envfleet.envs.gridnavi import GridNavi
from envfleet.errors import BadArgument, FleetClosed, SlotBusy
from envfleet.train import PPOConfig
from tests.support.failing_tasks import FailsOnTasks

FAMILY = PPOConfig(env="gridnavi", episodes_per_task=2, num_rollouts_per_iter=4, total_steps=480, seed=3)


@pytest.fixture
def interrupt():
    """Call a function, and interrupt it as Ctrl-C does after some seconds. Whether it was."""

    def handler(*_):
        raise KeyboardInterrupt

    def interrupted(seconds, call):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except KeyboardInterrupt:
            return True
        return False

    before = signal.signal(signal.SIGALRM, handler)
    yield interrupted
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def sequences(learner):
    return [{name: values.tolist() for name, values in one.items()} for one in learner.policy_storage._sequences]


def reference(num_rollouts):
    learner = ef.Learner(FAMILY)
    learner.collect_rollouts_parallel(num_rollouts, random_actions=True)
    learner.close()
    return sequences(learner)


def test_a_collection_that_is_interrupted_again_and_again_ends_with_the_same_rollouts(interrupt):
    rng, whole, cuts = random.Random(1), reference(40), 0
    with make_parallel_env("GridNavi-v0", 2, num_workers=3) as penv:
        while cuts < 8:
            learner = ef.Learner(FAMILY)
            while (left := 40 - len(learner.policy_storage)) > 0:
                cuts += interrupt(
                    rng.uniform(0.01, 0.4),
                    lambda learner=learner, left=left: learner.collect_rollouts_parallel(
                        left, random_actions=True, parallel_env=penv
                    ),
                )
            assert sequences(learner) == whole
            learner.close()


def test_what_an_interrupted_call_left_out_does_not_stop_the_next_collection():
    with make_parallel_env("GridNavi-v0", 2, num_workers=3) as penv:
        penv.fleet.send_reset(None, [(2, 2)] * 3)  # what is left of a reset that was interrupted
        learner = ef.Learner(FAMILY)
        learner.collect_rollouts_parallel(6, random_actions=True, parallel_env=penv)
        penv.reset()
        penv.step_async([0, 1], ids=[0, 2])
        learner.collect_rollouts_parallel(6, random_actions=True, parallel_env=penv)
        assert sequences(learner) == reference(12)
        learner.close()


def test_an_interrupted_step_or_reset_can_be_followed_by_any_reset(interrupt):
    rng = random.Random(2)
    with make_parallel_env("GridNavi-v0", 2, num_workers=2) as penv:
        penv.reset()
        cuts = 0
        while cuts < 30:
            cuts += interrupt(rng.uniform(0.0001, 0.01), lambda: [penv.step([0, 1]) for _ in range(20)])
            penv.reset(tasks=[(3, 3), (4, 4)])
            assert penv.current_tasks() == [(3, 3), (4, 4)]
            cuts += interrupt(rng.uniform(0.0001, 0.01), lambda: [penv.reset(tasks=[(2, 2)] * 2) for _ in range(20)])
            penv.reset(tasks=[(3, 3), (4, 4)])
            cuts += interrupt(rng.uniform(0.0001, 0.01), lambda: [penv.reset_one(1, task=(2, 3)) for _ in range(20)])
            penv.reset_one(1, task=(4, 3))
            assert penv.current_tasks() == [(3, 3), (4, 3)]


def test_a_reset_that_was_interrupted_is_not_taken_for_a_step():
    with make_parallel_env("GridNavi-v0", 2, num_workers=2) as penv:
        penv.fleet.send_reset(None, [(2, 2)] * 2)
        penv.reset_one(0, task=(3, 3))
        penv.reset(tasks=[(3, 3), (4, 4)])
        penv.step_async([0, 0])
        with pytest.raises(SlotBusy):
            penv.reset_one(0)
        assert penv.step_wait()[0].tolist() == [0, 1]
    with ef.ParallelEnvManager([GridNavi] * 2) as manager:
        manager.fleet.send_reset(None, [(2, 2)] * 2)
        assert manager.reset(tasks=[(3, 3), (4, 4)])[1][1]["task"] == (4, 4)


def test_a_pipe_whose_send_or_recv_was_interrupted_answers_once(interrupt):
    rng, cuts, steps = random.Random(3), 0, 0
    with ef.ParallelEnvManager([lambda: GridNavi(horizon=100_000)] * 2) as manager:
        remote = manager.remotes[1]
        remote.send(("reset", {"task": (2, 2)}))
        remote.recv()

        def one_step():
            if not manager.fleet.is_out[1]:
                remote.send(("step", 1))
            remote.recv()

        while cuts < 30:
            cuts += interrupt(rng.uniform(0.0001, 0.003), lambda: [one_step() for _ in range(100)])
        if manager.fleet.is_out[1]:
            assert len(remote.recv()) == 5
        remote.send(("get_attr", "task"))
        assert remote.recv() == (2, 2)
        steps = manager.fleet.slab.head["now_length"][1]
        remote.send(("step", 1))
        remote.recv()
        assert manager.fleet.slab.head["now_length"][1] == steps + 1


def test_workers_that_are_killed_while_they_collect_cost_no_rollout():
    with make_parallel_env(FailsOnTasks, 2, num_workers=3, on_fault="restart") as penv:
        learner = ef.Learner(FAMILY)
        killed = []
        add = learner.policy_storage.add_rollout

        def add_and_kill(rollout):
            add(rollout)
            if rollout.episode in (2, 9, 17):
                killed.append(pids.pop())
                os.kill(killed[-1], signal.SIGKILL)

        learner.policy_storage.add_rollout = add_and_kill
        pids = list(penv.call("pid"))
        learner.collect_rollouts_parallel(24, random_actions=True, parallel_env=penv)
        assert len(set(killed)) == 3 and learner.num_lost_rollouts == 0
        assert sequences(learner) == reference(24)
        learner.close()


def test_a_close_during_a_step_ends_everything(no_leaks):
    penv = make_parallel_env("GridNavi-v0", 2, num_workers=2)
    penv.reset()
    penv.step_async([0, 1])
    penv.close()
    with pytest.raises(FleetClosed):
        penv.step_wait()
    with pytest.raises(FleetClosed):
        ef.Learner(FAMILY).collect_rollouts_parallel(2, random_actions=True, parallel_env=penv)
    manager = ef.ParallelEnvManager([GridNavi])
    manager.remotes[0].send(("reset", None))
    manager.close()
    with pytest.raises(FleetClosed):
        manager.remotes[0].recv()


@pytest.mark.parametrize("worker", [7, -1, None, "a", 1.5])
def test_an_unknown_worker_is_refused_and_nothing_happens_to_the_others(worker):
    with make_parallel_env("GridNavi-v0", 2, num_workers=2, backend="serial") as penv:
        penv.reset(tasks=[(3, 3), (4, 4)])
        with pytest.raises(BadArgument, match="worker_id=") as refused:
            penv.reset_one(worker, task=(2, 2))
        assert repr(worker) in str(refused.value) and penv.current_tasks() == [(3, 3), (4, 4)]


@pytest.mark.parametrize("tasks", [[], [(2, 2)] * 3, 5, "ab", np.zeros((2, 2))])
def test_tasks_of_the_wrong_length_or_kind_are_refused(tasks):
    with ef.ParallelEnvManager([GridNavi] * 2, backend="serial") as manager:
        with pytest.raises(BadArgument, match="2 environments need a list with one task each"):
            manager.reset(tasks=tasks)
        assert manager.reset(tasks=[(2, 2), (3, 3)])[1][0]["task"] == (2, 2)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (None, "pair"),
        ("reset", "pair"),
        (("step",), "pair"),
        (("reset", 5), "a dict with task, seed and options, not 5"),
        (("reset", {"taks": 1}), "not taks"),
        (("call", "x"), r"\(name, args, kwargs\)"),
        (("set_attr", "x"), r"\(name, value\)"),
    ],
)
def test_a_message_that_is_none_of_ours_is_refused_by_name_and_leaves_the_worker_free(message, said):
    with ef.ParallelEnvManager([GridNavi], backend="serial") as manager:
        with pytest.raises(BadArgument, match=said):
            manager.remotes[0].send(message)
        manager.remotes[0].send(("reset", {"task": (2, 2)}))
        assert manager.remotes[0].recv()[1]["task"] == (2, 2)
