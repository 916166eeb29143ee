"""A trained agent read from a run folder: acts, and can be evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from envfleet.envs.registry import resolve_env
from envfleet.errors import BadArgument
from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.network_policy import Policy
from envfleet.slots.factories import resolve
from envfleet.train.checkpoint import load
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import Evaluation, Evaluator
from envfleet.train.normalise import ObservationNormaliser
from envfleet.train.settings import parse
from envfleet.train.train_errors import DeviceMissing
from envfleet.util.seeding import stream

if TYPE_CHECKING:
    from envfleet.train.team_agent import TeamAgent


def env_list(env: Any) -> list[Any]:
    """The environments of a config: one, or several that the slots take in turn."""
    if isinstance(env, str):
        return [resolve_env(name.strip()) for name in env.split(",")]
    if isinstance(env, (list, tuple)):
        return [resolve_env(one) for one in env]
    return [resolve_env(env)]


def build_net(
    observation_space: Any,
    action_space: Any,
    config: PPOConfig,
    device: torch.device,
    state_space: Any = None,
    key: tuple[int, ...] = (),
) -> ActorCritic:
    """Build the network of a config; equal seeds give equal weights, and the global generator is left alone.

    `state_space` is that of a centralised critic; `key` tells several networks of one run apart.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(config.seed, "network", *key).integers(2**62)))
        net = ActorCritic(observation_space, action_space, config.network(), state_space)
    return net.to(device)


def normaliser_for(net: ActorCritic, config: PPOConfig) -> ObservationNormaliser | None:
    """Return the observation normaliser of a config, if it wants one."""
    size = net.features.vector_size
    return ObservationNormaliser(size) if config.normalize_obs and size else None


@dataclass
class Agent:
    """A network with its normaliser and settings, as a checkpoint holds them."""

    config: PPOConfig
    net: ActorCritic
    normaliser: ObservationNormaliser | None
    update: int
    env: Any
    fps: int = 30

    def policy(self, num_slots: int = 1, deterministic: bool = True, seed: int = 0) -> Policy:
        """Return something that acts: `policy.choose(obs)`, or the policy of a `Collector`."""
        rng = None if deterministic else np.random.default_rng(seed)
        return Policy(self.net, num_slots, rng, self.normaliser)

    def evaluate(
        self, episodes: int = 100, seed: int | None = None, deterministic: bool = True, frames: list[Any] | None = None
    ) -> Evaluation:
        """Play episodes on one environment of its own."""
        kwargs = dict(self.config.env_kwargs)
        if frames is not None:
            kwargs["render_mode"] = "rgb_array"
        evaluator = Evaluator(self.env, kwargs, self.config.seed if seed is None else seed)
        try:
            self.fps = int(evaluator.metadata.get("render_fps", 30))
            return evaluator.run(self.net, self.normaliser, episodes, deterministic, frames)
        finally:
            evaluator.close()


def load_agent(where: str | Path, which: str = "final", env: Any = None) -> Agent | TeamAgent:
    """Read the agent of a run folder or checkpoint file; `env` replaces the environment it was trained on.

    A run with many agents gives a `TeamAgent`, which evaluates in the same way. An environment that was given as a
    callable is not stored: pass it again.
    """
    import envfleet as ef

    state = load(where, which)
    config = config_of(state)
    chosen = env_list(env if env is not None else config.env)[0]
    if "team" in state:
        from envfleet.train.team_agent import team_agent

        return team_agent(state, config, chosen)
    with ef.make(resolve(chosen, config.env_kwargs), 1, backend="serial") as fleet:
        spaces = fleet.single_observation_space, fleet.single_action_space
    net = build_net(*spaces, config, torch.device("cpu"))
    normaliser = filled(net, state, config, str(where))
    return Agent(config, net, normaliser, int(state["update"]), chosen)


def filled(net: ActorCritic, state: dict[str, Any], config: PPOConfig, whose: str) -> ObservationNormaliser | None:
    """Give a network the weights of a checkpoint; returns its normaliser, as it was then."""
    try:
        net.load_state_dict(state["net"])
    except RuntimeError as error:
        raise BadArgument(f"the weights of {whose} do not fit {config.env_name}: {error}") from error
    normaliser = normaliser_for(net, config)
    if normaliser is not None:
        normaliser.load(state["observations"])
    return normaliser


def config_of(state: dict[str, Any]) -> PPOConfig:
    """Return the config a checkpoint was written with."""
    values = {name: value for name, value in state["config"].items() if name != "columns"}
    return PPOConfig(**{name: parse(name, value) for name, value in values.items()})


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
