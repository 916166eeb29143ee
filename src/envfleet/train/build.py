"""What a config asks for: its device, its environments, and the networks that its policies act with."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from envfleet.adapters.meta_envs import family
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.envs.registry import native_version, resolve_env
from envfleet.errors import BadArgument, DeviceMissing
from envfleet.multiagent.groups import groups_of
from envfleet.multiagent.policy_map import Assignment, assign_policies
from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.network_policy import Policy
from envfleet.rollout.segments.agent_segment import STATE
from envfleet.slots.factories import resolve
from envfleet.train.config import PPOConfig
from envfleet.train.normalise import ObservationNormaliser
from envfleet.util.seeding import stream

_BUILDING = threading.Lock()  # torch's global generator is seeded for a network: two that are built at once would share it


def env_names(env: Any) -> list[Any]:
    """The environments of a config as they were given: one, or several that the slots take in turn."""
    given = [name.strip() for name in env.split(",")] if isinstance(env, str) else env
    return list(given) if isinstance(given, (list, tuple)) else [given]


def env_list(env: Any) -> list[Any]:
    """The same, with short names looked up."""
    return [resolve_env(one) for one in env_names(env)]


def factory_of(env: Any, config: PPOConfig, more: Mapping[str, Any] | None = None) -> Any:
    """What builds an environment of a run; with `env_type="meta"` it has inner episodes. `more` are keyword arguments beside the config's."""
    kwargs = {**config.env_kwargs, **(more or {})}
    if config.env_type == "meta":
        return family(env, config.episodes_per_task, config.oracle, kwargs)
    return resolve(env, kwargs)


def training_factories(config: PPOConfig) -> list[Any]:
    """What builds the environments that are trained on. `backend="native"` trains on the native versions of names."""
    if config.backend != "native" or config.env_type == "meta":
        return [factory_of(env, config) for env in env_list(config.env)]
    return [resolve(*native_version(env, config.env_kwargs)) for env in env_names(config.env)]


def one_env(env: Any, config: PPOConfig, render: bool = False, with_state: bool = False) -> Fleet:
    """Return a fleet of one environment, which waits at the end of an episode. Where it runs is chosen as for training."""
    factory = factory_of(env, config, {"render_mode": "rgb_array"} if render else {})
    return make(
        factory,
        1,
        columns=config.columns or None,
        on_end="wait",
        with_state=with_state,
        init_timeout_s=config.init_timeout_s,
        reset_timeout_s=config.reset_timeout_s,
        step_timeout_s=config.step_timeout_s,
    )


def choose_device(name: str) -> torch.device:
    """Return the device, or say which ones there are."""
    available = ["cpu"]
    if torch.cuda.is_available():
        available.append("cuda")
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        return torch.device(available[-1])
    kind = name.split(":")[0]
    if kind not in available:
        raise DeviceMissing(name, available)
    return torch.device(name)


def assignments_of(config: PPOConfig, fleet: Fleet) -> tuple[Assignment, ...]:
    """Return which policy plays which agents. The only agent of an environment is a team of one."""
    if fleet.agents:
        return assign_policies(config.policies, fleet.agents, fleet.groups)
    agents = ("agent",)
    groups = groups_of(agents, [fleet.single_observation_space], [fleet.single_action_space])
    return assign_policies(config.policies, agents, groups)


def state_space_of(config: PPOConfig, fleet: Fleet) -> Any:
    """Return the space of `state()`, which a centralised critic sees; None without one."""
    return fleet.layout.columns[STATE] if config.centralised_critic else None


def build_net(
    assigned: Assignment, config: PPOConfig, device: torch.device, state_space: Any = None, key: tuple[int, ...] = ()
) -> ActorCritic:
    """Build the network of a policy. Equal seeds give equal weights; torch's global generator is not used.

    `state_space` is that of a centralised critic. `key` distinguishes the networks of one run.
    """
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(config.seed, "network", *key).integers(2**62)))
        net = ActorCritic(assigned.observation_space, assigned.action_space, config.network(), state_space)
    return net.to(device)


def stored_policy(state: dict[str, Any], assigned: Assignment, config: PPOConfig, state_space: Any = None) -> Policy:
    """Return a policy with the weights and statistics of a checkpoint, on the CPU. It takes the most likely actions."""
    net = build_net(assigned, config, torch.device("cpu"), state_space)
    try:
        net.load_state_dict(state["net"])
    except RuntimeError as error:
        raise BadArgument(f"the weights of policy {assigned.name} do not fit {config.env_name}: {error}") from error
    normaliser = ObservationNormaliser.of(net, config.normalize_obs)
    if normaliser is not None:
        normaliser.load(state["observations"])
    return Policy(net, 1, None, normaliser, skip_nan=config.on_nan == "skip")
