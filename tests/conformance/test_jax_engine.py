"""Functional environments as slots of a fleet: the same functions, driven by hand, are the oracle."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import BadArgument, EnvFailed
from envfleet.testing import Actions, Stream

jax = pytest.importorskip("jax", reason="jax is not installed")
from tests.support.functional_envs import Drift, FlatDrift  # noqa: E402


def play(fleet: Any, num_steps: int, portions: np.random.Generator | None = None) -> Stream:
    """Every slot makes `num_steps` steps, all together or in random portions."""
    stream, left = Stream(), np.full(fleet.num_envs, num_steps)
    actions = Actions(fleet.single_action_space, fleet.num_envs, seed=5)
    stream.add(fleet.reset(seed=7))
    while left.any():
        slots = np.flatnonzero(left)
        if portions is not None:
            slots = slots[portions.random(len(slots)) < 0.5]
        if len(slots):
            fleet.send(actions.of(slots), slots)
            stream.add(fleet.recv())
            left[slots] -= 1
    return stream


@pytest.mark.parametrize("on_end", ["reset", "wait"])
def test_a_slot_has_the_same_bytes_in_whatever_portions_it_is_sent(on_end: Any) -> None:
    with ef.make(Drift(), 5, on_end=on_end) as fleet:
        assert str(fleet.plan).startswith("jax,") and "jax:Drift" in str(fleet.plan)
        wanted = play(fleet, 40).digest()
    with ef.make(Drift, 5, on_end=on_end) as fleet:
        assert play(fleet, 40, np.random.default_rng(0)).digest() == wanted


def test_rows_are_those_of_the_functions() -> None:
    env, params, count = Drift(), Drift.default_params, 4
    reset, step = jax.vmap(lambda key: env.reset_env(key, params)), jax.vmap(lambda *args: env.step_env(*args, params))
    split = jax.vmap(jax.random.split)

    def both(keys: Any) -> tuple[Any, Any]:
        pair = split(keys)
        return pair[:, 0], pair[:, 1]

    keys, now = both(jax.vmap(jax.random.key)(np.arange(3, 3 + count)))
    obs, state = reset(now)
    length, total, num_ends = np.zeros(count, int), np.zeros(count), 0
    with ef.make(env, count) as fleet:
        batch = fleet.reset(seed=3)
        for _ in range(50):
            np.testing.assert_allclose(batch.obs["place"], obs["place"], rtol=1e-5, atol=1e-6)
            actions = np.arange(count) % 3
            batch = fleet.step(actions)
            keys, now = both(keys)
            obs, state, reward, terminated, _ = step(now, state, actions)
            truncated = np.asarray(state.time >= env.limit)
            length, total = length + 1, total + np.asarray(reward, np.float64)
            np.testing.assert_allclose(batch.reward, reward, rtol=1e-5)
            np.testing.assert_allclose(batch.ep_return, total, rtol=1e-5)
            assert batch.terminated.tolist() == terminated.tolist() and batch.truncated.tolist() == truncated.tolist()
            assert batch.length.tolist() == length.tolist()
            ended = np.asarray(terminated) | truncated
            np.testing.assert_allclose(batch.final_obs["place"][ended], obs["place"][ended], rtol=1e-5, atol=1e-6)
            following, again = both(keys)
            first, begun = reset(again)

            def pick(new: Any, old: Any, ended: Any = ended) -> Any:
                return np.where(ended.reshape(-1, *(1,) * (np.ndim(old) - 1)), new, old)

            obs, state = jax.tree.map(pick, (first, begun), (obs, state))
            keys = jax.random.wrap_key_data(pick(jax.random.key_data(following), jax.random.key_data(keys)))
            length[ended], total[ended], num_ends = 0, 0.0, num_ends + int(ended.sum())
    assert num_ends > 4


def test_a_seed_belongs_to_an_episode_and_not_to_a_slot() -> None:
    with ef.make(Drift, 3) as fleet:
        fleet.reset(seed=[2**62 + 5, 5, 5])
        fleet.assign([0], seeds=[5])
        first: dict[int, list[Any]] = {slot: [] for slot in range(3)}
        for _ in range(40):
            batch = fleet.step([2, 2, 2])
            for slot in np.flatnonzero(batch.ended).tolist():
                first[slot].append((int(batch.seed[slot]), float(batch.ep_return[slot]), int(batch.length[slot])))
    assert first[1][0] == first[2][0] == first[0][1] and first[0][0][1:] != first[1][0][1:]
    assert {seed for seed, _, _ in first[1][1:]} == {-1}


def test_values_of_info_become_columns() -> None:
    with ef.make(Drift, 3, columns={"away": gym.spaces.Box(0, 9, (), np.float32)}) as fleet:
        fleet.reset(seed=0)
        batch = fleet.step([1, 1, 1])
        np.testing.assert_allclose(batch.away, -batch.reward, rtol=1e-6)


def test_actions_arrive_in_every_dtype_of_their_kind() -> None:
    with ef.make(FlatDrift, 3) as fleet:
        seen = []
        for dtype in ("i1", "i4", "i8"):
            fleet.reset(seed=0)
            seen.append(fleet.step(np.array([0, 1, 2], dtype)).obs.tolist())
        assert seen[0] == seen[1] == seen[2]
        with pytest.raises(EnvFailed, match="have dtype float32"):
            fleet.step(np.array([0, 1, 2], "f4"))


def test_tasks_are_refused_and_arguments_need_a_class() -> None:
    with ef.make(Drift, 2) as fleet:
        with pytest.raises(BadArgument, match="jax:Drift does not declare tasks"):
            fleet.reset(tasks={"far": 1.0})
    with pytest.raises(BadArgument, match="env_kwargs only go with"):
        ef.make(Drift(), 2, env_kwargs={"limit": 3})
    with ef.make("tests.support.functional_envs:Drift", 2, env_kwargs={"limit": 3}) as fleet:
        fleet.reset(seed=0)
        assert [bool(fleet.step([1, 1]).truncated.all()) for _ in range(3)] == [False, False, True]


def test_a_run_is_resumed_bit_by_bit_and_another_seed_is_another_run(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from envfleet.train import PPOTrainer
    from tests.support.training import config, trained, weights

    settings = {"env": "tests.support.functional_envs:FlatDrift", "backend": "auto", "total_steps": 4 * 16 * 4}
    wanted = trained(config(**settings))
    with PPOTrainer(config(**settings, out=str(tmp_path))) as trainer:
        assert trainer.fleet.plan.backend == "jax"
        trainer.train_episode_vectorized()
        trainer.save()
    with PPOTrainer(config(**settings, out=str(tmp_path), resume=True)) as trainer:
        assert trainer.counters.update == 1
        trainer.train()
        assert torch.equal(weights(trainer), wanted)
    assert not torch.equal(trained(config(**settings, seed=4)), wanted)
