"""The model: an env whose every row is a pure function of slot, seed, episode, step, actions and task; and the env itself.

A wrong, stale, torn or neighbour's row can therefore never pass for the right one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

_BIG = np.iinfo(np.int64)
_WIDE = 40_000  # numbers in a wide observation or action
SHAPES = ("plain", "wide", "mail", "bulky")  # and "huge", which is too slow for every day
_HUGE = 1_000_000


@dataclasses.dataclass(frozen=True)
class State:
    """Where an env is. `episode` counts from its last seeded reset, so 0 means: reset with this very seed."""

    slot: int
    seed: int
    episode: int
    step: int
    digest: int
    task: int

    @property
    def given_seed(self) -> int:
        """What the column `seed` says of this episode."""
        return self.seed if self.episode == 0 else -1


def mix(*values: int) -> int:
    """A hash of whole numbers, the same everywhere."""
    digest = 0x9E3779B97F4A7C15
    for value in values:
        digest = ((digest ^ (value & (2**64 - 1))) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        digest ^= digest >> 29
    return digest >> 2  # fits an int64


def begin(slot: int, seed: int, episode: int, task: int) -> State:
    """The first state of an episode."""
    return State(slot, seed, episode, 0, mix(slot, seed, episode, task), task)


def advance(state: State, action: int) -> State:
    """The state after one more step."""
    return dataclasses.replace(state, step=state.step + 1, digest=mix(state.digest, action))


def ends(state: State) -> tuple[bool, bool]:
    """(terminated, truncated)."""
    over = state.step >= 2 + mix(state.seed, state.episode) % 9
    return over and state.seed % 2 == 0, over and state.seed % 2 == 1


def reward_of(state: State) -> float:
    """The reward of the step that led here; exact in binary, so that sums are exact too."""
    return (state.digest % 4001 - 2000) / 8


def info_of(state: State) -> dict[str, Any]:
    """The info that goes with a state; now and then there is none."""
    return {} if state.digest % 3 == 0 else {"state": dataclasses.astuple(state), "text": f"at {state.digest}"}


def numbers_of(state: State) -> Any:
    """The state as an array."""
    return np.array(dataclasses.astuple(state), np.int64)


def story_of(state: State) -> str:
    """The state as text, for the mailbox."""
    return f"{dataclasses.astuple(state)}" * (1 + state.digest % 3)


def view(state: State, shape: str) -> Any:
    """The observation of a state."""
    if shape in ("wide", "huge"):
        return np.resize(numbers_of(state), _WIDE if shape == "wide" else _HUGE)  # the state over and over: a torn copy shows
    return {"row": numbers_of(state), "story": story_of(state)} if shape == "mail" else numbers_of(state)


def spaces_of(shape: str) -> tuple[Any, Any]:
    """(observation, action) spaces."""
    row = spaces.Box(_BIG.min, _BIG.max, ({"wide": _WIDE, "huge": _HUGE}.get(shape, 6),), np.int64)
    observation: Any = spaces.Dict(row=row, story=spaces.Text(1000)) if shape == "mail" else row
    action: Any = spaces.Box(0, 1e6, (_WIDE,), np.float64) if shape == "bulky" else spaces.Discrete(1 << 20)
    return observation, action


def encode(payload: int, code: int, shape: str) -> Any:
    """An action: what is hashed, and which mischief is to happen."""
    if shape == "bulky":
        return np.full(_WIDE, float(payload + 256 * code))
    return payload + 256 * code


def decode(action: Any) -> tuple[int, int]:
    """(payload, code) of an action; a torn one is refused."""
    if isinstance(action, np.ndarray) and action.ndim:
        if not (action == action[0]).all():
            raise ValueError("a torn action arrived")
        action = action[0]
    number = int(action)
    return number % 256, number // 256


class World(gym.Env[Any, Any]):
    """The model as an env. The action says what mischief it does; traps (files) do it in constructor and close."""

    def __init__(self, slot: int, shape: str = "plain", traps: str = "", pace_s: float = 0.0) -> None:
        self.slot, self.shape, self.traps, self.pace_s = slot, shape, traps, pace_s
        self.observation_space, self.action_space = spaces_of(shape)
        self.state: State | None = None
        self.tag: Any = slot
        self._spring("init")

    def _spring(self, phase: str) -> None:
        """Do the mischief somebody left for this phase, once."""
        path = os.path.join(self.traps, f"{phase}-{self.slot}")
        if self.traps and os.path.exists(path):
            with open(path) as file:
                code = int(file.read())
            os.unlink(path)
            self._mischief(code)

    def _mischief(self, code: int) -> Any:
        from .mischief import CODES

        return CODES[code].act(self)

    def _seeded(self, seed: int | None, options: Any) -> State:
        task = (options or {}).get("task", -1)
        old = self.state
        if seed is not None:
            return begin(self.slot, seed, 0, task)
        return begin(self.slot, old.seed if old else -1, old.episode + 1 if old else 0, task)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.state = self._seeded(seed, options)
        if options and "mischief" in options:
            self._mischief(options["mischief"])
        return view(self.state, self.shape), info_of(self.state)

    def step(self, action: Any) -> Any:
        payload, code = decode(action)
        if self.pace_s:
            time.sleep(self.pace_s * (self.state.digest % 4))
        return self._stepped(payload, code)

    def _stepped(self, payload: int, code: int) -> Any:
        self.state = state = advance(self.state, payload)
        result = (view(state, self.shape), reward_of(state), *ends(state), info_of(state))
        if code:
            change = self._mischief(code)
            result = result if change is None else change(self, result)
        return result

    def ask(self, question: Any) -> Any:
        """An answer that tells who was asked, and when."""
        return self.slot, self.state.digest if self.state else None, question

    def ask_badly(self, code: int) -> Any:
        """Mischief in a call; gives back what it wants returned."""
        change = self._mischief(code)
        return None if change is None else change(self, (None, 0.0, False, False, {}))[4]

    def render(self) -> Any:
        return self._mischief(self.tag) if isinstance(self.tag, int) and self.tag else None

    def close(self) -> None:
        self._spring("close")


class AsyncWorld(World):
    """World with coroutines."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        payload, code = decode(action)
        await asyncio.sleep(self.pace_s * (self.state.digest % 4))
        return self._stepped(payload, code)
