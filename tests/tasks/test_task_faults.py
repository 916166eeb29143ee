"""Tasks where something goes wrong: streams that are left, tasks that are refused, faults and resumed runs."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.adapters.meta_envs import family
from envfleet.envs.attribute_tasks import AttributeTasks
from envfleet.envs.gridnavi import GridNavi
from envfleet.rollout.segments.segment_results import SegmentResults
from envfleet.rollout.sequence_replay import SequenceReplay
from envfleet.tasks import ALPGMM, LearningProgress, TaskBox, TaskSampler, TaskSource
from envfleet.tasks.curriculum import TaskResult
from envfleet.tasks.task_space import task_text


def source():
    return TaskSource(LearningProgress(GridNavi().task_space), seed=3)


def collector(fleet, tasks, **options):
    return ef.Collector(fleet, random_actions=True, seed=1, tasks=tasks, **options)


def counted(tasks):
    return int(tasks.curriculum.counts.sum()) + len(tasks.state_dict()["inbox"])


def test_a_stream_that_is_left_early_goes_on_with_the_same_tasks_and_counts_every_result_once():
    with ef.make("gridnavi", 8, backend="serial") as fleet:
        whole = [rollout.task for rollout in collector(fleet, source()).collect(30)]
        tasks = source()
        ours = collector(fleet, tasks)
        stream = ours.episodes(40)
        got = [next(stream)]
        stream.close()
        got += ours.collect(num_steps=20)
        got += ours.collect(27)
    assert [rollout.episode for rollout in got] == list(range(30))
    assert [rollout.task for rollout in got] == whole
    assert counted(tasks) == 30 and not tasks.state_dict()["dealt"]


def test_tickets_left_by_a_stream_in_the_order_of_ends_are_not_waited_for():
    tasks = source()
    tasks.in_order(0, lag=4)
    tasks.add(TaskResult(3, [tasks.task(ticket) for ticket in range(6)][3], 1.0, 1))  # 0 to 2 have no result
    before = tasks.task(5)
    tasks.in_order(4, lag=4)
    assert [tasks.ready(ticket) for ticket in (4, 8, 9)] == [True, True, False]
    assert tasks.task(5) == before
    assert [row[0] for row in tasks.state_dict()["dealt"]] == [4, 5]


def test_tickets_far_apart_are_all_collected_and_skipped_ones_are_not_collected_later():
    with ef.make("gridnavi", 2, backend="serial") as fleet:
        ours = collector(fleet, source())
        wanted = {0, 10, 20, 30}
        assert [rollout.episode for rollout in ours.episodes(40, skip=set(range(40)) - wanted)] == sorted(wanted)
        assert [rollout.episode for rollout in ours.episodes(2)] == [40, 41]


def test_a_second_collector_of_a_source_goes_on_where_the_first_stopped_or_is_refused():
    tasks = source()
    with ef.make("gridnavi", 2, backend="serial") as fleet:
        collector(fleet, tasks).collect(20)
        with pytest.raises(ef.errors.BadArgument, match="give first_ticket=20"):
            collector(fleet, tasks).collect(20)
        assert len(collector(fleet, tasks, first_ticket=20).collect(20)) == 20


def test_segments_may_follow_episodes_and_episodes_segments():
    with ef.make("gridnavi", 2, backend="serial") as fleet:
        ours = collector(fleet, source())
        ours.collect(6)
        segment = ours.segment(40)
        assert segment.episode.max() == 2
        assert [rollout.episode for rollout in ours.collect(6)] == list(range(6, 12))


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.filterwarnings("ignore::envfleet.errors.LedgerWarning")
def test_a_refused_task_costs_its_own_ticket_and_no_slot(on_end):
    def deal(ticket):
        return (0, 0) if ticket == 5 else GridNavi().task_space.values[ticket % 21]

    with ef.make(GridNavi, 4, backend="shm", num_workers=2, on_fault="restart", on_end=on_end) as fleet:
        ours = collector(fleet, deal, keep_infos=True)
        rollouts = list(ours.episodes(16, yield_failed=True))
        assert not len(fleet.quarantined)
    assert [rollout.episode for rollout in rollouts if rollout.error is not None] == [5]
    assert sorted(rollout.episode for rollout in rollouts) == list(range(16))
    assert len(rollouts[5]) == 0 and not rollouts[5].infos and not rollouts[5].reset_info
    assert all(rollout.reset_info["task"] == deal(rollout.episode) for rollout in rollouts if rollout.error is None)


def test_a_worker_whose_reset_failed_can_be_reset_again_and_a_fault_row_says_so():
    with ef.ParallelEnvManager([GridNavi] * 2, on_fault="raise", backend="serial") as manager:
        remote = manager.remotes[0]
        remote.send(("reset", {"task": (0, 0)}))
        with pytest.raises(ef.errors.EnvFailed):
            remote.recv()
        remote.send(("reset", {"task": (3, 3)}))
        assert remote.recv()[1] == {"task": (3, 3)}
    with ef.ParallelEnvManager([GridNavi] * 2, on_fault="restart", backend="serial") as manager:
        infos = manager.reset(tasks=[(0, 0), (3, 3)])[1]
        assert infos[0]["envfleet.fault"] and infos[1] == {"task": (3, 3)}
        assert manager.reset(tasks=[(2, 2), (3, 3)])[1][0] == {"task": (2, 2)}


class WithState(GridNavi):
    """Offers its state, which does not know of inner episodes."""

    def get_state(self):
        return [self._at.tolist(), self._time]

    def set_state(self, state):
        self._at, self._time = np.array(state[0]), state[1]


def test_segments_are_restored_in_the_middle_of_an_outer_episode():
    def begun():
        fleet = ef.make(family(WithState, 3), 2, backend="serial")
        return fleet, collector(fleet, GridNavi().task_space.values, resumable=True)

    fleet, ours = begun()
    with fleet:
        ours.segment(20)
        state = ours.segment_state()
        expected = ours.segment(30)
    fleet, ours = begun()
    with fleet:
        assert not len(ours.restore_segments(state))
        found = ours.segment(30)
    assert (found.columns["inner_episode"] == expected.columns["inner_episode"]).all()
    assert (found.obs == expected.obs).all() and (found.terminated == expected.terminated).all()


def test_attributes_that_a_task_does_not_set_are_those_of_the_environment():
    env = AttributeTasks(gym.make("CartPole-v1"), TaskSampler(lambda rng: {"gravity": 5.0}))
    env.reset(seed=0, options={"task": {"gravity": 5.0}})
    env.reset(options={"task": {"length": 0.9}})
    assert (env.unwrapped.gravity, env.unwrapped.length) == (9.8, 0.9)
    with pytest.raises(ef.errors.BadArgument, match="nothing"):
        env.reset(options={"task": {"nothing": 1}})


@pytest.mark.parametrize("tasks", [["easy", "medium"], [0, 0.5], [(1, (2, 3)), (2, (3, 4))], [{"a": 1}, {"b": 2}]])
def test_a_replay_and_a_log_take_tasks_of_every_kind(tasks):
    replay = SequenceReplay(100)
    for task in tasks:
        replay.add_rollout(
            ef.Rollout(
                env_name="e",
                task=task,
                observations=np.zeros((4, 1)),
                actions=np.zeros(3),
                rewards=np.zeros(3),
                terminated=np.zeros(3, bool),
                truncated=np.zeros(3, bool),
            )
        )
    drawn = replay.sample(20, np.random.default_rng(0))["task"]
    assert {task_text(task) for task in drawn[0]} == {task_text(task) for task in tasks}


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_alp_gmm_stays_within_its_bounds_and_leaves_out_returns_that_are_not_finite():
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    pairs = (np.sort(rng.uniform(-3, 3, 2)) for _ in range(1000))
    low, high = next((low, high) for low, high in pairs if low + (high - low) > high)
    alp = ALPGMM(TaskBox(low, high), fit_every=10, explore=0.0)
    for ticket in range(40):
        alp.update([TaskResult(ticket, high, np.nan if ticket % 7 == 0 else ticket % 2, 1)])
    assert alp.mixture is not None
    assert all(alp.space.contains(alp.assign([0], rng)[0]) for _ in range(50))


class FailsOnce(GridNavi):
    """Fails in the sixth episode."""

    episodes = 0

    def reset(self, **options):
        FailsOnce.episodes += 1
        if FailsOnce.episodes == 6:
            raise RuntimeError("once")
        return super().reset(**options)


def test_a_learner_keeps_what_was_collected_before_a_fault_and_goes_on():
    FailsOnce.episodes = 0
    learner = ef.Learner(
        {"env": {"env_type": "meta", "env_name": "gridnavi", "episodes_per_task": 1}, "train": {"total_steps": 100}}
    )
    with ef.make_parallel_env(FailsOnce, backend="serial") as penv:
        with pytest.raises(ef.errors.EnvFailed):
            learner.collect_rollouts_parallel(8, random_actions=True, parallel_env=penv)
        assert len(learner.policy_storage) == 4 and learner.num_env_steps == 60
        assert learner.collect_rollouts_parallel(4, random_actions=True, parallel_env=penv) == 60
    learner.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_network_is_told_what_was_done_in_its_previous_step_also_after_random_actions(replaced):
    torch = pytest.importorskip("torch")
    from envfleet.networks.actor_critic import ActorCritic, NetworkConfig
    from envfleet.networks.network_policy import PREVIOUS, Policy

    torch.manual_seed(0)
    with ef.make("gridnavi", 4, backend="serial") as fleet:
        spaces = fleet.single_observation_space, fleet.single_action_space
        policy = Policy(ActorCritic(*spaces, NetworkConfig(previous_step=True)), 4, np.random.default_rng(0))
        first = None if replaced else policy
        ours = ef.Collector(fleet, first, random_actions=replaced, warmup_steps=0 if replaced else 28, seed=1)
        ours.policy = policy
        for rollout in ours.collect(8):
            told = rollout.extras[PREVIOUS]
            known = [t for t in range(1, len(rollout)) if told[t].any()]  # while all actions are random nothing is told
            assert len(known) >= 7
            for t in known:
                assert told[t, :-1].argmax() == rollout.actions[t - 1] and told[t, -1] == np.float32(rollout.rewards[t - 1])


def test_value_errors_of_episodes_that_a_resumed_run_ended_are_not_those_of_the_next():
    def error(**options):
        tasks = SegmentResults(source(), 2)
        tasks.load(state)
        tasks.forget(**options)
        return tasks.state()["error"].tolist()

    state = SegmentResults(source(), 2).state() | {"error": np.array([[3.0, 4.0], [1.0, 2.0]])}
    assert error(slots=np.array([1])) == [[3.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("low, high", [(0.0, 10.0), ([-1.0, 2.0], [1.0, 3.0])])
def test_alp_gmm_says_what_it_draws(low, high):
    """The probabilities of parts of the space are the shares of many draws, also at the bounds, to which draws are moved."""
    alp = ALPGMM(TaskBox(low, high), fit_every=50, explore=0.2)
    rng = np.random.default_rng(3)
    first = alp.probabilities()
    assert set(first.values()) == {0.125}
    for ticket in range(300):
        (task,) = alp.assign([0], rng)
        near = float(np.ravel(alp._scaled(task))[0])
        alp.update([TaskResult(ticket, task, ticket * (near > 0.9), 1)])
    said, draws = alp.probabilities(), np.array([alp._scaled(task) for task in alp.assign([0] * 8000, rng)])
    assert list(said) == list(first) and max(said.values()) > 0.25
    for d in range(draws.shape[1]):
        shares = np.histogram(draws[:, d], np.linspace(0.0, 1.0, 9))[0] / len(draws)
        assert np.abs(shares - list(said.values())[8 * d : 8 * d + 8]).max() < 0.02
