"""The request to a policy of a fleet, and its answer."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import AgentFailed, BadArgument
from envfleet.util.trees import Tree, as_columns, space_tree, stack_values, tree_leaves, tree_length, tree_map

Ints = npt.NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)


class Answer(NamedTuple):
    """Actions, one per row, and named arrays to keep with them (log-probability, value …).

    Example:
        >>> actions, extras = Answer([0, 1], {"logprob": [-0.7, -0.7]})
    """

    actions: Tree
    extras: dict[str, Any] = {}  # noqa: RUF012  # never written to


@dataclass(frozen=True)
class Ask:
    """One request to a policy: k slots wait for an action each.

    `uniform` and `rng` draw random numbers that depend on the run's seed, the episode and the step only —
    not on which rows happen to be asked together — so a policy that uses them gives the same episodes in
    every mode.

    Example:
        >>> ask = Ask(obs=np.zeros((2, 3)), slots=np.arange(2), episode=np.array([4, 9]), step=np.zeros(2, np.int64))
        >>> ask.uniform(1).shape
        (2, 1)
    """

    obs: Tree  # [k, ...]
    slots: Ints  # [k] ascending
    episode: Ints  # [k] which episode of the run: the ticket
    step: Ints  # [k] index of the action in its episode
    task: list[Any] = field(default_factory=list)  # k values
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # declared columns, [k, ...]
    seed: int = 0  # of the run
    reward: npt.NDArray[np.float64] | None = None  # [k] of the step before, for policies with `needs_reward`

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """[k] whether this is the first action of its episode: recurrent policies clear their state there."""
        first: npt.NDArray[np.bool_] = self.step == 0
        return first

    def uniform(self, count: int, stream: int = 0) -> npt.NDArray[np.float64]:
        """[k, count] numbers in [0, 1), fixed by (run seed, stream, episode, step)."""
        row = _mix(_mix(_start_of(self.seed, stream) ^ self.episode.astype(np.uint64)) ^ (self.step.astype(np.uint64) * _STEP))
        bits = _mix(row[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP)
        numbers: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return numbers

    def rng(self, row: int) -> np.random.Generator:
        """A separate generator for one row; more convenient than `uniform`, but slower."""
        key = [self.seed & (2**64 - 1), int(self.episode[row]), int(self.step[row])]
        return np.random.default_rng(np.random.SeedSequence(key))


@functools.lru_cache(256)
def _start_of(seed: int, stream: int) -> Any:
    with np.errstate(over="ignore"):  # hashing wraps around on purpose; arrays do so without a warning
        return _mix(np.uint64(seed & (2**64 - 1)) + np.uint64(stream) * _STEP + _STEP)


def _mix(bits: Any) -> Any:
    """Scramble 64 bits so that neighbouring inputs share nothing (a finalizer of the multiply-and-shift family)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class RandomPolicy:
    """Uniform random actions that depend only on (run seed, episode, step).

    A declared column `action_mask` of a Discrete space is respected.

    Example:
        >>> policy = RandomPolicy(spaces.Discrete(3))
        >>> ask = Ask(obs=None, slots=np.arange(2), episode=np.array([0, 1]), step=np.zeros(2, np.int64))
        >>> policy.act(ask).shape
        (2,)
    """

    version = -1  # not a policy of the run's own

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space

    def act(self, ask: Ask) -> Tree:
        """One action per row."""
        return self._sample(self.action_space, ask, [0])

    def _sample(self, space: gym.Space[Any], ask: Ask, stream: list[int]) -> Tree:
        stream[0] += 1
        if isinstance(space, spaces.Dict):
            return {key: self._sample(part, ask, stream) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._sample(part, ask, stream) for part in space.spaces)
        if isinstance(space, spaces.Discrete):
            return _discrete(space, ask, stream[0])
        if isinstance(space, spaces.Box):
            return _box(space, ask, stream[0])
        if isinstance(space, spaces.MultiBinary):
            coins = ask.uniform(int(np.prod(space.shape)), stream[0]) < 0.5
            return coins.reshape(-1, *space.shape).astype(np.int8)
        if isinstance(space, spaces.MultiDiscrete):
            draw = ask.uniform(int(np.prod(space.shape)), stream[0]).reshape(-1, *space.shape)
            return (np.floor(draw * space.nvec) + space.start).astype(space.dtype)
        # No fixed shape (text, graphs, sequences): Gymnasium's own sampling, seeded for each row.
        samples = []
        for number in ask.uniform(1, stream[0])[:, 0]:
            space.seed(int(number * 2**31))
            samples.append(space.sample())
        return tuple(samples)


def _discrete(space: spaces.Discrete, ask: Ask, stream: int) -> npt.NDArray[Any]:
    draw = ask.uniform(1, stream)[:, 0]
    mask = ask.columns.get("action_mask")
    if mask is None or mask.shape[1:] != (int(space.n),):
        return (np.floor(draw * int(space.n)).astype(np.int64) + int(space.start)).astype(space.dtype)
    allowed = np.cumsum(np.asarray(mask, dtype=np.int64) > 0, axis=1)
    wanted = np.floor(draw * np.maximum(allowed[:, -1], 1)).astype(np.int64) + 1
    chosen: npt.NDArray[Any] = (allowed < wanted[:, None]).sum(axis=1) % int(space.n) + int(space.start)
    return chosen.astype(space.dtype)


