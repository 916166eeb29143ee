"""CAGE Challenge 2 in C++: the same episodes as `Cage2Env` for the same seeds, for `backend="native"`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.face import Face, Green, checked_options
from envfleet.envs.cage2.red_agents import B_lineAgent, RedAgent
from envfleet.envs.cage2.rules import ObservationRule
from envfleet.envs.cage2.true_state import STATE
from envfleet.native.native_env import NativeEnv

#: Byte for byte the struct `Cage2` of compiled/native/cage2.cpp: the state, the options, the outcomes of a replay.
NATIVE = np.dtype(
    [
        ("state", STATE),
        ("max_steps", "<u4"),
        ("red", "u1"),
        ("green", "u1"),
        ("source", "u1"),
        ("is_recorded", "u1"),
        ("recorded", "i1", (4,)),
        ("state_in_obs", "u1"),
        ("unused", "u1", (3,)),
    ]
)


class NativeCage2Env(Face, NativeEnv):
    """`Cage2Env` in C++, with the same arguments.

    Example:
        >>> env = NativeCage2Env(red_agent="RedMeanderAgent", render_mode="ansi")
        >>> observation, info = env.reset(seed=1)
        >>> observation, reward, terminated, truncated, info = env.step(0)
        >>> print(env.render().splitlines()[0])
        step 1, red: Sweep User succeeded, OT service runs
    """

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
        super().__init__(name="Cage2", render_mode=render_mode, **options._asdict())
        self._declare(options.state_in_obs)

    @property
    def record(self) -> NDArray[Any]:
        """The memory of the environment as one record of `NATIVE`; writing to it changes the environment."""
        return self.state_view.view(NATIVE)[0:1].reshape(())

    def state(self) -> NDArray[Any]:
        """Everything that the next steps depend on, as one compact record of `STATE`."""
        return np.array(self.record["state"])
