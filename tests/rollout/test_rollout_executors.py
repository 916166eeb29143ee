import asyncio
import random
import signal
import threading
import time

import numpy as np
import pytest

from envfleet.errors import BadArgument, FleetClosed
from envfleet.rollout import (
    AgentFailed,
    AsyncParallelExecutor,
    ClientFailed,
    ParallelEnvironmentExecutor,
    ParallelRolloutCollector,
    ProcessParallelExecutor,
    RolloutsFailed,
    ThreadSafeAgent,
)
from tests.support.rollout_clients import AsyncClient, Counter, OldGym, OpenEnvStyle, our_threads, stay

KINDS = [Counter, OldGym, OpenEnvStyle, AsyncClient]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())  # tests of stuck environments leave threads that nobody can end
    yield
    new = [thread for thread in threading.enumerate() if thread.name.startswith("envfleet") and thread not in before]
    for thread in new:
        thread.join(5.0)
    assert [thread.name for thread in new if thread.is_alive()] == []


def collectors():
    return pytest.mark.parametrize("mode", ["thread", "async"])


@collectors()
@pytest.mark.parametrize("kind", KINDS)
def test_every_dialect_gives_the_same_record(mode, kind):
    with ParallelRolloutCollector(mode, max_workers=2) as collector:
        (rollout,) = collector.collect([kind(3)], stay, max_steps=10, env_names=["easy"])
    assert rollout.env_name == "easy" and rollout.error is None
    assert len(rollout) == rollout.episode_length == 3 and rollout.episode_return == 3.0
    assert [obs.tolist() for obs in rollout.observations] == [[0, 0], [1, 1], [2, 1], [3, 1]]  # no aliasing
    assert rollout.actions == [1, 1, 1] and rollout.dones.tolist() == [False, False, True]
    if kind is OldGym:
        assert rollout.truncated == [False, False, True] and rollout.terminated == [False] * 3
    else:
        assert rollout.terminated == [False, False, True] and rollout.truncated == [False] * 3
    assert len(rollout.step_latencies) == 3 and rollout.wall_s > 0


@collectors()
def test_submission_order_and_stats(mode):
    lengths = [9, 1, 5, 2, 7, 3]
    names = ["easy", "easy", "hard", "hard", "hard", "easy"]
    with ParallelRolloutCollector(execution_mode=mode, max_workers=3) as collector:
        clients = [Counter(n) for n in lengths]
        rollouts, stats = collector.collect_with_stats(clients, stay, max_steps=8, env_names=names)
        assert collector.executor.executor.shutdown(wait=True, timeout=10)
    assert [len(r) for r in rollouts] == [8, 1, 5, 2, 7, 3]
    assert rollouts[0].truncated[-1] and not rollouts[0].terminated[-1]  # cut by max_steps
    assert stats.total_steps == 26 and stats.num_episodes == 6
    assert stats.mean_return == pytest.approx(26 / 6) and stats.mean_length == pytest.approx(26 / 6)
    assert stats.env_breakdown == {"easy": 4.0, "hard": pytest.approx(14 / 3)}
    assert stats.per_env["hard"].count == 3 and stats.per_env["hard"].max_return == 7.0
    assert stats.wall_s > 0 and stats.latency_s["p50"] > 0
    assert "easy" in str(stats) and "step latency" in str(stats)


def test_rollouts_stream_as_they_complete():
    gate = threading.Event()

    class Slow(Counter):
        def step(self, action):
            assert gate.wait(20)
            return super().step(action)

    with ParallelEnvironmentExecutor(max_workers=2) as executor:
        stream = executor.iter_rollouts([Slow(1), Counter(1)], stay, env_names=["slow", "fast"])
        assert next(stream).env_name == "fast"
        gate.set()
        assert [r.env_name for r in stream] == ["slow"]


def test_leaving_the_stream_early_stops_the_others():
    clients = [Counter(10**9) for _ in range(3)] + [Counter(1)]
    with ParallelEnvironmentExecutor(max_workers=4) as executor:
        for rollout in executor.iter_rollouts(clients, stay, max_steps=10**9):
            assert rollout.episode == 3
            break
    assert all(client.t > 0 for client in clients)


def test_the_pool_can_be_used_directly():
    executor = ParallelEnvironmentExecutor(max_workers=2)
    futures = [executor.executor.submit(executor.collect_rollout, Counter(2), stay, 1000, f"temp_{t}") for t in (0.1, 0.7)]
    assert [f.result().env_name for f in futures] == ["temp_0.1", "temp_0.7"]
    executor.executor.shutdown(wait=True, timeout=10)
    assert executor.shutdown(wait=True, timeout_s=1.0) and executor.shutdown()
    with pytest.raises(FleetClosed):
        executor.collect_rollouts([Counter(1)], stay)


