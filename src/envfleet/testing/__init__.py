"""For tests of fleets and of your own backends: canonical streams and their hashes, leak snapshots, a proxy with faults.

    pytest tests/conformance --backend mine.py:Mine

runs the conformance suite on a backend of yours; `envfleet.testing.conformance` has the same checks as functions.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from envfleet.core.batch import Batch
from envfleet.core.fleet import Fleet

# -- canonical bytes ----------------------------------------------------------------------------------------------


def canonical(value: Any) -> bytes:
    """A value as bytes that are equal exactly when the values are: type, dtype, shape and content, NaNs included.

    Example:
        >>> canonical({"b": 1, "a": np.float32(2)}) == canonical({"a": np.float32(2), "b": 1})
        True
        >>> canonical(np.float32(2)) == canonical(np.float64(2))
        False
    """
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return _tagged("a", f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return _tagged("s", value.dtype.str.encode() + value.tobytes())
    if isinstance(value, np.ndarray):
        return _tagged("o", str(value.shape).encode() + b"".join(canonical(item) for item in value.ravel()))
    if isinstance(value, Mapping):
        items = sorted((canonical(key), canonical(item)) for key, item in value.items())
        return _tagged("d", b"".join(key + item for key, item in items))
    if isinstance(value, (tuple, list)):
        return _tagged("t" if isinstance(value, tuple) else "l", b"".join(canonical(item) for item in value))
    if isinstance(value, float):
        return _tagged("f", struct.pack("=d", value))
    if isinstance(value, (bool, int, str, bytes, type(None))):
        return _tagged(type(value).__name__, repr(value).encode())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _tagged(type(value).__name__, canonical(dict(vars(value))))
    return _tagged(type(value).__qualname__, repr(value).encode())


def _tagged(tag: str, data: bytes) -> bytes:
    return f"{tag}:{len(data)}:".encode() + data


def leaf_rows(batch: Batch, tree: Any) -> list[list[Any]]:
    """`batch.obs` or `batch.final_obs`, row by row: the row's value of every leaf of the space.

    Example:
        >>> from envfleet import make
        >>> with make("CartPole-v1", 2, backend="serial") as fleet:
        ...     batch = fleet.reset(seed=0)
        >>> [len(row) for row in leaf_rows(batch, batch.obs)]
        [1, 1]
    """
    columns = [reduce(getitem, leaf.path, tree) for leaf in batch._slab.obs_leaves]
    return [[column[i] for column in columns] for i in range(len(batch))]


class Stream:
    """Transitions of a fleet, slot by slot, and their SHA-256: the same however the slots were interleaved.

    Each row counts with its identity (slot, episode, step, task, seed), its numbers, flags, observation, and, where the
    episode ended, final observation; with `with_info`, infos too.

    Example:
        >>> import envfleet as ef
        >>> def digest(workers):
        ...     with ef.make("CartPole-v1", 3, backend="thread", num_workers=workers) as fleet:
        ...         return record(fleet, num_steps=50, seed=1).digest()
        >>> digest(1) == digest(3)
        True
    """

    def __init__(self, with_info: bool = True) -> None:
        self.with_info = with_info
        self.rows: dict[int, int] = {}
        self._hashes: dict[int, Any] = {}

    def add(self, batch: Batch) -> None:
        """Take in every row of a batch."""
        obs, final_obs, ended = leaf_rows(batch, batch.obs), leaf_rows(batch, batch.final_obs), batch._flagged
        info, final_info = batch.info, batch.final_info
        scalars = np.stack(
            [batch.slots, batch.episode, batch.step, batch.length, batch.task, batch.seed, batch.status], axis=1
        ).astype(np.int64)
        numbers = np.stack([batch.reward, batch.ep_return], axis=1)
        flags = np.stack([batch.terminated, batch.truncated, batch.scored, batch.active], axis=1)
        for i, slot in enumerate(batch.slots.tolist()):
            parts = scalars[i].tobytes() + numbers[i].tobytes() + flags[i].tobytes() + canonical(obs[i])
            parts += batch.ended[i].tobytes() + canonical([column[i] for column in batch.columns.values()])
            if ended[i]:
                parts += canonical(final_obs[i])
            if self.with_info:
                parts += canonical(info[i]) + canonical(final_info[i])
            self._hashes.setdefault(slot, hashlib.sha256()).update(parts)
            self.rows[slot] = self.rows.get(slot, 0) + 1

    def slot_digest(self, slot: int) -> str:
        """The hash of one slot's rows."""
        return str(self._hashes[slot].hexdigest())

    def digest(self) -> str:
        """The hash of all slots' rows."""
        whole = hashlib.sha256()
        for slot in sorted(self._hashes):
            whole.update(f"{slot}:{self.rows[slot]}:{self.slot_digest(slot)};".encode())
        return whole.hexdigest()


