import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import envfleet as ef
from envfleet.envs.probe import Counting, Mixed, Tasked
from envfleet.errors import BadArgument, FaultError
from envfleet.rollout import AgentFailed, Answer, Collector, LedgerWarning, Rollouts
from tests.support.rollout_envs import Fragile, Frozen, Walk


def collect(num_episodes, backend="serial", num_workers=None, mode="sync", num_envs=6, env=Walk, **options):
    with ef.make(env, num_envs=num_envs, backend=backend, num_workers=num_workers) as fleet:
        collector = Collector(fleet, Frozen(), seed=11, mode=mode, **options)
        return collector.collect(num_episodes), collector


SETTINGS = [
    ("serial", None, "async"),
    ("thread", 2, "sync"),
    ("thread", 4, "overlap"),
    ("shm", 1, "overlap"),
    ("shm", 2, "async"),
]


@pytest.mark.parametrize("backend, num_workers, mode", SETTINGS)
def test_same_bytes_on_every_backend_and_mode(backend, num_workers, mode):
    expected, _ = collect(60)
    got, collector = collect(60, backend, num_workers, mode)
    assert got.digest() == expected.digest()
    assert [r.episode for r in got] == list(range(60)) and [r.slot for r in got] == [i % 6 for i in range(60)]
    assert collector.ledger.started == collector.ledger.used == 60


@pytest.mark.full
@pytest.mark.parametrize("mode", ["sync", "async", "overlap"])
@pytest.mark.parametrize("backend, num_workers", [("serial", None), *((b, w) for b in ("thread", "shm") for w in (1, 2, 4))])
def test_same_bytes_of_500_episodes(backend, num_workers, mode):
    expected, _ = collect(500)
    assert collect(500, backend, num_workers, mode)[0].digest() == expected.digest()


def test_the_set_of_episodes_does_not_depend_on_the_number_of_slots():
    assert collect(40, num_envs=1)[0].digest() == collect(40, num_envs=7, mode="async")[0].digest()


def test_any_single_episode_can_be_replayed_alone():
    rollouts, _ = collect(20)
    wanted = rollouts[13]
    env = Walk()
    obs, _ = env.reset(seed=wanted.seed)
    for t, action in enumerate(wanted.actions):
        assert np.array_equal(obs, wanted.observations[t])
        obs, reward, terminated, truncated, _ = env.step(action)
        assert (reward, terminated, truncated) == (wanted.rewards[t], wanted.terminated[t], wanted.truncated[t])
    assert np.array_equal(obs, wanted.observations[-1]) and wanted.dones[-1]
    assert wanted.policy_version.tolist() == [7] * len(wanted) and wanted.extras["logprob"].dtype == np.float32


@pytest.mark.parametrize("mode", ["async", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("sync", "overlap"))])
def test_no_length_bias(mode):
    """Slots 0-3 run short episodes, 4-7 ten times as long ones. Who takes what finishes first gets the short ones."""
    envs = [Walk] * 4 + [lambda: Walk(slow=True)] * 4
    with ef.make(envs, backend="serial") as fleet:
        serial = [len(r) for r in Collector(fleet, Frozen(), seed=1).episodes(200)]
    with ef.make(envs, backend="thread", num_workers=2) as fleet:
        by_ticket = [len(r) for r in Collector(fleet, Frozen(), seed=1, mode=mode).episodes(200)]
        assert by_ticket == serial  # not alike: the same
        prefix = [len(r) for _, r in zip(range(50), Collector(fleet, Frozen(), seed=1, mode=mode).episodes(200))]
        assert prefix == serial[:50]  # also when the caller stops early
        naive = []
        for rollout in Collector(fleet, Frozen(), seed=1, mode=mode, max_ahead=10**6).episodes(2000, order="finish"):
            naive.append(len(rollout))
            if len(naive) == 200:
                break
    assert sum(length >= 20 for length in serial) == 100
    assert sum(length >= 20 for length in naive) < 60  # "the first 200 finished" over-counts short ones


