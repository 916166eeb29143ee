"""`Rollout`: the record of one episode. `Rollouts`: a list of them with statistics, digests and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from envfleet.errors import BadArgument
from envfleet.util.extras import from_extra
from envfleet.util.jsonable import to_jsonable
from envfleet.util.trees import Tree, stack_values, tree_leaves, tree_length, tree_map

if TYPE_CHECKING:
    from pathlib import Path

    from envfleet.rollout.stats import Stats


@dataclass(eq=False, repr=False)
class Rollout:
    """One episode: T actions and the T + 1 observations around them.

    `observations` and `actions` are lists when an executor collected them (any Python values) and arrays,
    or dicts and tuples of arrays, when the fleet's collector did. `infos[t]` belongs to `rewards[t]`; what
    `reset()` gave is `reset_info`. A failed rollout keeps what it had and says why in `error`.

    Example:
        >>> rollout = Rollout(env_name="easy", observations=[0, 1, 2], actions=[1, 1], rewards=[0.5, 1.0],
        ...                   terminated=[False, True], truncated=[False, False])
        >>> len(rollout), rollout.episode_return, rollout.dones.tolist()
        (2, 1.5, [False, True])
    """

    env_name: str = ""
    observations: Tree = field(default_factory=list)  # [T + 1, ...]
    actions: Tree = field(default_factory=list)  # [T, ...]
    rewards: Any = field(default_factory=list)  # [T]
    terminated: Any = field(default_factory=list)  # [T] the task itself ended
    truncated: Any = field(default_factory=list)  # [T] cut off: a limit, not an end of the task
    infos: list[dict[str, Any]] = field(default_factory=list)  # T, or empty when no step had any
    reset_info: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    task: Any = None
    slot: int = -1
    episode: int = -1  # index of the episode: the ticket when a collector issued it
    policy_version: Any = field(default_factory=list)  # [T] or empty
    extras: dict[str, Any] = field(default_factory=dict)  # [T, ...] each, written by the policy
    wall_s: float = 0.0
    started_s: float = 0.0  # seconds since the epoch
    step_latencies: Any = field(default_factory=list)  # [T] seconds each step() took, or empty
    seconds: dict[str, float] = field(default_factory=dict)  # of an executor: "agent", "env", "network", "waiting"
    attempts: int = 1
    error: BaseException | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        ended = f", {type(self.error).__name__}" if self.error is not None else ""
        return f"Rollout({self.env_name!r}, {len(self)} steps, return {self.episode_return:.6g}{ended})"

    @property
    def episode_length(self) -> int:
        """Number of steps."""
        return len(self.rewards)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards."""
        return float(np.sum(np.asarray(self.rewards, dtype=np.float64))) if len(self.rewards) else 0.0

    @property
    def dones(self) -> npt.NDArray[np.bool_]:
        """[T] terminated or truncated."""
        return np.asarray(self.terminated, dtype=np.bool_) | np.asarray(self.truncated, dtype=np.bool_)

    @property
    def failed(self) -> bool:
        """Whether it ended in an error."""
        return self.error is not None

    def arrays(self) -> dict[str, Any]:
        """Everything with a time axis as NumPy arrays (trees of arrays for Dict and Tuple spaces)."""
        observations, actions = self.observations, self.actions
        return {
            "observations": stack_values(observations) if isinstance(observations, list) else observations,
            "actions": stack_values(actions) if isinstance(actions, list) else actions,
            "rewards": np.asarray(self.rewards, dtype=np.float64),
            "terminated": np.asarray(self.terminated, dtype=np.bool_),
            "truncated": np.asarray(self.truncated, dtype=np.bool_),
        }

    def to_tensors(
        self, device: Any = None, *, observation: str | None = None, action: str | None = None, without: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The arrays as PyTorch tensors: observations [T + 1, ...], all others [T, ...]; rewards as float32.

        `observation` and `action` choose one field where these are mappings, e.g. `to_tensors(observation="board")`;
        `without=["actions"]` leaves out what is not numbers.

        Example:
            >>> tensors = Rollout(observations=[[0.0], [1.0]], actions=[1], rewards=[1.0], terminated=[True],
            ...                   truncated=[False]).to_tensors()
            >>> tensors["observations"].shape
            torch.Size([2, 1])
        """
        return _tensors(self._fields(observation, action, without), [self], device)

    def _fields(self, observation: str | None, action: str | None, without: Sequence[str]) -> dict[str, Any]:
        """The arrays with a time axis, of observations and actions only the chosen field."""
        arrays = self.arrays() | {"dones": self.dones}
        if unknown := set(without) - set(arrays):
            raise BadArgument(f"without={sorted(unknown)}: there are {', '.join(arrays)}")
        arrays = {name: values for name, values in arrays.items() if name not in without}
        for name, chosen in (("observations", observation), ("actions", action)):
            if chosen is not None:
                if not isinstance(arrays[name], dict) or chosen not in arrays[name]:
                    there = f"fields {sorted(arrays[name])}" if isinstance(arrays[name], dict) else "no fields"
                    raise BadArgument(f"{name[:-1]}={chosen!r}: the {name} of {self!r} have {there}")
                arrays[name] = arrays[name][chosen]
        return arrays

    def digest(self) -> str:
        """SHA-256 of the data, seed, task and env name, without times and slots."""
        sha = hashlib.sha256()
        for path, leaf in tree_leaves(self.arrays()):
            if leaf.dtype == object:
                payload = json.dumps(to_jsonable(leaf.tolist()), sort_keys=True).encode()
            else:
                payload = np.ascontiguousarray(leaf).tobytes()
            sha.update(f"{path} {leaf.dtype} {leaf.shape} ".encode() + payload)
        sha.update(json.dumps([self.seed, to_jsonable(self.task), self.env_name]).encode())
        return sha.hexdigest()


class Rollouts(list[Rollout]):
    """A list of rollouts.

    Example:
        >>> rollouts = Rollouts([Rollout(env_name="easy", rewards=[1.0, 1.0])])
        >>> rollouts.stats().mean_return
        2.0
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Rollouts: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Rollout | Rollouts:
        picked = super().__getitem__(index)
        return Rollouts(picked) if isinstance(picked, list) else picked

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"Rollouts({len(self)} episodes, {self.total_steps} steps{failed})"

    def __add__(self, other: Iterable[Rollout]) -> Rollouts:  # type: ignore[override]
        return Rollouts([*self, *other])

    @property
    def successes(self) -> Rollouts:
        """Those without an error."""
        return Rollouts(rollout for rollout in self if not rollout.failed)

    @property
    def failures(self) -> Rollouts:
        """Those with an error."""
        return Rollouts(rollout for rollout in self if rollout.failed)

    @property
    def total_steps(self) -> int:
        """Steps of all rollouts, failed ones included."""
        return sum(len(rollout) for rollout in self)

    def stats(self, wall_s: float | None = None) -> Stats:
        """Statistics of these rollouts; failed ones are counted, not averaged."""
        from envfleet.rollout.stats import Stats

        return Stats.of(self, wall_s=wall_s)

    def digest(self) -> str:
        """SHA-256 over the digests of all rollouts, in order."""
        return hashlib.sha256("".join(rollout.digest() for rollout in self).encode()).hexdigest()

    def to_tensors(
        self, device: Any = None, *, observation: str | None = None, action: str | None = None, without: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Padded tensors: observations [B, T + 1, ...], others [B, T, ...], `mask` [B, T], `lengths` [B].

        T is the longest episode; padding is zero and `mask` is False there. Failed rollouts are left out. `observation` and
        `action` choose one field where these are mappings; `without=["actions"]` leaves out what is not numbers.

        Example:
            >>> short = Rollout(observations=[0, 1], actions=[1], rewards=[1.0],
            ...                 terminated=[True], truncated=[False])
            >>> tensors = Rollouts([short]).to_tensors()
            >>> tensors["mask"].tolist()
            [[True]]
        """
        good = self.successes
        if not good:
            raise BadArgument("no successful rollout to make tensors of")
        parts = [rollout._fields(observation, action, without) for rollout in good]
        for rollout, part in zip(good, parts):
            _check_numbers(part, rollout)
        lengths = np.array([len(rollout) for rollout in good])
        longest = int(lengths.max())

        def pad(*leaves: npt.NDArray[Any]) -> npt.NDArray[Any]:
            extra = tree_length(leaves[0]) - int(lengths[0])  # 1 for observations
            room = np.zeros((len(leaves), longest + extra, *leaves[0].shape[1:]), dtype=leaves[0].dtype)
            for row, leaf in zip(room, leaves):
                row[: len(leaf)] = leaf
            return room

        padded = tree_map(pad, *parts)
        padded["mask"] = np.arange(longest)[None, :] < lengths[:, None]
        padded["lengths"] = lengths
        return _tensors(padded, [], device)

    def save(self, directory: str | Path, format: Literal["parquet", "minari"] = "parquet", **options: Any) -> Path:
        """Write a dataset directory: "parquet" (default) or "minari"; see docs/datasets.md."""
        from envfleet.rollout.datasets.open_dataset import save_rollouts

        return save_rollouts(self, directory, format=format, **options)

    @classmethod
    def load(cls, directory: str | Path) -> Rollouts:
        """Read all episodes of a dataset directory, also one a killed writer left behind."""
        from envfleet.rollout.datasets.open_dataset import iter_rollouts

        return cls(sorted(iter_rollouts(directory), key=lambda rollout: rollout.episode))


def _check_numbers(arrays: dict[str, Any], rollout: Rollout) -> None:
    for path, leaf in tree_leaves(arrays):
        if leaf.dtype == object:
            kinds = ", ".join(sorted({type(value).__name__ for value in leaf}))
            raise BadArgument(
                f"{path} of {rollout!r} (episode {rollout.episode}) is not an array of numbers of one shape, but {kinds}: "
                'choose a field that is, e.g. to_tensors(observation="board"), or leave it out with to_tensors(without=[…])'
            )


def _tensors(arrays: dict[str, Any], checked: Iterable[Rollout], device: Any) -> dict[str, Any]:
    with from_extra("train"):
        import torch
    for rollout in checked:
        _check_numbers(arrays, rollout)

    def tensor(leaf: npt.NDArray[Any]) -> Any:
        # Networks are float32; float64 rewards and observations would promote every product they meet.
        narrow = leaf.astype(np.float32) if leaf.dtype == np.float64 else np.ascontiguousarray(leaf)
        return torch.as_tensor(narrow, device=device)

    tensors: dict[str, Any] = tree_map(tensor, arrays)
    return tensors
