import gc
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import psutil
import pytest

from envfleet.errors import BadArgument, FleetClosed, NotPicklable
from envfleet.rollout import BatchedPolicy, ParallelRolloutCollector, ProcessParallelExecutor, WorkerLost
from envfleet.rollout.executors.process_executor import Call, ProcessWorkers, dumps
from tests.support.rollout_clients import Counter


def factory(length, **kwargs):
    return lambda: Counter(length, **kwargs)


def agent(obs, done):
    return int(obs[0]) % 4


def test_processes_give_the_same_rollouts_as_threads():
    lengths = [5, 3, 8, 1]
    with ParallelRolloutCollector("process", max_workers=2) as collector:
        there, stats = collector.collect_with_stats([factory(n) for n in lengths], agent, env_names=list("abcd"))
        pids = {collector.executor.executor.submit(os.getpid).result() for _ in range(3)}
    with ParallelRolloutCollector("thread", max_workers=2) as collector:
        here = collector.collect([factory(n) for n in lengths], agent, env_names=list("abcd"))
    assert there.digest() == here.digest() and stats.total_steps == 17
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_batched_policy_stays_in_the_parent():
    pid = os.getpid()

    def policy(obs):
        assert os.getpid() == pid
        return obs[:, 0].astype(int) % 4

    batched = BatchedPolicy(policy, max_wait_s=5.0)
    with ParallelRolloutCollector("process", max_workers=2) as collector:
        rollouts = collector.collect([factory(4), factory(6)], batched)
        plain = collector.collect([factory(4), factory(6)], agent)
    assert rollouts.digest() == plain.digest() and batched.num_requests == 10


def test_a_dying_worker_fails_its_own_rollout_only():
    def killer():
        class Deadly(Counter):
            def step(self, action):
                os.kill(os.getpid(), 9)

        return Deadly(3)

    with ParallelRolloutCollector("process", max_workers=2, on_error="skip") as collector:
        rollouts = collector.collect([factory(3), killer, factory(2)], agent)
    assert [r.failed for r in rollouts] == [False, True, False]
    assert isinstance(rollouts[1].error.__cause__, WorkerLost) and "signal 9" in str(rollouts[1].error)


def test_errors_of_the_worker_come_back_with_their_address():
    with ParallelRolloutCollector("process", max_workers=1, on_error="skip") as collector:
        (rollout,) = collector.collect([factory(5, fail_at=2)], agent, env_names=["lab"])
    assert "'lab', step at step 2" in str(rollout.error) and "the motor burnt out" in str(rollout.error)
    assert len(rollout) == 2


def test_what_cannot_travel_or_be_kept_is_refused():
    with pytest.raises(BadArgument, match="max_rate"):
        ParallelRolloutCollector("process", max_rate=3.0)
    lock = threading.Lock()
    with ParallelRolloutCollector("process", max_workers=1) as collector, pytest.raises(NotPicklable, match="agent"):
        collector.collect([factory(1)], lambda obs, done: lock)


def test_an_unguarded_script_works_and_workers_die_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            from envfleet.rollout import ParallelRolloutCollector

            class Env:  # no `if __name__ == "__main__"` anywhere
                def reset(self, seed=None):
                    return 0
                def step(self, action):
                    return os.getpid(), 1.0, True, False, {}

            collector = ParallelRolloutCollector("process", max_workers=1)
            (rollout,) = collector.collect([Env], lambda obs, done: 0)
            print(rollout.observations[-1], flush=True)
            os.kill(os.getpid(), 9)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert gone(int(done.stdout))


def hang():
    threading.Event().wait(1000)


def gone(pid):
    try:
        psutil.Process(pid).wait(timeout=20)
    except psutil.NoSuchProcess:
        pass
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_call_that_takes_too_long_is_killed_and_the_next_gets_a_new_process(no_leaks):
    with ProcessWorkers(1) as pool:
        first = pool.submit(os.getpid).result()
        with pytest.raises(WorkerLost, match="longer than"):
            pool.submit_call(Call(dumps(lambda agent: hang(), "the call"), timeout_s=0.2)).result()
        assert gone(first) and pool.submit(os.getpid).result() != first


def test_shutdown_ends_calls_that_run(no_leaks):
    pool = ProcessWorkers(1)
    pid = pool.submit(os.getpid).result()
    stuck = pool.submit(hang)
    assert pool.shutdown(timeout=0.1) and gone(pid)
    with pytest.raises(WorkerLost):
        stuck.result()
    with pytest.raises(FleetClosed):
        pool.submit(os.getpid)


def test_a_killed_keeper_takes_its_workers_along_and_another_one_follows(no_leaks):
    with ProcessWorkers(1) as pool:
        pid = pool.submit(os.getpid).result()
        psutil.Process(pid).parent().kill()
        assert gone(pid) and pool.submit(os.getpid).result() != pid


def test_dropping_the_pool_ends_its_processes():
    pool = ProcessWorkers(1)
    pid = pool.submit(os.getpid).result()
    del pool
    gc.collect()
    assert gone(pid)


def test_an_answer_that_cannot_travel_is_told_in_words():
    policy = BatchedPolicy(lambda obs: [threading.Lock() for _ in obs])
    with ParallelRolloutCollector("process", max_workers=1, on_error="skip") as collector:
        (rollout,) = collector.collect([factory(2)], policy)
        (again,) = collector.collect([factory(2)], agent)
    assert "cannot be sent" in str(rollout.error) and len(again) == 2


@pytest.mark.parametrize("mode", ["thread", "async", "process"])
def test_nothing_is_left_behind(mode, no_leaks):
    with ParallelRolloutCollector(mode, max_workers=2, on_error="skip") as collector:
        rollouts = collector.collect([factory(5), factory(5, fail_at=2), factory(3)], agent)
        assert [len(rollout) for rollout in rollouts] == [5, 2, 3]


def test_what_an_environment_started_ends_with_its_worker():
    def factory():
        import subprocess

        class Simulator(Counter):
            def reset(self, seed=None, options=None):
                self.child = subprocess.Popen(["sleep", "1000"])
                return super().reset(seed, options)

            def step(self, action):
                _, *rest = super().step(action)
                return (self.child.pid, *rest)

        return Simulator(1)

    with ParallelRolloutCollector("process", max_workers=1) as collector:
        (rollout,) = collector.collect([factory], lambda obs, done: 0)
        pid = rollout.observations[-1]
        assert psutil.pid_exists(pid)
    assert gone(pid)


class Learning:
    weight = 1

    def __call__(self, obs, done):
        return self.weight


def test_an_agent_that_learned_between_two_calls_acts_as_it_is_now():
    agent = Learning()
    with ProcessParallelExecutor(num_workers=2) as executor:
        for weight in (1, 3, 2):
            agent.weight = weight
            rollouts = executor.run([factory(3), factory(2)], agent)
            assert [set(np.asarray(rollout.actions).tolist()) for rollout in rollouts] == [{weight}, {weight}]