def test_ledger_counts_what_the_caller_leaves():
    with ef.make(Walk, num_envs=4, backend="serial") as fleet:
        collector = Collector(fleet, Frozen(), seed=0)
        for rollout in collector.episodes(100):
            if rollout.episode == 9:
                break
        ledger = collector.ledger
        assert ledger.used == 10 and ledger.in_flight == 0
        assert ledger.started == 10 + ledger.dropped.total() and not ledger.failed
        assert set(ledger.dropped) <= {"unfinished when the caller stopped", "finished but not taken"}
        again = collector.collect(5)  # numbering goes on where the caller stopped
        assert [r.episode for r in again] == [10, 11, 12, 13, 14]


def test_waiting_fleets_and_explicit_resets_give_the_same():
    expected, _ = collect(30)
    with ef.make(Walk, num_envs=6, backend="serial", on_end="wait") as fleet:
        assert Collector(fleet, Frozen(), seed=11).collect(30).digest() == expected.digest()


def test_max_steps_cuts_and_truncates():
    with ef.make(lambda: Counting(limit=50), num_envs=3, backend="serial") as fleet:
        rollouts = Collector(fleet, random_actions=True, seed=0, max_steps=4).collect(7)
    assert [len(r) for r in rollouts] == [4] * 7
    assert all(r.truncated.tolist() == [False, False, False, True] and not r.terminated.any() for r in rollouts)
    assert all(r.observations[:, 0].tolist() == [0, 1, 2, 3, 4] for r in rollouts)


def test_stop_by_steps():
    with ef.make(lambda: Counting(limit=5), num_envs=4, backend="serial") as fleet:
        rollouts = Collector(fleet, random_actions=True, seed=0).collect(num_steps=42)
    assert len(rollouts) == 9 and rollouts.total_steps == 45


def test_three_step_env_gives_3_and_3_everywhere():
    for on_end in ("reset", "wait"):
        for mode in ("sync", "async", "overlap"):
            with ef.make(lambda: Counting(limit=3), num_envs=5, backend="thread", num_workers=2, on_end=on_end) as fleet:
                collector = Collector(fleet, random_actions=True, mode=mode)
                rollouts = collector.collect(23)
                assert [(len(r), r.episode_return) for r in rollouts] == [(3, 3.0)] * 23
                assert collector.stats().mean_return == 3.0 and collector.stats().total_steps == 69


def test_tasks_are_dealt_by_ticket():
    with ef.make(Tasked, num_envs=3, backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True, seed=0, tasks=[5, 6, 7, 8])
        rollouts = collector.collect(13)
    assert [r.task for r in rollouts] == [5, 6, 7, 8] * 3 + [5]
    assert all((r.observations == r.task).all() for r in rollouts)


def test_trees_infos_and_random_actions_of_every_space():
    with ef.make(Mixed, num_envs=3, backend="shm", num_workers=2) as fleet:
        rollouts = Collector(fleet, random_actions=True, seed=0, keep_infos=True).collect(8)
        for rollout in rollouts:
            assert rollout.observations["image"].shape == (8, 4, 4) and rollout.observations["pair"][1].shape == (8, 3)
            assert all(
                fleet.single_action_space.contains({"move": rollout.actions["move"][t], "force": rollout.actions["force"][t]})
                for t in range(7)
            )
            assert [info["count"] for info in rollout.infos] == [1, 2, 3, 4, 5, 6, 7]
            assert rollout.reset_info["first"] is True
    assert len({float(r.actions["force"][0, 0]) for r in rollouts}) == 8


