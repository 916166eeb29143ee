import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Mixed, Tasked
from envfleet.errors import AgentFailed, BadArgument, EnvFailed, NotPicklable, RolloutError, SpacesDiffer
from envfleet.native.library import is_built
from envfleet.rollout import Collector, FragmentCollector, RandomPolicy
from envfleet.tasks import TaskSource
from envfleet.util.seeding import episode_seed
from envfleet.util.trees import tree_leaves
from tests.chaos.inside import worker_pids
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
        (fault,) = fragments.fleet.faults
        assert fault.kind == "timeout" and fragments.ledger.in_flight == 1
        assert "last actions: <fragment 1 of 6 steps>" in str(fault)  # and not the bytes of the policy


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


def interrupted_at(line, call, module="fragment_collector.py"):
    """Call, and press Ctrl-C before a line of a module; whether there were so many."""
    left = line

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.endswith(module):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class Books:
    """What the caller of a run of `Walk` has got: every row must be that of its slot, episode and step, and come once."""

    def __init__(self, seed):
        self.seed, self.seen, self.used = seed, set(), 0

    def add(self, segment):
        for t, b in np.argwhere(segment.scored).tolist():
            key = b, int(segment.episode[t, b]), int(segment.step[t, b])
            last = observations(self.seed, *key[:2])
            assert np.array_equal(segment.obs[t, b], last[key[2]]) and segment.ended[t, b] == (key[2] == len(last) - 2), key
            assert key not in self.seen and (key[2] == 0 or (b, key[1], key[2] - 1) in self.seen), key
            self.seen.add(key)
        self.used += int(segment.scored[tuple(segment.end_index.T)].sum())


@functools.cache
def observations(seed, slot, episode):
    """All that an episode of `Walk` shows."""
    env = Walk()
    shown, over = [env.reset(seed=episode_seed(seed, "segment", slot, episode))[0]], False
    while not over:
        obs, _, terminated, truncated, _ = env.step(0)
        shown.append(obs)
        over = terminated or truncated
    return shown


def test_an_interrupt_at_any_line_leaves_right_rows_and_a_right_ledger():
    with FragmentCollector(Walk, Frozen(), 5, backend="pipe", num_workers=2, seed=4) as fragments:
        books, line, reached = Books(4), 0, True
        books.add(fragments.segment(7))
        while reached:
            line += 1
            reached = interrupted_at(line, lambda: books.add(fragments.segment(5)))
            segment = fragments.segment(1 + line % 9)
            books.add(segment)
            ledger = fragments.ledger
            assert segment.scored.all() and ledger.used == books.used and ledger.in_flight == 5, line
    assert line > 50


def test_an_interrupt_at_any_line_of_a_segment_leaves_right_rows_and_a_balanced_ledger():
    """The same for the loop that workers and a `Collector` share."""
    with ef.make(Walk, 3, backend="serial") as fleet:
        collector = Collector(fleet, Frozen(), seed=4)
        books, line, reached = Books(4), 0, True
        while reached:
            line += 1
            reached = interrupted_at(line, lambda: books.add(collector.segment(4)), "collect_segments.py")
            assert collector.ledger.in_flight in (0, 3), line
            books.add(collector.segment(1 + line % 9))
            assert collector.ledger.in_flight == 3, line
    assert line > 100


