"""A quick check of an installation: `python tests/e2e/test_parallel_env.py` runs it and prints a verdict; pytest runs it too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np

import envfleet as ef

NUM_ENVS = 4


def rollout(backend: str, steps: int = 60) -> np.ndarray:
    """Observations and rewards of a fixed walk, as one array."""
    rows = []
    with ef.make("CartPole-v1", NUM_ENVS, backend=backend) as fleet:
        fleet.reset(seed=0)
        for step in range(steps):
            batch = fleet.step(np.full(NUM_ENVS, step % 2))
            rows.append(np.column_stack([batch.obs, batch.reward, batch.ended]))
    return np.array(rows)


def test_every_backend_gives_the_same_bytes() -> None:
    wanted = rollout("serial")
    for backend in ("thread", "shm"):
        assert (rollout(backend) == wanted).all(), f"{backend} differs from serial"


def test_an_error_in_an_environment_comes_back() -> None:
    class Broken(gym.Env):
        observation_space = gym.spaces.Discrete(2)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            raise RuntimeError("broken on purpose")

    with ef.make(Broken, 2, backend="shm") as fleet:
        fleet.reset()
        try:
            fleet.step([0, 0])
        except ef.EnvFailed as error:
            assert "broken on purpose" in str(error)
        else:
            raise AssertionError("the error was lost")


def test_a_short_training_runs_in_parallel() -> None:
    try:
        from envfleet.train import PPOConfig, PPOTrainer
    except ef.MissingExtra as missing:
        raise SkipCheck(str(missing)) from missing
    results = []
    for backend in ("serial", "shm"):
        with PPOTrainer(PPOConfig(num_envs=NUM_ENVS, num_steps=32, total_steps=512, backend=backend)) as trainer:
            trainer.train()
            results.append(trainer.learner.flat.detach().numpy().copy())
    assert (results[0] == results[1]).all(), "training differs between serial and shm"


class SkipCheck(Exception):
    """A check that needs what is not installed."""


CHECKS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("serial, thread and shm give the same bytes", test_every_backend_gives_the_same_bytes),
    ("an environment's error reaches the caller", test_an_error_in_an_environment_comes_back),
    ("PPO trains on parallel environments, bit by bit as on serial ones", test_a_short_training_runs_in_parallel),
)


def main() -> int:
    """Run the checks; 0 when all passed."""
    print(f"envfleet {ef.__version__}, Python {sys.version.split()[0]}")
    failed = 0
    for text, check in CHECKS:
        begin = time.perf_counter()
        try:
            check()
            verdict = "ok"
        except SkipCheck as why:
            verdict = f"skipped: {why}"
        except Exception as error:
            failed += 1
            verdict = f"FAILED: {type(error).__name__}: {error}"
        print(f"  {text}: {verdict} ({time.perf_counter() - begin:.1f} s)")
    print("This installation works." if not failed else f"{failed} of {len(CHECKS)} checks failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