class Talker(gym.Env):
    """Text observations and actions: nothing of fixed shape."""

    def __init__(self):
        self.observation_space = spaces.Text(20)
        self.action_space = spaces.Text(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return f"hello {int(self.np_random.integers(9))}", {}

    def step(self, action):
        self.t += 1
        return f"step {self.t}", float(len(action)), self.t == 3, False, {}


def test_text_environments(tmp_path):
    def policy(obs):
        return [text[:3] for text in obs]

    with ef.make(Talker, num_envs=2, backend="serial") as fleet:
        rollouts = Collector(fleet, policy, seed=0).collect(4)
    assert rollouts[0].observations.tolist()[1:] == ["step 1", "step 2", "step 3"]
    assert rollouts[0].actions.tolist() == ["hel", "ste", "ste"] and rollouts[0].episode_return == 9.0
    rollouts.save(tmp_path)
    assert Rollouts.load(tmp_path).digest() == rollouts.digest()


class Masked(Counting):
    """Only one action is allowed, and it changes."""

    envfleet_columns = {"action_mask": spaces.MultiBinary(2)}  # noqa: RUF012

    def reset(self, **kwargs):
        obs, _ = super().reset(**kwargs)
        return obs, {"action_mask": np.array([1, 0], np.int8)}

    def step(self, action):
        assert int(action) == self.count % 2
        obs, reward, terminated, truncated, _ = super().step(action)
        mask = np.eye(2, dtype=np.int8)[self.count % 2]
        return obs, reward, terminated, truncated, {"action_mask": mask}


def test_declared_columns_reach_the_policy_and_the_record():
    with ef.make(Masked, num_envs=3, backend="serial") as fleet:
        rollouts = Collector(fleet, random_actions=True, seed=0).collect(5)
        segment = Collector(fleet, random_actions=True, seed=0).segment(12)
    assert all(r.extras["action_mask"].argmax(axis=1).tolist() == [0, 1, 0, 1, 0] for r in rollouts)
    assert np.array_equal(segment.columns["action_mask"].argmax(axis=2), segment.obs[:, :, 0].astype(int) % 2)
    assert segment.bootstrap_columns["action_mask"].shape == (3, 2)


def test_warm_up_acts_at_random_then_the_policy():
    with ef.make(lambda: Counting(limit=5), num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, Frozen2(), seed=0, warmup_steps=8)
        rollouts = collector.collect(4)
    versions = [r.policy_version.tolist() for r in rollouts]
    assert versions == [[-1, -1, -1, -1, 3]] * 2 + [[3] * 5] * 2


class Frozen2:
    version = 3

    def __call__(self, obs):
        return np.ones(len(obs), np.int64)


def test_policy_version_is_read_at_every_call():
    class Learning:
        version = 0

        def __call__(self, obs):
            self.version += 1
            return np.zeros(len(obs), np.int64)

    with ef.make(lambda: Counting(limit=4), num_envs=1, backend="serial") as fleet:
        (rollout,) = Collector(fleet, Learning()).collect(1)
    assert rollout.policy_version.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["sync", "overlap", "async"])
@pytest.mark.parametrize(
    "policy, text",
    [
        (lambda obs: 1 / 0, "ZeroDivisionError"),
        (lambda obs: None, "returned None"),
        (lambda obs: np.full(len(obs), 9), "returned np.int64(9), which is not in the action space Discrete(2)"),
        (lambda obs: np.zeros(1 + len(obs), np.int64), "asked for"),
        (lambda obs: np.zeros(len(obs)), "needs integers"),
        (lambda obs: Answer(np.zeros(len(obs), np.int64), {"value": np.zeros(1 + len(obs))}), "extra 'value'"),
    ],
)
def test_a_wrong_policy_is_named_with_slot_step_and_value(mode, policy, text):
    with ef.make(Counting, num_envs=4, backend="thread", num_workers=2) as fleet:

        def late(obs):
            return np.zeros(len(obs), np.int64) if (obs[:, 0] < 2).any() else policy(obs)

        collector = Collector(fleet, late, mode=mode)
        with pytest.raises(AgentFailed) as caught:
            collector.collect(10)
        assert text in str(caught.value) and "slot" in str(caught.value) and caught.value.step >= 2
        assert collector.ledger.in_flight == 0
        collector.policy = lambda obs: np.zeros(len(obs), np.int64)
        assert len(collector.collect(6)) == 6  # the fleet is whole


