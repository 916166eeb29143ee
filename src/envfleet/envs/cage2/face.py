"""What the two versions of the environment share: checked options, spaces, the true state, the map as text."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.network_map import network_map
from envfleet.envs.cage2.red_agents import B_lineAgent, RedAgent, red_number
from envfleet.envs.cage2.rules import OBSERVATION_RULES, ObservationRule
from envfleet.envs.cage2.scenario import ACTION_MEANINGS, NUM_ACTIONS, NUM_BITS
from envfleet.envs.cage2.true_state import STATE, true_states
from envfleet.errors import BadArgument

Green = Literal["sleep", "active"]
GREENS: tuple[Green, ...] = ("sleep", "active")


class Options(NamedTuple):
    """The options of the environment as numbers."""

    red: int
    green: bool
    source: bool
    max_steps: int  # 0: no limit
    state_in_obs: bool  # observations are followed by the state


def checked_options(
    red_agent: str | type[RedAgent] = B_lineAgent,
    green: str = "sleep",
    max_steps: int | None = 100,
    observation_rule: str = "strict",
    render_mode: str | None = None,
    state_in_obs: bool = False,
) -> Options:
    """The options as numbers, or an error that says what is wrong.

    Example:
        >>> checked_options("bline", "sleep", 30, "strict", None)
        Options(red=0, green=False, source=False, max_steps=30, state_in_obs=False)
        >>> checked_options("bline", "sleep", 0, "strict", None)
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: max_steps=0: give a whole number from 1 up (the challenge has 30, 50 and 100), or None
    """
    if green not in GREENS:
        raise BadArgument(f"green={green!r}: choose 'sleep' or 'active'")
    if observation_rule not in OBSERVATION_RULES:
        raise BadArgument(f"observation_rule={observation_rule!r}: choose 'strict' or 'source'")
    if not isinstance(state_in_obs, bool):
        raise BadArgument(f"state_in_obs={state_in_obs!r}: choose True or False")
    if render_mode not in (None, "ansi"):
        raise BadArgument(f"render_mode={render_mode!r}: choose 'ansi' or None")
    limit = 0
    if max_steps is not None:
        try:
            limit = operator.index(max_steps)
        except TypeError:
            limit = 0
        if not 0 < limit < 2**32:
            raise BadArgument(
                f"max_steps={max_steps!r}: give a whole number from 1 up (the challenge has 30, 50 and 100), or None"
            )
    return Options(red_number(red_agent), green == "active", observation_rule == "source", limit, state_in_obs)


class Face:
    """The interface that both versions have beside that of Gymnasium."""

    action_meanings: ClassVar[tuple[str, ...]] = ACTION_MEANINGS
    render_mode: str | None

    def state(self) -> NDArray[Any]:
        """Everything that the next steps depend on, as one compact record of `STATE`; a copy."""
        raise NotImplementedError

    def true_state(self) -> NDArray[Any]:
        """What is really the case, as one record of `TRUE_STATE`: docs/cage2.md explains its fields."""
        return true_states(self.state())

    def render(self) -> str | None:
        """The network as text, with render_mode "ansi"."""
        return network_map(self.true_state()) if self.render_mode == "ansi" else None

    def _declare(self, state_in_obs: bool) -> None:
        """The spaces."""
        size, high = (NUM_BITS + STATE.itemsize, 255) if state_in_obs else (NUM_BITS, 1)
        self.observation_space: gym.Space[Any] = gym.spaces.Box(0, high, (size,), np.uint8)
        self.action_space: gym.Space[Any] = gym.spaces.Discrete(NUM_ACTIONS)


def rule_of(source: bool) -> ObservationRule:
    """The name of an observation rule.

    Example:
        >>> rule_of(True)
        'source'
    """
    return OBSERVATION_RULES[source]
