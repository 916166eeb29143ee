"""EnvPool as slots of a fleet: a pool with the same seed, driven by hand, is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import BadArgument

envpool = pytest.importorskip("envpool", reason="envpool is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision")
SHORT = {"max_episode_steps": 14}


def make(num_envs: int = 5, **options: Any) -> Any:
    return ef.make("envpool:CartPole-v1", num_envs, env_kwargs=SHORT, **options)


def pool(seed: int, num_envs: int = 5) -> Any:
    return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=seed, num_threads=1, **SHORT)


def actions_of(num_steps: int, num_envs: int = 5) -> Any:
    return np.random.default_rng(0).integers(0, 2, (num_steps, num_envs))


def test_rows_that_wait_at_ends_are_those_of_the_pool() -> None:
    native = pool(3)
    obs, _ = native.reset()
    over = np.zeros(5, bool)
    with make(on_end="wait") as fleet:
        assert str(fleet.plan).startswith("envpool,") and "one seed" in str(fleet.plan)
        assert fleet.reset(seed=3).obs.tobytes() == obs.tobytes()
        for actions in actions_of(60):
            obs, reward, terminated, truncated, info = native.step(actions)
            batch = fleet.step(actions)
            assert batch.obs.tobytes() == obs.tobytes() and batch.reward.tolist() == reward.tolist()
            assert batch.terminated.tolist() == terminated.tolist() and batch.truncated.tolist() == truncated.tolist()
            assert batch.scored.tolist() == (~over).tolist()
            assert (batch.step + 1).tolist() == info["elapsed_step"].tolist()
            over = terminated | truncated
            assert batch.final_obs[over].tobytes() == obs[over].tobytes()
        assert batch.episode.min() >= 2


def test_episodes_are_the_same_with_both_kinds_of_end() -> None:
    """The resets that the pool makes in the next step, and those of the same turn, draw the same episodes."""

    def episodes(on_end: Any) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {slot: [] for slot in range(5)}
        with make(on_end=on_end) as fleet:
            fleet.reset(seed=3)
            for _ in range(90):
                batch = fleet.step(np.arange(5) % 2)
                for slot in np.flatnonzero(batch.ended).tolist():
                    found[slot].append((batch.final_obs[slot].tobytes(), int(batch.length[slot]), float(batch.ep_return[slot])))
        return found

    reset, wait = episodes("reset"), episodes("wait")
    for slot in range(5):
        count = min(len(reset[slot]), len(wait[slot]))
        assert count >= 5 and reset[slot][:count] == wait[slot][:count]


def test_a_slot_has_the_same_bytes_in_whatever_portions_it_is_sent() -> None:
    def play(portions: np.random.Generator | None) -> list[list[bytes]]:
        rows: list[list[bytes]] = [[] for _ in range(5)]
        with make() as fleet:
            fleet.reset(seed=3)
            while (short := np.array([len(mine) < 40 for mine in rows])).any():
                slots = np.flatnonzero(short & (True if portions is None else portions.random(5) < 0.5))
                if len(slots):
                    fleet.send(slots % 2, slots)
                    batch = fleet.recv()
                    for slot, obs in zip(batch.slots.tolist(), batch.obs):
                        rows[slot].append(obs.tobytes())
        return rows

    assert play(None) == play(np.random.default_rng(1))


def test_some_slots_can_be_reset_but_not_seeded() -> None:
    with make() as fleet:
        fleet.reset(seed=3)
        fleet.step([0] * 5)
        batch = fleet.reset(slots=[1, 3])
        assert batch.slots.tolist() == [1, 3] and batch.step.tolist() == [-1, -1] and batch.episode.tolist() == [1, 1]
        assert fleet.step([0] * 5).step.tolist() == [1, 0, 1, 0, 1]
        with pytest.raises(BadArgument, match="envpool:CartPole-v1 does not declare seeds per slot"):
            fleet.reset(seed=[1, 2], slots=[1, 3])


def test_a_reset_with_a_seed_repeats_everything() -> None:
    with make() as fleet:
        runs = []
        for _ in range(2):
            fleet.reset(seed=2**40)
            runs.append([fleet.step([1] * 5).obs.tobytes() for _ in range(20)])
    assert runs[0] == runs[1]


def test_what_the_fleet_sets_is_refused() -> None:
    with pytest.raises(BadArgument, match="leave batch_size out"):
        ef.make("envpool:CartPole-v1", 2, env_kwargs={"batch_size": 1})


def test_a_box_of_actions_reaches_the_pool() -> None:
    native = envpool.make_gymnasium("Pendulum-v1", num_envs=3, seed=1, num_threads=1)
    native.reset()
    torques = np.array([[-2.0], [0.5], [2.0]], np.float32)
    with ef.make("envpool:Pendulum-v1", 3, num_workers=2) as fleet:
        fleet.reset(seed=1)
        assert fleet.step(torques).obs.tobytes() == native.step(torques)[0].tobytes()


def test_closing_ends_the_threads(no_leaks: Any) -> None:
    fleet = make()
    fleet.reset(seed=0)
    fleet.close()
    fleet.close()


def test_equal_seeds_give_equal_weights_though_slots_have_no_seeds() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tests.support.training import config, trained

    settings = {"env": "envpool:CartPole-v1", "backend": "auto", "total_steps": 4 * 16 * 2}
    wanted = trained(config(**settings))
    assert torch.equal(trained(config(**settings)), wanted) and not torch.equal(trained(config(**settings, seed=4)), wanted)


def test_a_resumed_run_draws_other_episodes_than_it_had(tmp_path: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from envfleet.train import PPOTrainer
    from tests.support.training import config

    settings = config(env="envpool:CartPole-v1", backend="auto", out=str(tmp_path))
    with PPOTrainer(settings) as trainer:
        first = trainer.collector.segment(1).obs
        trainer.train_episode_vectorized()
        trainer.save()
    with PPOTrainer(config(env="envpool:CartPole-v1", backend="auto", out=str(tmp_path), resume=True)) as trainer:
        assert trainer.collector.ledger.dropped  # what ran was ended, and is counted
        assert trainer.collector.segment(1).obs.tobytes() != first.tobytes()