def _box(space: spaces.Box, ask: Ask, stream: int) -> npt.NDArray[Any]:
    size = int(np.prod(space.shape))
    draw = ask.uniform(size, stream).reshape(-1, *space.shape)
    if space.dtype.kind == "f" and space.is_bounded():
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        return np.clip(low + draw * (high - low), low, high).astype(space.dtype)
    below, above = space.bounded_below, space.bounded_above
    low = np.where(below, space.low, 0.0).astype(np.float64)
    high = np.where(above, space.high, 0.0).astype(np.float64)
    if np.issubdtype(space.dtype, np.integer):
        return np.minimum(np.floor(low + draw * (high - low + 1.0)), high).astype(space.dtype)
    tail = -np.log1p(-draw)  # exponential, for sides without a bound
    bell = np.sqrt(2.0 * tail) * np.cos(2.0 * np.pi * ask.uniform(size, stream + 1000).reshape(draw.shape))
    sample = np.where(below & above, low + draw * (high - low), np.where(below, low + tail, np.where(above, high - tail, bell)))
    return np.clip(sample, space.low, space.high).astype(space.dtype)


def checked_policy(policy: Any) -> Any:
    """The policy, if it is one."""
    if not callable(policy) and not callable(getattr(policy, "act", None)):
        raise BadArgument(f"the policy must be callable or have act(ask), got {policy!r}")
    return policy


def read_answer(answer: Any, ask: Ask, space: gym.Space[Any]) -> Answer:
    """Check what a policy returned and bring it into the form the fleet takes, or say what is wrong with it."""
    extras: dict[str, Any] = {}
    is_pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)
    if isinstance(answer, Answer) or (is_pair and not isinstance(space, spaces.Tuple)):
        answer, extras = answer
    if answer is None:
        raise _wrong(ask, 0, "the policy returned None instead of actions", None)
    count = len(ask)
    if isinstance(answer, list) and isinstance(space, (spaces.Dict, spaces.Tuple)):
        answer = stack_values(answer)  # one action per slot, as an agent per environment would give them
    try:
        actions = as_columns(space, tree_map(_numpy, answer) if isinstance(answer, (dict, tuple)) else _numpy(answer))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        message = f"the policy returned {_short(answer)}, which does not fit the action space {space} ({error!r})"
        raise _wrong(ask, 0, message, answer) from error
    if tree_length(actions) != count:
        raise _wrong(ask, 0, f"the policy was asked for {count} actions and returned {_short(answer)}", answer)
    tree_map(lambda part, values: _check_values(values, ask, part), space_tree(space), actions)
    kept = {name: np.asarray(_numpy(values)) for name, values in extras.items()}
    for name, values in kept.items():
        if len(values) != count:
            raise _wrong(ask, 0, f"extra {name!r} has {len(values)} rows for {count} observations", values)
    return Answer(actions, kept)


def _check_values(actions: Any, ask: Ask, space: gym.Space[Any]) -> None:
    """Range of Discrete and MultiDiscrete, numbers that are numbers for Box (which environments clip themselves)."""
    if isinstance(space, spaces.Discrete):
        if actions.ndim != 1 or actions.dtype.kind not in "iu":
            message = f"the policy returned actions of dtype {actions.dtype} and shape {actions.shape}; {space} needs integers"
            raise _wrong(ask, 0, message, actions)
        low, high = int(space.start), int(space.start) + int(space.n)
        _refuse_rows((actions < low) | (actions >= high), actions, ask, space)
    elif isinstance(space, spaces.MultiDiscrete) and actions.shape[1:] == space.shape:
        outside = (actions < space.start) | (actions >= space.start + space.nvec)
        _refuse_rows(outside.reshape(len(actions), -1).any(axis=1), actions, ask, space)
    elif isinstance(space, spaces.Box) and actions.dtype.kind == "f":
        _refuse_rows(~np.isfinite(actions.reshape(len(actions), -1)).all(axis=1), actions, ask, space)


def _refuse_rows(wrong: npt.NDArray[np.bool_], actions: Any, ask: Ask, space: gym.Space[Any]) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        message = f"the policy returned {actions[row]!r}, which is not in the action space {space}"
        raise _wrong(ask, row, message, actions[row])


def _wrong(ask: Ask, row: int, message: str, value: Any) -> AgentFailed:
    where = f"slot {int(ask.slots[row])}, episode {int(ask.episode[row])}"
    return AgentFailed(message, env_name=where, phase="agent", step=int(ask.step[row]), value=value)


def _numpy(value: Any) -> Any:
    detach = getattr(value, "detach", None)
    return detach().cpu().numpy() if callable(detach) else value


def _short(value: Any) -> str:
    shapes = [f"{path or 'value'} {np.shape(leaf)}" for path, leaf in tree_leaves(value)]
    return f"{type(value).__name__} ({', '.join(shapes[:4])})"
