"""What a batch engine is: environments that one call steps all together, and that bring their own life.

An engine declares what it can do. `EngineBackend` refuses the rest, and writes the rows.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np

from envfleet.slots.slab import Slots

Array = np.ndarray[Any, Any]

#: What is asked of a slot: a step; the reset that follows an end (on_end="wait"); a reset that the caller asked for.
GO, NEXT, ASKED = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Declared:
    """What an engine can do.

    `seeds`: "slot" (each slot at each reset) or "start" (one seed for all, at a reset of all slots). `partial`: some slots
    can be stepped or reset while others are not. `on_end`: what it can do at an episode's end; with "reset" it gives the
    last observation too. `tasks`: whether slots can have tasks.
    """

    seeds: Literal["slot", "start"]
    partial: bool
    on_end: tuple[str, ...]
    tasks: bool = False


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one call of an engine gave: arrays with a row per slot that was asked for, in that order.

    `obs` of a slot that was begun is its first observation. Where an episode ended, `obs` is the first of the next one and
    `final_obs` the last of the ended one (on_end="reset"), or `obs` is the last (on_end="wait"). In slots that were begun,
    reward and flags mean nothing.
    """

    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: Any = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class BatchEngine(abc.ABC):
    """All environments of a fleet, in one object. Not built before `build`; `build` again replaces everything."""

    #: The backend's name in plans.
    kind: ClassVar[str]
    #: Whether it has threads of its own, whose number is `num_workers`.
    has_threads: ClassVar[bool] = False
    #: What it is in messages, e.g. "gymnax:CartPole-v1".
    name: str
    declared: Declared
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: Mapping[str, Any] = {}

    @abc.abstractmethod
    def build(self, num_slots: int, on_end: str, seed: int | None = None) -> None:
        """Build all environments. Sets spaces and `declared`. `on_end` is one of those declared, once that is known.

        `seed` is for engines that take a seed only when they are built.
        """

    @abc.abstractmethod
    def advance(self, slots: Slots, begin: Array, seeds: Array, actions: Any) -> Rows:
        """Step the slots with `begin` GO, and reset those with NEXT or ASKED instead; their action is ignored.

        `seeds`: per slot, for a reset that happens in this call, now or at an end; -1 lets the random stream go on.
        Slots that are not named do not change.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End everything that `build` made; idempotent, also after a `build` that failed."""

    def __repr__(self) -> str:
        return self.name