def test_dropping_the_executor_ends_its_threads():
    executor = ParallelEnvironmentExecutor(max_workers=3)
    executor.collect_rollouts([Counter(1) for _ in range(3)], stay)
    assert our_threads()
    del executor  # the fixture sees them go


def test_a_stuck_client_does_not_hold_shutdown():
    gate = threading.Event()

    class Stuck(Counter):
        def step(self, action):
            gate.wait(60)
            return super().step(action)

    executor = ParallelEnvironmentExecutor(max_workers=1)
    executor.executor.submit(executor.collect_rollout, Stuck(1), stay)
    begin = time.monotonic()
    assert executor.shutdown(wait=True, timeout_s=0.1) is False
    assert time.monotonic() - begin < 20
    gate.set()


@collectors()
def test_one_failure_loses_nobody(mode):
    clients = [Counter(3), Counter(3, fail_at=2), Counter(3)]
    with ParallelRolloutCollector(mode, max_workers=3) as collector, pytest.raises(RolloutsFailed) as caught:
        collector.collect(clients, stay, env_names=["a", "b", "c"])
    error = caught.value
    assert [len(r) for r in error.rollouts] == [3, 2, 3]
    (failed,) = error.failed
    assert isinstance(failed.error, ClientFailed) and isinstance(failed.error.__cause__, RuntimeError)
    assert failed.error.env_name == "b" and failed.error.step == 2 and failed.error.phase == "step"
    assert "'b', step at step 2" in str(error) and "the motor burnt out" in str(error)


@collectors()
def test_skip_counts_failures_and_averages_the_rest(mode):
    clients = [Counter(3), Counter(5, fail_at=4), Counter(3)]
    with ParallelRolloutCollector(mode, max_workers=3, on_error="skip") as collector:
        rollouts, stats = collector.collect_with_stats(clients, stay)
    assert [r.failed for r in rollouts] == [False, True, False] and len(rollouts[1]) == 4
    assert stats.num_episodes == 2 and stats.num_failed == 1 and stats.mean_return == 3.0
    assert stats.failures == {"RuntimeError": 1} and stats.failed_steps == 4 and stats.total_steps == 6


@collectors()
def test_retry_begins_again_and_gives_up_after_max_retries(mode):
    healing, broken = Counter(3, fail_at=1, fail_times=2), Counter(3, fail_at=1)
    built = []

    def factory():
        built.append(Counter(2, fail_at=0, fail_times=0 if built else 1))
        return built[-1]

    rules = {"on_error": "retry", "max_retries": 2, "backoff_s": 0.001, "jitter": 0.1}
    with ParallelRolloutCollector(mode, max_workers=3, **rules) as collector:
        rollouts = collector.collect([healing, broken, factory], stay, seeds=[7, 8, 9])
    assert [r.failed for r in rollouts] == [False, True, False]
    assert [r.attempts for r in rollouts] == [3, 3, 2]
    assert healing.resets == [(7, None)] * 3  # the same seed: the set asked for stays
    assert len(built) == 2 and all(client.closed for client in built)


def test_pauses_double_up_to_a_limit_and_jitter_spreads_them():
    from envfleet.rollout.executors.client_episode import Rules

    rules = Rules(on_error="retry", backoff_s=1.0, max_backoff_s=5.0, jitter=0.5)
    assert [rules.pause_s(n, draw=0.5) for n in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 5.0]
    assert rules.pause_s(1, draw=0.0) == 0.5 and rules.pause_s(1, draw=1.0) == 1.5


def bad_agent_raises(obs, done):
    raise KeyError("weights")


@collectors()
@pytest.mark.parametrize(
    "agent, text",
    [
        (bad_agent_raises, "KeyError: 'weights'"),
        (lambda obs, done: 17, "returned 17, which is not in the action space Discrete(4)"),
        (lambda obs, done: None, "returned None"),
    ],
)
def test_a_wrong_agent_is_named_with_env_step_and_value(mode, agent, text):
    def late(obs, done):
        return stay(obs, done) if obs[0] < 1 else agent(obs, done)

    rules = {"on_error": "retry", "backoff_s": 0.001, "max_retries": 1}
    with ParallelRolloutCollector(mode, max_workers=2, **rules) as collector:
        rollouts = collector.collect([Counter(5), Counter(5)], late, env_names=["left", "right"])
    for rollout in rollouts:
        assert isinstance(rollout.error, AgentFailed) and rollout.error.step == 1
        assert text in str(rollout.error) and rollout.env_name in str(rollout.error)
        assert len(rollout) == 1
        assert rollout.attempts == (2 if "KeyError" in text else 1)


def test_single_rollout_raises_with_its_partial_record():
    with ParallelEnvironmentExecutor() as executor, pytest.raises(ClientFailed) as caught:
        executor.collect_rollout(Counter(5, fail_at=3), stay, env_name="lab")
    assert len(caught.value.rollouts[0]) == 3


