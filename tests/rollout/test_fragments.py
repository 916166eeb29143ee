import os
import tempfile

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Mixed, Tasked
from envfleet.errors import AgentFailed, BadArgument, EnvFailed, NotPicklable, RolloutError
from envfleet.native.library import is_built
from envfleet.rollout import Collector, FragmentCollector, RandomPolicy
from envfleet.tasks import TaskSource
from envfleet.util.trees import tree_leaves
from tests.support.rollout_envs import Frozen, KillsItself, StuckAtThree, Walk

ARRAYS = ("obs", "action", "reward", "terminated", "truncated", "scored", "bootstrap_obs", "episode", "step", "policy_version", "slots",
          "end_index", "final_obs", "end_return", "end_length", "extras", "columns", "bootstrap_columns")  # fmt: skip
OF_AGENTS = ("acted", "agent_step", "agent_reward", "agent_terminated", "agent_truncated", "agent_scored", "bootstrap_active",
             "end_returns", "fate_index", "fate_obs")  # fmt: skip


def assert_equal(one, other):
    """Every array of two segments, to the bit."""
    for name in ARRAYS + (OF_AGENTS if hasattr(one, "acted") else ()):
        mine, theirs = dict(tree_leaves(getattr(one, name), name)), dict(tree_leaves(getattr(other, name), name))
        assert list(mine) == list(theirs)
        for path, leaf in mine.items():
            assert leaf.dtype == theirs[path].dtype and np.array_equal(leaf, theirs[path]), path


def compare(env, policy, num_envs, num_workers, *, backend="serial", count=3, num_steps=17, fleet_options=None, **options):
    """Fragments and ordinary segments, side by side."""
    with (
        ef.make(env, num_envs, backend="serial", **(fleet_options or {})) as fleet,
        FragmentCollector(
            env, policy, num_envs, backend=backend, num_workers=num_workers, seed=2, **options, **(fleet_options or {})
        ) as fragments,
    ):
        collector = Collector(
            fleet,
            policy,
            seed=2,
            random_actions=policy is None,
            **{k: options[k] for k in ("tasks", "max_steps") if k in options},
        )
        for _ in range(count):
            ours, theirs = fragments.segment(num_steps), collector.segment(num_steps)
            assert_equal(ours, theirs)
            values = [[fragments.task_value(task) for task in row] for row in ours.task.tolist()]
            assert values == [[fleet.task_value(task) for task in row] for row in theirs.task.tolist()]
        assert fragments.ledger == collector.ledger
        assert [*fragments.stats().env_breakdown.values()] == [*collector.stats().env_breakdown.values()]
        return fragments


@pytest.mark.parametrize(
    ("backend", "num_workers"), [("serial", 1), ("serial", 2), ("thread", 5), ("pipe", 2), ("shm", 3)], ids=str
)
def test_fragments_are_the_segments_of_a_collector(backend, num_workers):
    compare(Walk, Frozen(), 5, num_workers, backend=backend)


@pytest.mark.parametrize("worker_backend", ["serial", "native"])
def test_what_random_actions_tasks_and_limits_depend_on_is_the_slot_of_the_run(worker_backend):
    if worker_backend == "native" and not is_built():
        pytest.skip("the native environments are not built")
    compare("CartPole-v1", None, 6, 2, random_actions=True, worker_backend=worker_backend, max_steps=11)


def test_tasks_go_by_number_and_keep_their_values():
    compare(Tasked, None, 5, 2, random_actions=True, tasks=[1, 2, 3, 4, 5, 6, 7])


def test_nested_observations_and_columns():
    compare(Mixed, None, 3, 2, random_actions=True)
    compare(Walk, Frozen(), 4, 3, fleet_options={"columns": {"limit": gym.spaces.Box(0, 99, (), np.int64)}})


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_agents(num_workers):
    from tests.support.agent_envs import Clock, Crowd

    for env in (Clock, Crowd):
        compare(env, FirstAction(), 5, num_workers)


class FirstAction:
    def act(self, ask):
        seen = ask.obs if isinstance(ask.obs, np.ndarray) else next(iter(ask.obs.values()))
        return ((seen[..., 0] > 0.4) * ask.columns["active"]).astype(np.int64)


