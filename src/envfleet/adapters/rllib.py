"""RLlib over fleets: `environment(config, recipe)` in one line, `fleet_env` for `register_env`, `FleetEnvRunner` for speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Unpack

from envfleet.adapters.rllib_env import FleetEnv, FleetEnvCreator, Seeds, fleet_env
from envfleet.core.fleet_options import EnvLike, FleetOptions
from envfleet.errors import BadArgument
from envfleet.faults.failure import Fault
from envfleet.slots.factories import pickled
from envfleet.util.extras import from_extra

with from_extra("rllib"):
    from ray.tune import register_env

    from envfleet.adapters.rllib_runner import FleetEnvRunner

__all__ = ["FleetEnv", "FleetEnvCreator", "FleetEnvRunner", "environment", "faults", "fleet_env"]

Config = TypeVar("Config")
_registered: dict[str, bytes] = {}  # name -> the creator that this process registered


def environment(
    config: Config,
    recipe: EnvLike,
    *,
    name: str | None = None,
    env_config: Mapping[str, Any] | None = None,
    runner: Literal["rllib", "fleet"] = "rllib",
    seeds: Seeds = "streams",
    **options: Unpack[FleetOptions],
) -> Config:
    """Let an algorithm's env runners step fleets: `register_env`, `environment()` and the vectorise mode in one line.

    Args:
        config: an `AlgorithmConfig`; it is changed and returned.
        recipe: what `envfleet.make` takes; see `fleet_env`.
        name: what RLlib calls the environment (default: made from the recipe). A checkpoint has it.
        env_config: for the environment, and options of `make`; see `fleet_env`.
        runner: "rllib" keeps RLlib's own env runner; "fleet" is `FleetEnvRunner`: it keeps arrays while it samples, and refuses some settings.
        seeds: see `fleet_env`.
        options: those of `envfleet.make`.

    Example:
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> config = environment(PPOConfig(), "CartPole-v1", backend="serial")
        >>> config.env, config.gym_env_vectorize_mode
        ('fleet-CartPole-v1', 'vector_entry_point')
    """
    if runner not in ("rllib", "fleet"):
        raise BadArgument(f"runner={runner!r}: choose 'rllib' or 'fleet'")
    creator = fleet_env(recipe, seeds=seeds, **options)
    name = _register(name, creator)
    settings: Any = config
    settings.environment(name, env_config=dict(env_config or {}))
    settings.env_runners(gym_env_vectorize_mode="vector_entry_point")
    if runner == "fleet":
        settings.env_runners(env_runner_cls=FleetEnvRunner)
    return config


def _register(name: str | None, creator: FleetEnvCreator) -> str:
    """Register under the name, or under one that no other recipe of this process has."""
    blob = pickled(creator, "the environment of fleet_env")
    if name is None:
        base = name = f"fleet-{creator.name}"
        number = 1
        while _registered.get(name, blob) != blob:
            number += 1
            name = f"{base}-{number}"
    _registered[name] = blob
    register_env(name, creator)
    return name


def faults(algorithm: Any) -> list[tuple[int, Fault]]:
    """Every fault in the env runners of an algorithm, as (number of the runner, fault). Runner 0 is the local one.

    Example:
        >>> from types import SimpleNamespace
        >>> faults(SimpleNamespace(env_runner_group=None))
        []
    """
    group = algorithm.env_runner_group
    found = [] if group is None else group.foreach_env_runner(_faults_of)
    return [(number, fault) for number, those in found for fault in those]


def _faults_of(runner: Any) -> tuple[int, list[Fault]]:
    env: Any = getattr(runner, "env", None)
    env = getattr(env, "unwrapped", env)
    return runner.worker_index or 0, list(env.fleet.faults) if hasattr(env, "fleet") else []
