import threading

import numpy as np
import pytest

from envfleet.errors import BadArgument
from envfleet.rollout import BatchedPolicy, ParallelEnvironmentExecutor, ParallelRolloutCollector, Throttle
from tests.support.rollout_clients import AsyncClient, Counter, our_threads, stay


def parity(obs):
    """Depends on the row alone."""
    return obs[:, 0].astype(int) % 4


def alone(obs, done):
    return int(parity(obs[None])[0])


@pytest.mark.parametrize("mode", ["thread", "async"])
@pytest.mark.parametrize("kind", [Counter, AsyncClient])
def test_64_episodes_share_their_policy_calls(mode, kind):
    policy = BatchedPolicy(parity, max_batch=64, max_wait_s=5.0)
    with ParallelRolloutCollector(mode, max_workers=64) as collector:
        batched = collector.collect([kind(40) for _ in range(64)], policy)
        plain = collector.collect([kind(40) for _ in range(64)], alone)
    assert batched.digest() == plain.digest()
    assert policy.num_requests == batched.total_steps == 64 * 40
    assert policy.num_calls <= batched.total_steps / 32
    assert not any(name.startswith("envfleet-policy") for name in our_threads())


def test_more_clients_than_workers_and_unequal_lengths_do_not_wait_for_nobody():
    policy = BatchedPolicy(parity, max_batch=64, max_wait_s=60.0)  # a wrong count would wait a minute
    with ParallelEnvironmentExecutor(max_workers=4) as executor:
        rollouts = executor.collect_rollouts([Counter(n) for n in (1, 9, 3, 7, 2, 5, 8, 4, 6)], policy)
    assert [len(r) for r in rollouts] == [1, 9, 3, 7, 2, 5, 8, 4, 6]
    assert policy.mean_batch > 1.5


def test_a_failing_policy_fails_every_waiting_episode_by_name():
    def policy(obs):
        raise ValueError("nan in weights")

    with ParallelEnvironmentExecutor(max_workers=3, on_error="skip") as executor:
        rollouts = executor.collect_rollouts([Counter(3) for _ in range(3)], BatchedPolicy(policy))
    assert all("nan in weights" in str(r.error) and r.error.phase == "agent" for r in rollouts)


@pytest.mark.parametrize("mode", ["thread", "async"])
@pytest.mark.parametrize("error", [StopIteration, SystemExit])
def test_whatever_a_policy_raises_reaches_the_episodes(mode, error):
    def policy(obs):
        raise error("enough")

    with ParallelRolloutCollector(mode, max_workers=2, on_error="skip") as collector:
        rollouts = collector.collect([AsyncClient(3), AsyncClient(3)], BatchedPolicy(policy))
    assert all(rollout.failed and error.__name__ in str(rollout.error) for rollout in rollouts)


def test_a_policy_that_returns_too_few_actions_is_told_so():
    policy = BatchedPolicy(lambda obs: obs[:1, 0], max_wait_s=60.0)
    with ParallelEnvironmentExecutor(max_workers=3, on_error="skip") as executor:
        rollouts = executor.collect_rollouts([Counter(3) for _ in range(3)], policy)
    assert "given 3 observations and returned 1 actions" in str(rollouts[0].error)
    with pytest.raises(BadArgument):
        BatchedPolicy(parity, max_batch=0)


def test_tensors_and_dict_observations():
    torch = pytest.importorskip("torch")

    class DictEnv(Counter):
        def reset(self, seed=None, options=None):
            obs, info = super().reset()
            return {"x": obs, "t": 0}, info

        def step(self, action):
            obs, *rest = super().step(action)
            return ({"x": obs, "t": self.t}, *rest)

    def policy(obs):
        assert set(obs) == {"x", "t"} and obs["x"].shape[1:] == (2,)
        return torch.as_tensor(obs["t"]) % 4

    with ParallelEnvironmentExecutor(max_workers=2) as executor:
        rollouts = executor.collect_rollouts([DictEnv(3), DictEnv(2)], BatchedPolicy(policy))
    assert [int(a) for a in rollouts[0].actions] == [0, 1, 2]
    assert rollouts.to_tensors()["observations"]["x"].shape == (2, 4, 2)


def test_max_in_flight_per_server():
    now, most = 0, 0
    lock = threading.Lock()

    class Served(Counter):
        base_url = "http://one"

        def step(self, action):
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            result = super().step(action)
            np.sort(np.random.default_rng(0).random(2000))
            with lock:
                now -= 1
            return result

    with ParallelEnvironmentExecutor(max_workers=8, max_in_flight=2) as executor:
        executor.collect_rollouts([Served(20) for _ in range(8)], stay)
    assert most <= 2


def test_max_rate_spaces_the_starts():
    clock = [10.0]
    throttle = Throttle(max_rate=4.0, clock=lambda: clock[0])
    assert [throttle.delay("a") for _ in range(3)] == [0.0, 0.25, 0.5]
    assert throttle.delay("b") == 0.0  # each server has its own rate
    clock[0] = 12.0
    assert throttle.delay("a") == 0.0
    with pytest.raises(BadArgument):
        Throttle(max_rate=0)
    with pytest.raises(BadArgument):
        Throttle(max_in_flight=0)


@pytest.mark.parametrize("kind", [Counter, AsyncClient])
def test_max_rate_in_both_modes(kind):
    for mode in ("thread", "async"):
        with ParallelRolloutCollector(mode, max_workers=2, max_rate=2000.0, max_in_flight=1) as collector:
            assert [len(r) for r in collector.collect([kind(5), kind(5)], stay)] == [5, 5]
