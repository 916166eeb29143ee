"""`SequenceReplay`: whole episodes, kept up to a limit and drawn uniformly, for off-policy learning with memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.rollout.episodes.episode import Rollout

_FIELDS = ("observations", "actions", "rewards", "terminals")


class SequenceReplay:
    """Episodes as sequences; the oldest go when there are more than `max_steps` steps (or `max_bytes`).

    Every sequence is equally likely to be drawn, whatever its length: drawing steps instead would prefer long ones.

    Example:
        >>> replay = SequenceReplay(max_steps=100)
        >>> for length in (3, 5):
        ...     replay.add_sample(np.zeros((length + 1, 2)), np.zeros((length, 1)), np.ones(length), np.zeros(length, bool))
        >>> batch = replay.sample(4, np.random.default_rng(0))
        >>> batch["observations"].shape[1:], batch["rewards"].shape == batch["mask"].shape, len(replay)
        ((4, 2), True, 2)
    """

    def __init__(self, max_steps: int, max_bytes: int | None = None) -> None:
        if max_steps < 1 or (max_bytes is not None and max_bytes < 1):
            raise BadArgument(f"SequenceReplay(max_steps={max_steps}, max_bytes={max_bytes}): both must be above 0")
        self.max_steps, self.max_bytes = max_steps, max_bytes
        self._sequences: deque[dict[str, NDArray[Any]]] = deque()
        self.num_steps = self.num_bytes = 0
        self.num_added = 0  # sequences, also those that are gone

    def __len__(self) -> int:
        return len(self._sequences)

    def add_sample(self, observations: Any, actions: Any, rewards: Any, terminals: Any, **more: Any) -> None:
        """Add a sequence: observations [T + 1, …], and actions, rewards, terminals and whatever `more` has, each [T, …]."""
        given = dict(zip(_FIELDS, (observations, actions, rewards, terminals))) | more
        sequence = {name: np.array(values) for name, values in given.items()}
        length = len(sequence["rewards"])
        for name, values in sequence.items():
            wanted = length + (name == "observations")
            if len(values) != wanted:
                raise BadArgument(f"{name} has {len(values)} rows; a sequence of {length} rewards needs {wanted}")
        if not 0 < length <= self.max_steps:
            raise BadArgument(f"a sequence of {length} steps does not fit: from 1 to max_steps={self.max_steps}")
        if self._sequences and (problem := _differs(self._sequences[0], sequence)):
            raise BadArgument(f"{problem}: all sequences of a replay are of one kind")
        self._sequences.append(sequence)
        self.num_added += 1
        self.num_steps += length
        self.num_bytes += sum(values.nbytes for values in sequence.values())
        while self.num_steps > self.max_steps or (
            self.max_bytes is not None and self.num_bytes > self.max_bytes and len(self._sequences) > 1
        ):
            oldest = self._sequences.popleft()
            self.num_steps -= len(oldest["rewards"])
            self.num_bytes -= sum(values.nbytes for values in oldest.values())

    def add_rollout(self, rollout: Rollout) -> None:
        """Add an episode that a collector or an executor gave. A time limit is not a terminal."""
        task = {} if rollout.task is None else {"task": np.repeat(_task_row(rollout.task), len(rollout), axis=0)}
        self.add_sample(rollout.observations, rollout.actions, rollout.rewards, rollout.terminated, **task)

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """So many sequences side by side, [T, B, …], padded with zeros at the end; `mask` [T, B] is where they are."""
        if not self._sequences:
            raise BadArgument("the replay is empty: add sequences before sampling")
        chosen = [self._sequences[i] for i in rng.integers(len(self._sequences), size=batch_size).tolist()]
        longest = max(len(sequence["rewards"]) for sequence in chosen)
        out: dict[str, NDArray[Any]] = {}
        for name, first in chosen[0].items():
            rows = longest + (name == "observations")
            out[name] = np.zeros((rows, batch_size, *first.shape[1:]), first.dtype)
            for column, sequence in enumerate(chosen):
                out[name][: len(sequence[name]), column] = sequence[name]
        lengths = np.array([len(sequence["rewards"]) for sequence in chosen])
        out["mask"] = np.arange(longest)[:, None] < lengths
        return out


def _task_row(task: Any) -> NDArray[Any]:
    """A task as one row, of the same kind for all tasks of a family: numbers as float64, anything else as the object that it is."""
    try:
        row = np.asarray(task)
    except ValueError:  # parts of several lengths
        row = np.empty(0, object)
    if row.dtype.kind in "biuf":
        return row.astype(np.float64)[None]
    out = np.empty(1, object)
    out[0] = task
    return out


def _differs(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> str:
    if one.keys() != other.keys():
        return f"a sequence with {', '.join(other)} beside one with {', '.join(one)}"
    for name, values in other.items():
        if values.shape[1:] != one[name].shape[1:] or values.dtype != one[name].dtype:
            return (
                f"{name} of shape {values.shape[1:]} and dtype {values.dtype} beside {one[name].shape[1:]} and {one[name].dtype}"
            )
    return ""
