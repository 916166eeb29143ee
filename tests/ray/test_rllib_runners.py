"""RLlib's own env runner over fleets, and `FleetEnvRunner`: the same curves, right ends and starts, faults, refusals."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

WHY = "RLlib is not installed here: `make test-ray` runs this in a venv that has it"
pytest.importorskip("ray.rllib", reason=WHY, exc_type=ImportError)

from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from ray.rllib.connectors.env_to_module import FlattenObservations  # noqa: E402

from envfleet.adapters import rllib  # noqa: E402
from envfleet.errors import BadArgument  # noqa: E402
from tests.support.counting_envs import Counting, counting_from_mapping  # noqa: E402

pytestmark = pytest.mark.usefixtures("cluster")
RUNNERS = ("rllib", "fleet")


def small_ppo(num_env_runners: int = 0, num_envs: int = 4, fragment: int = 32, seed: int | None = 7) -> Any:
    return (
        PPOConfig()
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=num_envs, rollout_fragment_length=fragment)
        .training(train_batch_size=max(1, num_env_runners) * num_envs * fragment, minibatch_size=64, num_epochs=2)
        .debugging(seed=seed)
    )


def curve(config: Any, iterations: int = 3) -> list[tuple[float, ...]]:
    algorithm = config.build_algo()
    try:
        results = [algorithm.train() for _ in range(iterations)]
    finally:
        algorithm.stop()
    names = ("episode_return_mean", "episode_len_max", "num_episodes_lifetime", "num_env_steps_sampled_lifetime")
    return [tuple(float(result["env_runners"][name]) for name in names) for result in results]


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_the_return_curve_is_that_of_rllibs_own_vectorisation(num_env_runners: int) -> None:
    ours = rllib.environment(small_ppo(num_env_runners), "CartPole-v1", seeds="gymnasium", backend="serial")
    assert curve(ours) == curve(small_ppo(num_env_runners).environment("CartPole-v1"))


def sampled(config: Any, num_timesteps: int = 96, calls: int = 3, **how: Any) -> tuple[list[Any], Any]:
    """The episodes of some samples of a local runner, and the faults."""
    runner = config.env_runner_cls or __import__("ray.rllib.env.single_agent_env_runner", fromlist=["x"]).SingleAgentEnvRunner
    one = runner(config=config, worker_index=0)
    try:
        episodes = [episode for _ in range(calls) for episode in one.sample(num_timesteps=num_timesteps, **how)]
        return episodes, one.env.unwrapped.fleet.faults
    finally:
        one.stop()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_episodes_begin_with_a_first_observation_and_end_with_a_last_one(runner: Any, cut: bool) -> None:
    Counting.start_counting()
    config = rllib.environment(small_ppo(), Counting, runner=runner, backend="serial", env_config={"cut": cut})
    episodes, _ = sampled(config)
    assert sum(len(episode) for episode in episodes) >= 3 * 96
    assert any(episode.t_started for episode in episodes) and any(episode.is_done for episode in episodes)
    for episode in episodes:
        obs = np.asarray(episode.get_observations())
        assert obs[:, 2].tolist() == list(range(episode.t_started, episode.t_started + len(episode) + 1))
        assert len(np.unique(obs[:, :2], axis=0)) == 1, "observations of two episodes"
        assert episode.is_done == (obs[-1, 2] == 5)
        assert (episode.is_terminated, episode.is_truncated) == (episode.is_done and not cut, episode.is_done and cut)
        assert len(episode.get_rewards()) == len(episode.get_actions()) == len(episode)
        assert len(episode.get_extra_model_outputs("action_logp")) == len(episode)


@pytest.mark.parametrize("runner", RUNNERS)
def test_chunks_of_one_episode_have_one_id(runner: Any) -> None:
    Counting.start_counting()
    config = rllib.environment(small_ppo(), Counting, runner=runner, backend="serial", env_config={"length": 50})
    episodes, _ = sampled(config, num_timesteps=64)
    by_id: dict[str, list[Any]] = {}
    for episode in episodes:
        by_id.setdefault(episode.id_, []).append(episode)
    assert {len(chunks) for chunks in by_id.values()} >= {3}
    for chunks in by_id.values():
        seen = {tuple(obs[:2]) for chunk in chunks for obs in np.asarray(chunk.get_observations()).tolist()}
        assert len(seen) == 1
        assert [chunk.t_started for chunk in chunks[1:]] == [chunk.t for chunk in chunks[:-1]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_environment_that_raises_truncates_its_own_episode_only(runner: Any) -> None:
    def by_instance(fails: Any) -> tuple[dict[Any, list[Any]], Any]:
        Counting.start_counting()
        config = rllib.environment(small_ppo(), Counting, runner=runner, backend="serial", env_config={"fails": fails})
        episodes, faults = sampled(config, calls=1)
        found: dict[Any, list[Any]] = {}
        for episode in episodes:
            found.setdefault(int(episode.get_observations(0)[0]), []).append(episode)
        return found, faults

    whole, none = by_instance(())
    broken, faults = by_instance(((1, 3),))
    assert not none and [fault.slot for fault in faults] == [1]
    flagged = [episode for those in broken.values() for episode in those if episode.get_infos(-1).get("envfleet.fault")]
    assert len(flagged) == 1
    assert flagged[0].is_truncated and not flagged[0].is_terminated
    assert flagged[0].get_observations(-1).tolist() == [1, 0, 2]
    assert broken[4][0].get_observations(0).tolist() == [4, 0, 0], "the restarted environment begins with its first observation"
    for slot in (0, 2, 3):
        ours, theirs = (sorted(those[slot], key=lambda e: tuple(e.get_observations(0))) for those in (broken, whole))
        for one, other in zip(ours, theirs):
            steps = min(len(one), len(other))  # RLlib's runner stops at a number of steps: one more in the others
            assert steps and np.array_equal(one.get_observations(slice(0, steps)), other.get_observations(slice(0, steps)))


def test_the_fleet_runner_has_no_transition_of_a_failed_step_and_counts_it() -> None:
    Counting.start_counting()
    config = rllib.environment(small_ppo(), Counting, runner="fleet", backend="serial", env_config={"fails": ((1, 3),)})
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
        assert result["env_runners"]["num_env_faults_lifetime"] == 1
        # RLlib is promised 128 steps at least: one step more of every slot makes up for the one that failed.
        assert result["num_env_steps_sampled_lifetime"] == 4 * 33 - 1
        assert [(runner, fault.slot, fault.phase) for runner, fault in rllib.faults(algorithm)] == [(0, 1, "step")]
    finally:
        algorithm.stop()


def test_the_fleet_runner_goes_on_without_a_quarantined_slot() -> None:
    Counting.start_counting()
    fails = tuple((instance, 1) for instance in range(3, 40))
    config = rllib.environment(
        small_ppo(), Counting, runner="fleet", backend="serial", max_restarts=1, env_config={"fails": ((3, 1), *fails)}
    )
    episodes, faults = sampled(config, calls=1)
    assert {int(episode.get_observations(0)[0]) for episode in episodes} == {0, 1, 2}
    assert {fault.slot for fault in faults} == {3}


@pytest.mark.parametrize("runner", RUNNERS)
def test_remote_runners_get_the_recipe_and_seeds_of_their_own(runner: Any) -> None:
    config = rllib.environment(small_ppo(2), counting_from_mapping, runner=runner, backend="serial", env_config={"length": 9})
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
        assert result["env_runners"]["episode_len_max"] == 9
        seeds = algorithm.env_runner_group.foreach_env_runner(
            lambda one: [int(seed) for seed in one.env.unwrapped.get_attr("np_random_seed")], local_env_runner=False
        )
        assert len({seed for those in seeds for seed in those}) == 8
    finally:
        algorithm.stop()


def test_an_id_that_only_the_driver_registered_works_in_a_remote_runner() -> None:
    class Here(Counting):
        pass

    gym.register("OnlyInTheDriver-v0", entry_point=Here)
    try:
        assert curve(rllib.environment(small_ppo(1), "OnlyInTheDriver-v0", backend="serial"), 1)[0][0] == 5.0
    finally:
        del gym.registry["OnlyInTheDriver-v0"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_two_algorithms_in_one_process_keep_their_environments_apart(runner: Any) -> None:
    configs = [
        rllib.environment(small_ppo(), Counting, runner=runner, backend="serial", env_kwargs={"length": length})
        for length in (3, 8)
    ]
    assert configs[0].env != configs[1].env
    algorithms = [config.build_algo() for config in configs]
    try:
        for _ in range(2):
            for algorithm, length in zip(algorithms, (3, 8)):
                algorithm.train()
                assert algorithm.env_runner.env.unwrapped.get_attr("length") == (length,) * 4
    finally:
        for algorithm in algorithms:
            algorithm.stop()


@pytest.mark.parametrize("runner", RUNNERS)
def test_stopping_an_algorithm_ends_its_worker_processes(runner: Any) -> None:
    before = set(psutil.Process().children(recursive=True))
    config = rllib.environment(small_ppo(), "CartPole-v1", runner=runner, backend="shm", num_workers=1)
    algorithm = config.build_algo()
    algorithm.train()
    ours = [
        one for one in psutil.Process().children(recursive=True) if one not in before and "ray" not in " ".join(one.cmdline())
    ]
    assert ours
    algorithm.stop()
    _, alive = psutil.wait_procs(ours, timeout=10)
    assert [one for one in alive if "forkserver" not in " ".join(one.cmdline())] == []


def test_actions_are_stored_as_the_module_gave_them_and_sent_as_the_environment_wants_them() -> None:
    config = rllib.environment(small_ppo(), "Pendulum-v1", runner="fleet", backend="serial")
    episodes, _ = sampled(config, calls=1)
    stored = np.concatenate([episode.get_actions() for episode in episodes])
    assert stored.dtype == np.float32 and np.abs(stored).max() > 2.0, "unbounded samples of a Gaussian, not what was clipped"


class TwoParts(gym.Env):
    """Actions with a part that RLlib stretches to its bounds, and one that it does not touch; the observation is the action."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (2,), np.float32)
    action_space = gym.spaces.Dict({"steer": gym.spaces.Box(-10.0, 30.0, (1,), np.float32), "gear": gym.spaces.Discrete(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.array([action["steer"][0], action["gear"]], np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("runner", RUNNERS)
def test_parts_of_actions_are_stored_raw_and_sent_stretched(runner: Any) -> None:
    config = rllib.environment(small_ppo(), TwoParts, runner=runner, backend="serial")
    episodes, _ = sampled(config, calls=1)
    for episode in episodes:
        chosen, seen = episode.get_actions(), np.asarray(episode.get_observations())[1:]
        steer = np.clip(-10 + (np.asarray(chosen["steer"])[:, 0] + 1) * 20, -10, 30)
        assert np.allclose(steer, seen[:, 0], atol=1e-4)
        assert np.array_equal(chosen["gear"], seen[:, 1])


def test_greedy_random_and_forced_samples_of_the_fleet_runner() -> None:
    config = rllib.environment(small_ppo(), "CartPole-v1", runner="fleet", backend="serial")
    one = config.env_runner_cls(config=config, worker_index=0)
    assert all(
        episode.get_extra_model_outputs("action_dist_inputs").shape[-1] == 2
        for episode in one.sample(num_timesteps=64, explore=False)
    )
    assert all("action_logp" not in episode.extra_model_outputs for episode in one.sample(num_timesteps=64, random_actions=True))
    episodes = one.sample(num_timesteps=4, force_reset=True)
    assert [episode.t_started for episode in episodes] == [0] * 4
    with pytest.raises(BadArgument, match="num_episodes=3"):
        one.sample(num_episodes=3)
    ledger = one._collector.ledger
    assert ledger.started == ledger.used + ledger.lost + ledger.in_flight + sum(ledger.dropped.values())
    one.stop()


class _EpisodeCallback(RLlibCallback):
    def on_episode_end(self, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: c.env_runners(env_to_module_connector=lambda *a: FlattenObservations()), "env_to_module_connector"),
        (lambda c: c.env_runners(module_to_env_connector=lambda *a: []), "module_to_env_connector"),
        (
            lambda c: c.env_runners(add_default_connectors_to_env_to_module_pipeline=False),
            "add_default_connectors_to_env_to_module",
        ),
        (lambda c: c.callbacks(_EpisodeCallback), "the callback on_episode_end"),
        (lambda c: c.callbacks(on_episode_step=lambda **k: None), "the callback on_episode_step"),
        (lambda c: c.env_runners(batch_mode="complete_episodes"), "batch_mode='complete_episodes'"),
        (lambda c: c.env_runners(episodes_to_numpy=False), "episodes_to_numpy=False"),
        (lambda c: c.multi_agent(policies={"one", "two"}), "multi_agent"),
        (lambda c: c.environment("CartPole-v1"), "the environment 'CartPole-v1'"),
        (lambda c: c.rl_module(model_config={"use_lstm": True}), "a stateful"),
    ],
)
def test_the_fleet_runner_refuses_by_name_what_it_does_not_do(change: Any, name: str) -> None:
    config = rllib.environment(small_ppo(), "CartPole-v1", runner="fleet", backend="serial")
    change(config)
    with pytest.raises(BadArgument, match=name):
        config.env_runner_cls(config=config, worker_index=0)


def test_callbacks_around_the_loop_are_called() -> None:
    called = []
    config = rllib.environment(small_ppo(), "CartPole-v1", runner="fleet", backend="serial").callbacks(
        on_environment_created=lambda **k: called.append("created"), on_sample_end=lambda **k: called.append("sampled")
    )
    one = config.env_runner_cls(config=config, worker_index=0)
    one.sample(num_timesteps=8)
    one.stop()
    assert called == ["created", "sampled"]


@pytest.mark.parametrize("shape", ["dict", "tuple", "discrete"])
def test_other_observations_go_through_rllibs_own_connectors(shape: str) -> None:
    Counting.start_counting()
    config = rllib.environment(small_ppo(), Counting, backend="serial", env_config={"shape": shape})
    config.env_runners(env_to_module_connector=lambda *a, **k: FlattenObservations())
    assert curve(config, 1)[0][0] == 5.0


@pytest.mark.parametrize("runner", RUNNERS)
def test_ppo_learns_cartpole(runner: Any) -> None:
    config = rllib.environment(small_ppo(num_envs=32, fragment=64), "CartPole-v1", runner=runner, backend="serial")
    config.training(minibatch_size=256, num_epochs=6, lr=1e-3, gamma=0.98)
    found = curve(config, 12)
    assert found[0][0] < 40 and found[-1][0] > 100, found