def test_wrong_arguments_of_a_collector_are_refused():
    with ef.make(Counting, num_envs=2, backend="serial") as fleet:
        for wrong, text in [
            ({}, "give a policy"),
            ({"policy": 3}, "callable"),
            ({"random_actions": True, "mode": "fast"}, "mode='fast'"),
            ({"random_actions": True, "max_steps": 0}, "max_steps"),
            ({"random_actions": True, "tasks": []}, "tasks"),
        ]:
            with pytest.raises(BadArgument, match=text):
                Collector(fleet, **wrong)
        collector = Collector(fleet, random_actions=True)
        with pytest.raises(BadArgument, match="say how many"):
            collector.episodes()
        with pytest.raises(BadArgument, match="order"):
            collector.episodes(3, order="random")


def test_raising_fleets_raise_and_the_ledger_still_balances():
    class Breaks(Counting):
        def step(self, action):
            if self.count == 3:
                raise RuntimeError("snap")
            return super().step(action)

    with ef.make([Counting, Breaks, Counting], backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True)
        with pytest.raises(FaultError, match="snap"):
            collector.collect(9)
        assert collector.ledger.failed == {"failed in step": 1} and collector.ledger.in_flight == 0


FAULT_SETTINGS = [
    pytest.param(backend, workers, mode, marks=() if mode == quick else pytest.mark.full)
    for backend, workers, quick in [
        ("serial", None, "sync"),
        ("thread", 2, "overlap"),
        ("aio", 2, "async"),
        ("pipe", 2, "sync"),
        ("shm", 2, "async"),
    ]
    for mode in ("sync", "async", "overlap")
]


@pytest.mark.parametrize("backend, num_workers, mode", FAULT_SETTINGS)
def test_ledger_balances_under_faults_and_retries_give_the_same_episodes(backend, num_workers, mode):
    expected, _ = collect(30)
    options = {"backend": backend, "num_workers": num_workers, "on_fault": "restart", "max_restarts": 1000}
    with ef.make(Fragile, num_envs=6, **options) as fleet:
        collector = Collector(fleet, Frozen(), seed=11, mode=mode, max_retries=50)
        seen = []
        rollouts = Rollouts()
        for rollout in collector.episodes(30):
            rollouts.append(rollout)
            ledger = collector.ledger
            seen.append(ledger.started == ledger.used + ledger.dropped.total() + ledger.failed.total() + ledger.in_flight)
            assert ledger.in_flight >= 0
        ledger = collector.ledger
        assert all(seen) and ledger.used == 30 and ledger.in_flight == 0
        assert ledger.failed.total() == len(fleet.faults) == ledger.retried > 0
        assert rollouts.digest() == expected.digest()  # begun again with the same seed: nothing is biased


def test_what_fails_for_good_is_missing_with_a_warning_or_yielded_on_request():
    def make():
        envs = [Walk, Walk, lambda: Fragile(1.0), Walk]
        return ef.make(envs, backend="serial", on_fault="restart", max_restarts=10**6)

    with make() as fleet, pytest.warns(LedgerWarning, match="2 episodes failed"):
        collector = Collector(fleet, Frozen(), seed=11, max_retries=1)
        rollouts = collector.collect(8)
        assert [r.episode for r in rollouts] == [0, 1, 3, 4, 5, 7]
        ledger = collector.ledger
        assert ledger.started == 10 and ledger.used == 6 and ledger.failed.total() == 4 and ledger.lost == 2
    with make() as fleet, pytest.warns(LedgerWarning):
        collector = Collector(fleet, Frozen(), seed=11, max_retries=0)
        rollouts = Rollouts(collector.episodes(8, yield_failed=True))
        assert [r.failed for r in rollouts] == [i % 4 == 2 for i in range(8)]
        assert "snap" in str(rollouts[2].error) and collector.stats().num_failed == 2