def test_a_network_with_memory_goes_on_from_copy_to_copy():
    """The policy is replaced by another copy between segments: what it remembers of running episodes stays in the worker."""
    torch = pytest.importorskip("torch")
    from envfleet.networks.actor_critic import ActorCritic, NetworkConfig
    from envfleet.networks.network_policy import Policy

    torch.manual_seed(0)
    make = gym.make("CartPole-v1")
    net = ActorCritic(make.observation_space, make.action_space, NetworkConfig(arch="memory", hidden=(8,)))
    policy = Policy(net, 4, None)  # always the most likely action
    with (
        ef.make("CartPole-v1", 4, backend="serial") as fleet,
        FragmentCollector("CartPole-v1", policy, 4, backend="pipe", num_workers=2, seed=1) as fragments,
    ):
        collector = Collector(fleet, policy.fork(4, None), seed=1)
        for _ in range(4):
            assert_equal(fragments.segment(7), collector.segment(7))
            policy.version = collector.policy.version = policy.version + 1  # another copy travels
            with torch.no_grad():
                net.actor_head.bias += 0.05


def test_copies_draw_different_numbers():
    """A policy with random numbers of its own has others in each worker, and others in the next copy."""

    class Drawing:
        version = 0

        def __init__(self):
            self.rng = np.random.default_rng(0)

        def arrive(self, rng, before):
            self.rng = rng

        def act(self, ask):
            return self.rng.integers(2, size=len(ask))

    with FragmentCollector("CartPole-v1", Drawing(), 2, backend="serial", num_workers=2) as fragments:
        first = fragments.segment(64).action
        fragments.policy.version = 1
        second = fragments.segment(64).action
    draws = [first[:, 0], first[:, 1], second[:, 0], second[:, 1]]
    assert len({draw.tobytes() for draw in draws}) == 4


@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_a_lost_worker_costs_its_own_rows(tmp_path, backend):
    """The other workers' rows are those of a run without the loss; the lost slots begin their next episodes."""
    envs = [Walk, Walk, lambda: KillsItself(str(tmp_path / "done"), at=20), Walk, Walk]
    with (
        FragmentCollector(envs, Frozen(), backend=backend, num_workers=2, seed=2) as fragments,
        FragmentCollector(Walk, Frozen(), 5, backend="serial", num_workers=2, seed=2) as without,
    ):
        ran = None
        for number in range(4):
            segment, good = fragments.segment(12), without.segment(12)
            for name in ("obs", "action", "reward", "terminated", "truncated", "scored", "episode", "step"):
                assert np.array_equal(getattr(segment, name)[:, 3:], getattr(good, name)[:, 3:]), name
            if number == 0:
                assert segment.scored.all()
                ran = segment.episode[-1, :3] + (segment.ended[-1, :3])
            elif number == 1:
                assert not segment.scored[:, :3].any() and segment.truncated[0, :3].all() and not segment.ended[1:, :3].any()
                assert (segment.step[:, :3] == -1).all() and np.isfinite(segment.obs).all()
                assert segment.end_index.tolist() == sorted(segment.end_index.tolist())
            elif number == 2:
                assert segment.scored.all()
                assert (segment.episode[0, :3] == ran + 1).all() and (segment.step[0] == 0)[:3].all()
            assert fragments.ledger.in_flight == (2 if number == 1 else 5)
        assert fragments.ledger.failed == {"lost in step": 3}
        assert [fault.slot for fault in fragments.fleet.faults] == [0]


def test_an_environment_that_fails_costs_its_own_slot():
    class FailsOnce(Walk):
        failed = False

        def step(self, action):
            if not FailsOnce.failed:
                FailsOnce.failed = True
                raise RuntimeError("planted")
            return super().step(action)

    with FragmentCollector([Walk, Walk, Walk, FailsOnce], Frozen(), backend="serial", num_workers=2, seed=2) as fragments:
        segment = fragments.segment(9)
        assert np.argwhere(~segment.scored).tolist() == [[0, 3]]
        (fault,) = fragments.faults
        assert fault.slot == 3 and "planted" in fault.cause
        assert fragments.ledger.failed.total() == 1


def test_errors_say_the_slot_of_the_run_and_end_nothing():
    class Fails(Walk):
        def step(self, action):
            raise RuntimeError("planted")

    with FragmentCollector([Walk, Walk, Fails], Frozen(), backend="pipe", num_workers=2, seed=2, on_fault="raise") as fragments:
        with pytest.raises(EnvFailed, match=r"slot 2 failed in step .*planted"):
            fragments.segment(4)

    def wrong(obs):
        return np.full(len(obs), 7)

    with FragmentCollector(Walk, wrong, 4, backend="pipe", num_workers=2, seed=2) as fragments:
        with pytest.raises(AgentFailed, match=r"slot 0, episode 0.*7.*not in the action space"):
            fragments.segment(4)
        fragments.policy = Frozen()
        segment = fragments.segment(4)  # the workers are there, and begin their next episodes
        assert segment.scored.all() and (segment.step[0] == 0).all()