class Actions:
    """Random actions drawn per slot, so that a slot gets the same ones however slots are interleaved.

    Example:
        >>> import gymnasium as gym
        >>> draw = Actions(gym.spaces.Discrete(5), num_slots=2, seed=0)
        >>> a = draw.of([0, 1]); b = draw.of([1]); len(a), len(b)
        (2, 1)
    """

    def __init__(self, space: Any, num_slots: int, seed: int = 0) -> None:
        self._spaces = [copy.deepcopy(space) for _ in range(num_slots)]
        for slot, own in enumerate(self._spaces):
            own.seed(seed + slot)
        self._space = space

    def of(self, slots: Any) -> Any:
        """A batch of actions for these slots, as Gymnasium batches them."""
        drawn = [self._spaces[int(slot)].sample() for slot in slots]
        return concatenate(self._space, drawn, create_empty_array(self._space, len(drawn)))  # type: ignore[arg-type]


def record(fleet: Fleet, num_steps: int, seed: int = 0, with_info: bool = True, at_least: int | None = None) -> Stream:
    """Reset with a seed and step every slot `num_steps` times; with `at_least`, asynchronously.

    Example:
        >>> from envfleet import make
        >>> with make("CartPole-v1", 2, backend="serial") as one, make("CartPole-v1", 2, backend="thread") as two:
        ...     record(one, 20).digest() == record(two, 20).digest()
        True
    """
    stream = Stream(with_info)
    actions = Actions(fleet.single_action_space, fleet.num_envs, seed)
    stream.add(fleet.reset(seed=seed))
    if at_least is None:
        for _ in range(num_steps):
            stream.add(fleet.step(actions.of(range(fleet.num_envs))))
        return stream
    left = np.full(fleet.num_envs, num_steps - 1)
    fleet.send(actions.of(range(fleet.num_envs)))
    out = fleet.num_envs
    while out:
        batch = fleet.recv(at_least=min(at_least, out))
        stream.add(batch)
        again = batch.slots[left[batch.slots] > 0]
        left[again] -= 1
        out -= len(batch) - len(again)
        if len(again):
            fleet.send(actions.of(again), again)
    return stream


# -- leaks --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process holds: open descriptors, threads, descendants, entries of /dev/shm.

    Example:
        >>> before = Held.now()
        >>> Held.now().beyond(before)
        {}
    """

    fds: frozenset[str]
    threads: frozenset[str]
    processes: frozenset[int]
    shm: frozenset[str]

    @classmethod
    def now(cls) -> Held:
        """What this process holds now."""
        return cls(
            frozenset(_fds()),
            frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
            frozenset(descendants(os.getpid())),
            frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset(),
        )

    def beyond(self, before: Held) -> dict[str, list[Any]]:
        """What this holds beyond `before`."""
        found = {
            field.name: sorted(getattr(self, field.name) - getattr(before, field.name), key=str)
            for field in dataclasses.fields(self)
        }
        return {name: extra for name, extra in found.items() if extra}


def leaks_since(before: Held, within_s: float = 5.0) -> dict[str, list[Any]]:
    """What is still held beyond `before` after at most `within_s`; {} as soon as nothing is.

    Example:
        >>> before = Held.now()
        >>> file = open("/dev/null")
        >>> list(leaks_since(before, within_s=0))
        ['fds']
        >>> file.close()
    """
    deadline = time.monotonic() + within_s
    while True:
        found = Held.now().beyond(before)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def _fds() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            yield f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}"
        except OSError:
            continue  # the descriptor of this very listing


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, zombies left out.

    Example:
        >>> os.getpid() in descendants(os.getppid())
        True
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, below = [], {pid}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found += sorted(below)
    return found


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether a condition became true in time. For conditions outside of fleets, which have `recv`.

    Example:
        >>> wait_until(lambda: True)
        True
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie.

    Example:
        >>> alive(os.getpid())
        True
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no such process
        return False


def __getattr__(name: str) -> Any:
    if name == "ChaosProxy":
        from envfleet.testing.flaky_proxy import ChaosProxy

        return ChaosProxy
    raise AttributeError(f"module 'envfleet.testing' has no attribute {name!r}")