def test_arguments_are_checked_before_anything_starts():
    with ParallelEnvironmentExecutor() as executor:
        with pytest.raises(BadArgument, match="2 clients but 1 env_names"):
            executor.collect_rollouts([Counter(), Counter()], stay, env_names=["a"])
        with pytest.raises(BadArgument, match="not callable"):
            executor.collect_rollouts([Counter()], 3)
    with pytest.raises(BadArgument, match="on_error"):
        ParallelEnvironmentExecutor(on_error="ignore")
    with pytest.raises(BadArgument, match="execution_mode"):
        ParallelRolloutCollector("gpu")


@collectors()
def test_one_agent_per_client_and_async_agents(mode):
    async def slow(obs, done):
        await asyncio.sleep(0)
        return 3

    with ParallelRolloutCollector(mode, max_workers=2) as collector:
        rollouts = collector.collect([Counter(2), Counter(2), AsyncClient(1)], [stay, slow, slow])
    assert [list(r.actions) for r in rollouts] == [[1, 1], [3, 3], [3]]


def test_async_executor_on_the_callers_loop():
    async def main():
        async with AsyncParallelExecutor(max_concurrency=4) as executor:
            rollouts = await executor.collect_rollouts([AsyncClient(n) for n in (3, 1, 2)], stay)
            streamed = [r async for r in executor.iter_rollouts([Counter(1), AsyncClient(2)], stay)]
            return rollouts, streamed

    rollouts, streamed = asyncio.run(main())
    assert [len(r) for r in rollouts] == [3, 1, 2] and sorted(len(r) for r in streamed) == [1, 2]


def test_async_mode_runs_as_many_sync_clients_at_once_as_its_concurrency():
    meet = threading.Barrier(16)

    class Meeting(Counter):
        def step(self, action):
            meet.wait(20)
            return super().step(action)

    with AsyncParallelExecutor(max_concurrency=16) as executor:
        assert len(executor.run([Meeting(2) for _ in range(16)], stay)) == 16


@collectors()
def test_the_same_client_twice_is_used_one_episode_at_a_time(mode):
    client = Counter(50)
    with ParallelRolloutCollector(mode, max_workers=4) as collector:
        rollouts = collector.collect([client] * 4, stay)
    assert [len(r) for r in rollouts] == [50] * 4
    assert all([int(o[0]) for o in r.observations] == list(range(51)) for r in rollouts)


def test_thread_safe_agent_admits_one_caller():
    inside = []

    def agent(obs, done):
        inside.append(1)
        assert len(inside) == 1
        inside.pop()
        return 1

    agent.name = "mine"
    safe = ThreadSafeAgent(agent)
    with ParallelEnvironmentExecutor(max_workers=8) as executor:
        executor.collect_rollouts([Counter(200) for _ in range(8)], safe)
    assert safe.name == "mine"


def test_rollout_timeout_is_checked_between_steps():
    with ParallelEnvironmentExecutor(on_error="skip", rollout_timeout_s=0.0) as executor:
        (rollout,) = executor.collect_rollouts([Counter(10**6)], stay, max_steps=10**6)
    assert rollout.error.phase == "timeout" and len(rollout) == 1


def test_tensors_are_padded():
    torch = pytest.importorskip("torch")
    with ParallelEnvironmentExecutor() as executor:
        rollouts = executor.collect_rollouts([Counter(2), Counter(3)], stay)
    one = rollouts[0].to_tensors()
    assert one["observations"].shape == (3, 2) and one["observations"].dtype == torch.float32
    many = rollouts.to_tensors()
    assert many["observations"].shape == (2, 4, 2) and many["mask"].sum(1).tolist() == [2, 3]
    assert many["rewards"][0].tolist() == [1.0, 1.0, 0.0] and many["lengths"].tolist() == [2, 3]
    assert np.asarray(many["dones"][1]).tolist() == [False, False, True]


def test_seeds_tasks_and_reset_arguments_reach_the_client():
    class OpenEnvWithTask(OpenEnvStyle):
        def reset(self, seed=None, **fields):
            self.fields = fields
            return super().reset(seed)

    gym_like, open_env = Counter(1), OpenEnvWithTask(1)
    with ParallelEnvironmentExecutor() as executor:
        options = {"seeds": [3, 4], "tasks": ["maze", "sea"], "reset_kwargs": [{}, {"level": 2}]}
        rollouts = executor.collect_rollouts([gym_like, open_env], stay, **options)
        one = executor.collect_rollout(Counter(1), stay, seed=9, task="sky")
    assert gym_like.resets == [(3, {"task": "maze"})] and open_env.fields == {"level": 2, "task": "sea"}
    assert [(r.seed, r.task) for r in rollouts] == [(3, "maze"), (4, "sea")] and (one.seed, one.task) == (9, "sky")