def test_a_worker_without_a_slot_that_works_stops_nobody_else():
    class Fails(Walk):
        def step(self, action):
            raise RuntimeError("planted")

    with FragmentCollector([Walk, Walk, Fails], Frozen(), backend="pipe", num_workers=2, max_restarts=1) as fragments:
        for _ in range(2):
            segment = fragments.segment(6)
            assert segment.scored[:, :2].all() and not segment.scored[:, 2].any()
    with FragmentCollector(Fails, Frozen(), 2, backend="pipe", num_workers=2, max_restarts=1) as fragments:
        with pytest.raises(RolloutError, match=r"every slot is quarantined.*planted"):
            for _ in range(4):
                fragments.segment(6)


def test_workers_that_are_all_lost_are_an_error():
    class Dies(Walk):
        def step(self, action):
            os.kill(os.getpid(), 9)

    with FragmentCollector(Dies, Frozen(), 2, backend="pipe", num_workers=2) as fragments:
        with pytest.raises(RolloutError, match="every worker was lost"):
            fragments.segment(4)


def test_an_interrupt_leaves_a_collector_that_goes_on(monkeypatch):
    with FragmentCollector(Walk, Frozen(), 4, backend="pipe", num_workers=2, seed=2) as fragments:
        first = fragments.segment(5)
        receive = fragments.fleet.recv
        with monkeypatch.context() as patch:
            patch.setattr(fragments.fleet, "recv", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                fragments.segment(5)
        assert fragments.fleet.recv == receive
        segment = fragments.segment(5)
        assert segment.scored.all() and (segment.step[0] == 0).all() and (segment.episode[0] > first.episode[-1]).all()
        ledger = fragments.ledger
        assert ledger.in_flight == 4 and ledger.dropped["running when segments were left"] == 4


def test_a_worker_that_hangs_is_ended_at_the_deadline(tmp_path):
    envs = [Walk, lambda: StuckAtThree()]
    with FragmentCollector(envs, Frozen(), backend="pipe", num_workers=2, fragment_timeout_s=1.0) as fragments:
        segment = fragments.segment(6)
        assert segment.scored[:, 0].all() and not segment.scored[:, 1].any()
        assert fragments.fleet.faults[0].kind == "timeout" and fragments.ledger.in_flight == 1


def test_a_worker_that_is_lost_in_a_call_that_fails_is_counted():
    """Nothing of the call is returned; what ran in the lost worker has failed all the same."""

    class DiesOnce(KillsItself):
        pass

    with tempfile.TemporaryDirectory() as folder:
        envs = [Walk, lambda: DiesOnce(f"{folder}/done", at=9)]
        with FragmentCollector(envs, Frozen(), backend="pipe", num_workers=2, seed=2) as fragments:
            fragments.segment(5)
            fragments.policy = lambda obs: np.zeros(len(obs), int) if os.path.exists(f"{folder}/done") else [0] * len(obs)
            receive = fragments.fleet.recv
            fragments.fleet.recv = lambda: receive() and (_ for _ in ()).throw(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                fragments.segment(12)
            del fragments.fleet.recv
            segment = fragments.segment(5)
            assert segment.scored.all() and (segment.step[0] == 0).all() and (segment.episode[0] > 0).all()
            ledger = fragments.ledger
            assert ledger.in_flight == 2 and ledger.failed == {"lost": 1}
            assert ledger.dropped["running when segments were left"] == 1


def test_what_is_refused():
    with pytest.raises(BadArgument, match="give a policy"):
        FragmentCollector("CartPole-v1", num_envs=2)
    with pytest.raises(BadArgument, match="TaskSource decides in the parent"):
        FragmentCollector(Tasked, None, 2, random_actions=True, tasks=TaskSource([1, 2]))
    with pytest.raises(BadArgument, match="num_wrkers"):
        FragmentCollector("CartPole-v1", RandomPolicy(gym.spaces.Discrete(2)), 2, num_wrkers=1)
    for wrong in ({"num_workers": 0}, {"num_envs": 0}, {"num_envs": "8"}):
        with pytest.raises(BadArgument, match=f"{next(iter(wrong))}=.*from 1 up"):
            FragmentCollector("CartPole-v1", None, random_actions=True, **wrong)
    with FragmentCollector("CartPole-v1", None, 2, random_actions=True, backend="serial", num_workers=1) as fragments:
        for wrong in (0, "3", True):
            with pytest.raises(BadArgument, match=f"num_steps={wrong!r}"):
                fragments.segment(wrong)
        lock = __import__("threading").Lock()
        fragments.policy = lambda obs: lock
        with pytest.raises(NotPicklable, match="the policy"):
            fragments.segment(1)
