"""Plays a native environment at random and checks that it keeps the contract."""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.native.native_env import NativeEnv


def check_env(env: NativeEnv, num_episodes: int = 20, max_steps: int = 1000, seed: int = 0) -> list[str]:
    """What is wrong with an environment, a sentence each with the first seed that shows it; an empty list if nothing is.

    Observations must be inside their space, the same seed must give the same episode, and a copy of the memory must go on as the
    original does.

    Example:
        >>> check_env(NativeEnv(name="CartPole-v1"), num_episodes=3)
        []
    """
    problems: dict[str, int] = {}
    env.action_space.seed(seed)
    for episode in range(num_episodes):
        actions = [env.action_space.sample() for _ in range(max_steps)]
        try:
            _check_episode(env, seed + episode, actions, problems)
        except RuntimeError as error:  # what it throws: see NativeEnv.step
            problems.setdefault(f"an episode failed: {error}", seed + episode)
    return [f"{problem} (seed {first})" for problem, first in problems.items()]


def _check_episode(env: NativeEnv, seed: int, actions: list[Any], problems: dict[str, int]) -> None:
    first = _play(env, seed, actions, problems)
    if _play(env, seed, actions[: len(first)], problems) != first:
        problems.setdefault("the same seed gives another episode the second time: does it keep something over a reset?", seed)
    _check_copy(env, seed, actions[: len(first)], first, problems)


def _play(env: NativeEnv, seed: int, actions: list[Any], problems: dict[str, int]) -> list[bytes]:
    """An episode as bytes, step by step."""
    obs = env.reset(seed=seed)[0]
    rows = [np.asarray(obs).tobytes()]
    _check_obs(env, obs, "reset", seed, problems)
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        rows.append(_row(obs, reward, terminated, truncated))
        _check_obs(env, obs, "step", seed, problems)
        if not np.isfinite(reward):
            problems.setdefault(f"step gave the reward {reward}", seed)
        if terminated or truncated:
            break
    return rows


def _check_obs(env: NativeEnv, obs: Any, where: str, seed: int, problems: dict[str, int]) -> None:
    if not env.observation_space.contains(obs):
        problems.setdefault(f"an observation of {where} is not in {env.observation_space}", seed)


def _check_copy(env: NativeEnv, seed: int, actions: list[Any], wanted: list[bytes], problems: dict[str, int]) -> None:
    """Plays half of the episode, copies the memory, lets it play something else, restores it, and plays the other half."""
    half = (len(wanted) - 1) // 2
    env.reset(seed=seed)
    for action in actions[:half]:
        env.step(action)
    kept = env.memory.copy()
    env.reset(seed=seed + 1)
    env.memory[:] = kept
    for i in range(half, len(wanted) - 1):
        if _row(*env.step(actions[i])[:4]) != wanted[i + 1]:
            problems.setdefault(
                "after its memory was restored it goes on differently: does it keep state outside its struct?", seed
            )
            return


def _row(obs: Any, reward: float, terminated: bool, truncated: bool) -> bytes:
    return np.asarray(obs).tobytes() + np.float64(reward).tobytes() + bytes([terminated, truncated])