def test_openenv_clients_of_ours_tell_truncation_in_their_metadata():
    from envfleet.remote import EchoClient
    from envfleet.rollout.executors.client_results import parse_step

    with ParallelEnvironmentExecutor() as executor:
        rollout = executor.collect_rollout(EchoClient(horizon=3), lambda obs, done: "hello")
    assert len(rollout) == 3 and rollout.episode_return == pytest.approx(1.5) and rollout.terminated[-1]
    raw = {"observation": 1, "reward": None, "done": True, "metadata": {"truncated": True}}
    assert parse_step(raw)[1:4] == (0.0, False, True)


def test_a_sync_agent_that_blocks_does_not_stop_the_loop():
    meet = threading.Barrier(6)

    def together(obs, done):  # returns only when all six episodes are in it: on the loop itself that would be never
        meet.wait(20)
        return 1

    with AsyncParallelExecutor(max_concurrency=6) as executor:
        assert [len(r) for r in executor.run([AsyncClient(30) for _ in range(6)], together)] == [30] * 6


def test_an_inline_agent_runs_on_the_loop():
    places = set()

    def agent(obs, done):
        places.add(threading.current_thread().name)
        return 1

    with AsyncParallelExecutor(max_concurrency=2, inline_agent=True) as executor:
        executor.run([AsyncClient(20) for _ in range(2)], agent)
    assert places == {"envfleet-loop"}


@collectors()
def test_an_agent_object_may_have_methods_of_any_name(mode):
    class Chat:
        def ask(self, *question):
            raise AssertionError("nobody but the agent itself calls this")

        def __call__(self, obs, done):
            return 1

    with ParallelRolloutCollector(mode, max_workers=2) as collector:
        assert [len(r) for r in collector.collect([AsyncClient(3), Counter(2)], Chat())] == [3, 2]


def test_quick_agents_share_hops_and_a_slow_one_holds_nobody_up():
    release = threading.Event()
    others = threading.Semaphore(0)

    def slow(obs, done):
        assert release.wait(20)
        return 1

    def quick(obs, done):
        others.release()
        return 1

    def let_go():
        for _ in range(7 * 20):  # all that the others ever ask, while the slow one is still in its first call
            assert others.acquire(timeout=20)
        release.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    with AsyncParallelExecutor(max_concurrency=8) as executor:
        rollouts = executor.run([AsyncClient(20) for _ in range(8)], [quick] * 3 + [slow] + [quick] * 4)
    helper.join()
    assert [len(r) for r in rollouts] == [20] * 8


@collectors()
@pytest.mark.parametrize("kind", [Counter, AsyncClient])
def test_an_agent_or_client_that_runs_out_fails_and_does_not_hang(mode, kind):
    class Dry(kind):
        def reset(self, seed=None, options=None):  # sync, in an otherwise async client
            return next(iter([]))

    def dry(obs, done):
        return next(iter([]))

    with ParallelRolloutCollector(mode, max_workers=2, on_error="skip") as collector:
        first, second = collector.collect([Dry(3), kind(3)], [stay, dry])
    assert first.error.phase == "reset" and second.error.phase == "agent"
    assert "StopIteration" in str(first.error) and "StopIteration" in str(second.error)


class _Alarm(Exception):
    """Raised by a signal handler, as a time limit of the caller does."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a coroutine that was interrupted before it was submitted
@collectors()
@pytest.mark.parametrize("kind", [Counter, AsyncClient])
def test_a_collection_interrupted_at_random_moments_runs_no_further(mode, kind):
    def ring(*_):
        raise _Alarm

    rng = random.Random(4)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ParallelRolloutCollector(mode, max_workers=4) as collector:
            collector.collect([kind(1)], stay)  # the threads are there: what interrupts their start is not tested here
            for _ in range(30):
                clients = [kind(10**9) for _ in range(6)]
                with pytest.raises(_Alarm):
                    # Again after a second: Python drops an exception that a handler raises inside a finalizer.
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.02), 1.0)
                    collector.collect(clients, stay, max_steps=10**9)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert [len(r) for r in collector.collect(clients, stay, max_steps=2)] == [2] * 6
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", [ParallelEnvironmentExecutor, ProcessParallelExecutor, ParallelRolloutCollector])
def test_max_workers_is_num_workers(kind):
    for executor in (kind(num_workers=3), kind(max_workers=3)):
        with executor:
            inner = getattr(executor, "executor", executor) if kind is ParallelRolloutCollector else executor
            assert inner.num_workers == inner.max_workers == 3


def test_max_concurrency_is_num_workers():
    for executor in (AsyncParallelExecutor(num_workers=3), AsyncParallelExecutor(max_concurrency=3)):
        with executor:
            assert executor.num_workers == executor.max_concurrency == 3