def test_interrupts_and_losses_at_random_moments_leave_right_rows_and_a_right_ledger():
    dice = random.Random(5)

    def attack():
        pids = list(worker_pids(fragments.fleet).values())
        if pids and dice.random() < 0.3:
            os.kill(dice.choice(pids), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(number, frame):
        """Ctrl-C, if the call that runs has not made up its mind to return."""
        while frame is not None:
            if frame.f_code is FragmentCollector.segment.__code__ and fragments._is_open:
                raise KeyboardInterrupt
            frame = frame.f_back

    old = signal.signal(signal.SIGINT, interrupt)
    try:
        with FragmentCollector(Walk, Frozen(), 7, backend="pipe", num_workers=3, seed=7) as fragments:
            books = Books(7)
            for number in range(60):
                timer = threading.Timer(dice.random() * 0.02, attack)
                timer.start()
                try:
                    books.add(fragments.segment(dice.randint(1, 40)))
                except (KeyboardInterrupt, RolloutError):  # or all three workers were lost
                    pass
                timer.join()
                if number % 3 == 0:
                    books.add(fragments.segment(4))
                    assert fragments.ledger.used == books.used
            for _ in range(2):
                books.add(fragments.segment(4))
            assert fragments.ledger.used == books.used and fragments.ledger.in_flight == 7
    finally:
        signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize(("fatal", "returned"), [(1, [False, True, True, True]), (11, [True, False, False, True])])
def test_an_episode_that_ends_its_process_is_not_begun_again_and_again(fatal, returned):
    """A seed or a task may be fatal. Wherever in a segment it is: a process or two are lost by it, and never the slots."""

    class Fatal(Tasked):
        def step(self, action):
            if self.task == fatal:  # of slot 1: the first episode, or one in the middle of a segment
                os.kill(os.getpid(), 9)
            return super().step(action)

    with FragmentCollector(Fatal, None, 2, random_actions=True, num_workers=2, tasks=lambda number: number) as fragments:
        assert [bool(fragments.segment(steps).scored[:, 1].all()) for steps in (2, 64, 64, 64)] == returned
        assert not len(fragments.fleet.quarantined)


def test_episodes_of_a_segment_that_nobody_got_are_not_used():
    class Stops:
        """Raises at its step number 20."""

        left = 20

        def act(self, ask):
            self.left -= 1
            if not self.left:
                raise RuntimeError("planted")
            return np.zeros(len(ask), int)

    with (
        ef.make(Walk, 4, backend="serial") as fleet,
        FragmentCollector(Walk, Stops(), 4, backend="serial", num_workers=2, seed=2) as fragments,
    ):
        for collector in (Collector(fleet, Stops(), seed=2), fragments):
            segment = collector.segment(9)
            with pytest.raises(AgentFailed, match="planted"):
                collector.segment(16)
            collector.policy = Frozen()
            ledger = [collector.segment(1), collector.ledger][1]
            assert 0 <= ledger.used - len(segment.end_index) <= 4 and ledger.in_flight == 4
            assert ledger.dropped["ended in a segment that was left"] > 0


def test_faults_of_a_call_that_did_not_return_are_told_later_and_once(monkeypatch):
    class FailsOnce(Walk):
        failed = False

        def step(self, action):
            if not FailsOnce.failed:
                FailsOnce.failed = True
                raise RuntimeError("planted")
            return super().step(action)

    with FragmentCollector([Walk, Walk, Walk, FailsOnce], Frozen(), backend="serial", num_workers=2, seed=2) as fragments:
        receive = fragments.fleet.recv
        with monkeypatch.context() as patch:
            patch.setattr(fragments.fleet, "recv", lambda: receive() and (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                fragments.segment(5)
        for _ in range(2):
            fragments.segment(5)
            assert [(fault.slot, fault.worker) for fault in fragments.faults] == [(3, 1)]


def test_slots_that_are_gone_stop_a_run_only_when_they_are_all():
    """Some by lost workers, some by quarantine in a worker: without the sum, segments without a row would come forever."""

    class Fails(Walk):
        def step(self, action):
            raise RuntimeError("planted")

    class Dies(Walk):
        def step(self, action):
            os.kill(os.getpid(), 9)

    with FragmentCollector([Dies, Fails], Frozen(), backend="pipe", num_workers=2, max_restarts=1) as fragments:
        with pytest.raises(RolloutError, match="every slot is quarantined"):
            for _ in range(9):
                assert not fragments.segment(6).scored.any()


def test_a_slot_that_was_quarantined_has_no_end_when_its_worker_is_lost():
    class Fails(Walk):
        def step(self, action):
            raise RuntimeError("planted")

    with FragmentCollector([Walk, Fails, Walk], Frozen(), backend="pipe", num_workers=2, max_restarts=0) as fragments:
        assert fragments.segment(4).scored.all(axis=0).tolist() == [True, False, True]
        os.kill(worker_pids(fragments.fleet)[0], signal.SIGKILL)
        segment = fragments.segment(4)
        assert segment.truncated[0, :2].tolist() == [True, False] and not segment.scored[:, :2].any()
        assert fragments.ledger.failed["lost in idle"] + fragments.ledger.failed["lost in step"] == 1


def test_a_policy_of_another_kind_takes_nothing_over():
    torch = pytest.importorskip("torch")
    from envfleet.networks.actor_critic import ActorCritic, NetworkConfig
    from envfleet.networks.network_policy import Policy
    from envfleet.networks.team import TeamPolicy

    one = gym.make("CartPole-v1")
    policies = [lambda obs: np.zeros(len(obs), int)]
    for size in (8, 4):
        torch.manual_seed(0)
        net = ActorCritic(one.observation_space, one.action_space, NetworkConfig("memory", state_size=size))
        policies.append(Policy(net, 4, None))
    with FragmentCollector("CartPole-v1", policies[0], 4, backend="serial", num_workers=2) as fragments:
        for policy in [*policies, policies[0]]:
            fragments.policy = policy
            assert fragments.segment(5).scored.all()
    with pytest.raises(BadArgument, match="past policies do not travel"):
        TeamPolicy([], {}, object()).arrive(np.random.default_rng(0), None)


def test_a_policy_that_exits_is_an_error_of_the_caller_and_no_loss():
    with FragmentCollector(Walk, lambda obs: sys.exit("planted"), 4, backend="pipe", num_workers=2) as fragments:
        for _ in range(5):
            with pytest.raises(SystemExit, match="planted"):
                fragments.segment(3)
        fragments.policy = Frozen()
        assert fragments.segment(3).scored.all() and not fragments.fleet.faults


def test_the_environments_of_all_workers_have_the_same_spaces():
    class Wide(Walk):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    class Bounded(Walk):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(-99, 99, (3,), np.float64)

    for other in (Wide, Bounded):
        with pytest.raises(SpacesDiffer, match=r"slot 1 has observation_space Box.*but slot 0 has"):
            FragmentCollector([Walk, other], Frozen(), backend="serial", num_workers=2)
    with FragmentCollector([Walk, Bounded], Frozen(), backend="serial", num_workers=2, observation_mode="different") as fragments:
        assert fragments.segment(4).scored.all()


def test_a_constructor_that_fails_says_its_slot_and_its_reason():
    def broken():
        raise ValueError("planted")

    envs = [Walk, Walk, Walk, broken]
    with pytest.raises(EnvFailed, match=r"slot 3 failed in init .*planted") as caught:
        FragmentCollector(envs, Frozen(), backend="pipe", num_workers=2, on_fault="raise")
    assert isinstance(caught.value.__cause__, ValueError)
    with FragmentCollector(envs, Frozen(), backend="pipe", num_workers=2) as fragments:  # its slot alone
        assert fragments.segment(4).scored[:, :3].all()


def test_the_limit_of_a_constructor_is_that_of_one_environment():
    class Slow(Walk):
        def __init__(self):
            super().__init__()
            time.sleep(0.4)

    with FragmentCollector(Slow, Frozen(), 4, backend="pipe", num_workers=1, init_timeout_s=1.0) as fragments:
        assert fragments.segment(4).scored.all()


def test_the_value_of_a_task_is_the_callers_own():
    with FragmentCollector(Walk, Frozen(), 1, backend="serial", num_workers=1, tasks=[[5]]) as fragments:
        segment = fragments.segment(2)
        fragments.task_value(segment.task[0, 0]).append(6)
        assert fragments.task_value(segment.task[0, 0]) == [5]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "auto"}, "backend='auto': choose one of 'pipe'"),
        ({"backend": "aio"}, "backend='aio': choose"),
        ({"worker_backend": "pipe"}, "worker_backend='pipe': choose one of 'serial', 'native'"),
        ({"on_end": "wait"}, "on_end does not go with whole segments"),
        ({"step_timeout_s": 3}, "step_timeout_s does not go.*fragment_timeout_s"),
        ({"fragment_timeout_s": 0}, "fragment_timeout_s=0"),
        ({"fragment_timeout_s": "9"}, "fragment_timeout_s='9'"),
        ({"policy": 3}, "must be callable or have act"),
        ({"env": [Walk, Walk], "num_envs": 3}, "num_envs=3, but the list has 2"),
        ({"env": "gymnax:CartPole-v1"}, "a batch engine or a server"),
        ({"env": "http://127.0.0.1:9"}, "a batch engine or a server"),
        ({"env": Walk, "env_kwargs": {"slow": True}}, "env_kwargs only go with"),
        ({"env": "Blackjack-v1", "worker_backend": "native"}, "no native version"),
        ({"max_steps": 0}, "max_steps=0: give a whole number from 1 up"),
        ({"max_steps": "9"}, "max_steps='9': give a whole number from 1 up"),
        ({"tasks": 5}, "tasks must be a callable"),
        ({"on_fault": "perhaps"}, "on_fault='perhaps': choose"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(given, words):
    with pytest.raises(BadArgument, match=words):
        FragmentCollector(
            **{"env": "CartPole-v1", "policy": Frozen(), "num_envs": 2, "backend": "serial", "num_workers": 1, **given}
        )


def test_steps_and_policies_that_are_refused_cost_nothing():
    with FragmentCollector(Walk, Frozen(), 2, backend="serial", num_workers=1, seed=2) as fragments:
        books = Books(2)
        books.add(fragments.segment(3))
        for steps in (2.5, "3", True, None):
            with pytest.raises(BadArgument, match=r"num_steps=.*whole number"):
                fragments.segment(steps)
        fragments.policy = None
        with pytest.raises(BadArgument, match="must be callable"):
            fragments.segment(3)
        fragments.policy = Frozen()
        books.add(fragments.segment(3))
        assert fragments.ledger.dropped.total() == 0


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_workers_of_one_process_share_no_object(backend):
    shared = Walk()
    with FragmentCollector(lambda: shared, Frozen(), 2, backend=backend, num_workers=2, seed=2) as fragments:
        books = Books(2)
        for _ in range(3):
            books.add(fragments.segment(9))