def test_a_quarantined_slot_hands_its_tickets_on():
    expected, _ = collect(20, num_envs=4)
    envs = [Walk, Walk, lambda: Fragile(1.0), Walk]
    with ef.make(envs, backend="serial", on_fault="restart", max_restarts=1) as fleet:
        collector = Collector(fleet, Frozen(), seed=11, max_retries=5)
        rollouts = collector.collect(20)
        assert fleet.quarantined.tolist() == [2] and 2 not in {r.slot for r in rollouts}
        assert rollouts.digest() == expected.digest()
        assert collector.ledger.in_flight == 0 and collector.ledger.used == 20
        again = Collector(fleet, Frozen(), seed=11).collect(20)  # a slot that was gone before it began
        assert again.digest() == expected.digest()


def test_no_slot_left_is_an_error():
    with ef.make(lambda: Fragile(1.0), num_envs=2, backend="serial", on_fault="restart", max_restarts=0) as fleet:
        collector = Collector(fleet, Frozen())
        with pytest.raises(ef.FleetError, match="every slot is quarantined"):
            collector.collect(5)
        assert collector.ledger.in_flight == 0


def test_one_stream_at_a_time():
    with ef.make(Walk, num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, Frozen())
        stream = collector.episodes(5)
        next(stream)
        with pytest.raises(ef.FleetError, match="not finished"):
            collector.collect(1)
        with pytest.raises(ef.FleetError, match="not finished"):
            collector.segment(1)
        stream.close()
        assert len(collector.collect(3) + collector.collect(2)) == 5


class Endless(Counting):
    """Never ends, and fails after 20 steps."""

    def reset(self, **kwargs):
        self.left = 20
        return super().reset(**kwargs)

    def step(self, action):
        self.left -= 1
        if not self.left:
            raise ValueError("planted")
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


@pytest.mark.parametrize("mode, order", [("sync", "ticket"), ("async", "ticket"), ("sync", "finish")])
def test_a_lost_slot_far_behind_does_not_end_the_collection(mode, order):
    with ef.make([Endless, Counting], backend="serial", on_fault="restart") as fleet:
        collector = Collector(fleet, random_actions=True, seed=0, max_ahead=2, max_retries=5, mode=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LedgerWarning)
            got = [rollout.episode for rollout in collector.episodes(40, order=order)]
    assert sorted(got) == list(range(40))
    assert not collector.ledger.dropped


class _Extras:
    def __init__(self, *values):
        self.values = list(values)

    def act(self, ask):
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        actions = np.zeros(len(ask), np.int64)
        return actions if value is None else (actions, {"logp": np.broadcast_to(value, (len(ask), *np.shape(value)))})


@pytest.mark.parametrize("values", [(1, 0.5), (0.5, None), (None, 0.5), (0.5, np.zeros(2))])
@pytest.mark.parametrize("what", ["episodes", "segment"])
def test_extras_stay_what_they_were_in_the_first_answer(values, what):
    with ef.make(Counting, 2, backend="serial") as fleet:
        collector = Collector(fleet, _Extras(*values), seed=0)
        with pytest.raises(AgentFailed, match=r"extras were .* and are .* now"):
            collector.collect(3) if what == "episodes" else collector.segment(8)


class FailsFirstReset(Counting):
    has_failed = False

    def reset(self, *, seed=None, options=None):
        if options and options.get("task") == 1 and not FailsFirstReset.has_failed:
            FailsFirstReset.has_failed = True
            raise ValueError("planted")
        return super().reset(seed=seed)


def test_an_episode_whose_reset_failed_has_no_observation():
    FailsFirstReset.has_failed = False
    with ef.make(FailsFirstReset, 1, backend="serial", on_fault="restart", on_end="wait") as fleet:
        collector = Collector(fleet, random_actions=True, seed=0, tasks=[0, 1, 0], max_retries=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LedgerWarning)
            failed = [rollout for rollout in collector.episodes(3, yield_failed=True) if rollout.error is not None]
    assert [rollout.task for rollout in failed] == [1]
    assert len(failed[0].observations) == len(failed[0].rewards) == 0
