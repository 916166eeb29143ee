"""CAGE Challenge 2 as a Gymnasium environment over the plain-Python rules."""

from __future__ import annotations

import operator
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.draws import RandomDraws
from envfleet.envs.cage2.face import Face, Green, checked_options, rule_of
from envfleet.envs.cage2.red_agents import B_lineAgent, RedAgent
from envfleet.envs.cage2.rules import ObservationRule, Simulator
from envfleet.envs.cage2.scenario import NUM_ACTIONS
from envfleet.errors import BadArgument

Bits = NDArray[np.uint8]


class Cage2Env(Face, gym.Env[Any, Any]):
    """Defend a network of 13 hosts against a red agent: 145 actions, 52 bits of observation, a penalty for what red holds.

    The observation has four bits per host: two for what was seen in this step (00 nothing, 10 a scan, 11 an exploit), two for
    what blue believes (00 not compromised, 10 unknown, 01 user access, 11 privileged access). `action_meanings` names the actions.
    The episode never terminates; it is truncated after `max_steps`. docs/cage2.md has the rules.

    Args:
        red_agent: `B_lineAgent`, `RedMeanderAgent` or `SleepAgent`: the class or its name.
        green: "sleep", as in the challenge, or "active": a user scans a host in every second step.
        max_steps: the length of an episode (the challenge has 30, 50 and 100), or None for no end.
        observation_rule: "strict" as in the challenge, or "source": a decoy that was placed in a step then does not hide what
            happens on its host in that step.
        render_mode: "ansi" for a map of the network as text.
        state_in_obs: the 84 bytes of the state follow the 52 bits in every observation, so that it travels with the rows of a fleet:
            `true_states(observations[:, 52:].copy().view(STATE)[:, 0])` reads it. Not for a policy that is to be judged.

    Example:
        >>> env = Cage2Env(max_steps=30)
        >>> observation, info = env.reset(seed=0)
        >>> observation.shape, env.action_meanings[139]
        ((52,), 'Restore Op_Server0')
        >>> for _ in range(30):
        ...     observation, reward, terminated, truncated, info = env.step(0)
        >>> reward, terminated, truncated, env.true_state()["access"].tolist()
        (-13.1, False, True, [0, 2, 0, 2, 0, 0, 0, 2, 2, 0, 0, 2, 0])
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(
        self,
        red_agent: str | type[RedAgent] = B_lineAgent,
        green: Green = "sleep",
        max_steps: int | None = 100,
        observation_rule: ObservationRule = "strict",
        render_mode: str | None = None,
        state_in_obs: bool = False,
    ) -> None:
        options = checked_options(red_agent, green, max_steps, observation_rule, render_mode, state_in_obs)
        self._max_steps = options.max_steps
        self.render_mode = render_mode
        self._simulator = Simulator(options.red, options.green, rule_of(options.source))
        self._draws: RandomDraws | None = None
        self._state_in_obs = options.state_in_obs
        self._declare(options.state_in_obs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Bits, dict[str, Any]]:
        """Begin an episode; nothing is seen yet."""
        super().reset(seed=seed)
        self._draws = RandomDraws(self.np_random)
        return self._seen(self._simulator.reset()), {}

    def step(self, action: Any) -> tuple[Bits, float, bool, bool, dict[str, Any]]:
        """Blue acts, then green and red; the reward is for what is the case then."""
        try:
            number = operator.index(action)
        except TypeError:
            raise BadArgument(f"action {action!r} is not a whole number from 0 to {NUM_ACTIONS - 1}") from None
        if not 0 <= number < NUM_ACTIONS:
            raise BadArgument(f"action {number} does not exist: actions are 0 to {NUM_ACTIONS - 1}, see action_meanings")
        if self._draws is None:
            raise BadArgument("step() before reset(): reset the environment first")
        observation, reward = self._simulator.step(number, self._draws)
        return self._seen(observation), reward, False, self._simulator.steps == self._max_steps, {}

    def state(self) -> NDArray[Any]:
        """Everything that the next steps depend on, as one compact record of `STATE`."""
        return self._simulator.state()

    def _seen(self, bits: Bits) -> Bits:
        return np.append(bits, np.frombuffer(self.state().tobytes(), np.uint8)) if self._state_in_obs else bits
