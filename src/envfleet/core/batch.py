"""The record that `recv`, `step` and `reset` return."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

import numpy as np

from envfleet.core.infos import read_info
from envfleet.errors import EnvFailed
from envfleet.faults.failure import Failure, Fault
from envfleet.slots.layout import FAULT, QUARANTINED, gather
from envfleet.slots.slab import Slab, Slots, make_loud
from envfleet.util.trees import tree_leaves

Array = np.ndarray[Any, Any]


_NAMES = ("obs", "reward", "terminated", "truncated", "ended", "info", "final_obs", "final_info", "slots", "step", "length",
  "ep_return", "episode", "seed", "task", "status", "scored", "active", "faulted", "columns")  # fmt: skip
#: What these are called in other libraries.
_MEANT = {"observation": "obs", "observations": "obs", "next_obs": "obs", "rewards": "reward", "dones": "ended", "done": "ended",
  "infos": "info", "terminations": "terminated", "truncations": "truncated", "final_observation": "final_obs"}  # fmt: skip
_NO_TUPLE = (
    "a Batch cannot be unpacked: read batch.obs, batch.reward, batch.terminated, batch.truncated, batch.info; "
    "envfleet.make_vec gives an environment whose step returns these five as a tuple"
)


class _Scalar:
    """A scalar of every row, as an array."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: Any, owner: type | None = None) -> Array:
        return np.ascontiguousarray(batch._field(self._name)) if batch is not None else self  # type: ignore[return-value]


class Batch:
    """Rows of some slots, ascending, as arrays: read-only fields, and copies unless `copy=False` was given.

    ``obs`` (array, dict or tuple, as Gymnasium batches), ``reward``, ``terminated``, ``truncated``, ``final_obs``
    (valid where ``ended``), ``status``, ``episode``, ``step``, ``length``, ``ep_return``, ``task``, ``seed``, ``scored``,
    ``active``, ``info``, ``final_info``, and every declared column under its name.

    At an end with ``on_end="reset"``, ``obs`` and ``info`` are the first of the next episode; ``final_obs``,
    ``final_info`` and all else belong to the ended episode. ``step`` counts transitions of an episode from 0 and is -1
    on a row that comes from a reset; ``scored`` is False on such rows and on fault rows: they are not transitions.

    With many agents, observations, actions, rewards, returns, flags and the masks have an agent axis after the first, and
    `ended` says that no agent is left; see ``docs/agents.md``.

    Example:
        >>> import envfleet as ef
        >>> with ef.make("CartPole-v1", num_envs=3, backend="serial") as fleet:
        ...     batch = fleet.reset(seed=0)
        ...     batch = fleet.step([0, 1, 0])
        >>> batch.slots.tolist(), batch.reward.tolist(), batch.obs.shape
        ([0, 1, 2], [1.0, 1.0, 1.0], (3, 4))
    """

    slots: Slots
    _columns: dict[str, Array]
    _ended_rows: Array | None
    _final: Any
    _final_info: dict[int, Any]
    _info: dict[int, Any]
    _obs: Any
    _raw: Array
    _slab: Slab

    __slots__ = ("__weakref__", "_columns", "_ended_rows", "_final", "_final_info", "_info", "_obs", "_raw", "_slab", "slots")

    def __init__(self, slab: Slab, slots: Slots, info: dict[int, Any], final_info: dict[int, Any], copy: bool = True) -> None:
        # All scalars of a row are one record: one copy of bytes here, a view per field when it is read.
        index: Slots | slice = _as_slice(slots, slab.num_slots)
        raw = slab.raw[index]
        set_ = object.__setattr__
        set_(self, "slots", slots)
        set_(self, "_slab", slab)
        set_(self, "_raw", raw.copy() if copy and isinstance(index, slice) else raw)
        set_(self, "_obs", slab.tree("obs", index, copy))
        columns = slab.layout.columns
        rows = {name: _rows(slab.arrays[f"column/{name}"], index, copy) for name in columns} if columns else {}
        set_(self, "_columns", rows)
        set_(self, "_info", info)
        set_(self, "_final_info", final_info)
        if copy or not isinstance(index, slice):
            # Final observations are valid at ends only, which are rare: keep those rows, spread them out when asked.
            ended = self._flagged.nonzero()[0]
            set_(self, "_ended_rows", ended)
            set_(self, "_final", slab.tree("final_obs", slots[ended], True) if len(ended) else None)
        else:
            set_(self, "_ended_rows", None)
            set_(self, "_final", slab.tree("final_obs", index, False))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Batch is frozen: {name} cannot be set")

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows, slots {self.slots.tolist() if len(self) < 9 else '…'}, {int(self.ended.sum())} ended)"

    if not TYPE_CHECKING:  # so that type checkers find a misspelt name; they know columns by `batch.columns[name]`

        def __getattr__(self, name: str) -> Any:
            columns = object.__getattribute__(self, "_columns")
            if name in columns:
                return columns[name]
            by_group = {key.partition(":")[2]: value for key, value in columns.items() if key.startswith(f"{name}:")}
            if by_group:
                return by_group
            meant = _MEANT.get(name) or next(iter(difflib.get_close_matches(name, [*_NAMES, *columns], 1)), None)
            hint = f": use batch.{meant}" if meant else f"; it has {', '.join([*_NAMES, *columns])}"
            raise AttributeError(f"a Batch has no {name!r}{hint}")

        def __iter__(self) -> Any:
            raise TypeError(_NO_TUPLE)

        def __getitem__(self, key: Any) -> Any:
            raise TypeError(f"a Batch is read by name, as in batch.{key if isinstance(key, str) else 'obs'}")

    @property
    def columns(self) -> Mapping[str, Array]:
        """The declared columns by name; with many agents of several kinds, `name:group`."""
        return self._columns

    def _field(self, name: str) -> Array:
        """A view of one scalar of every row."""
        raw, (dtype, shape, offset) = self._raw, self._slab.fields[name]
        if shape:
            return np.ndarray((len(raw), *shape), dtype, raw, offset, (*raw.strides, dtype.itemsize))
        return np.ndarray((len(raw),), dtype, raw, offset, raw.strides)

    @property
    def obs(self) -> Any:
        """The observations to act on next."""
        return self._obs

    reward = _Scalar("float64[k].")
    terminated = _Scalar("bool[k]: the episode reached a terminal state.")
    truncated = _Scalar("bool[k]: the episode was cut short (a time limit, a fault).")

    @property
    def ended(self) -> Array:
        """bool[k]: terminated or truncated; with many agents: no agent is left."""
        if self._slab.layout.agents:
            return np.ascontiguousarray(self._field("over"))
        return self._flagged

    @property
    def _flagged(self) -> Array:
        """bool[k]: the rows with a final observation, of one agent at least."""
        flags: Array = self._field("terminated") | self._field("truncated")
        return np.asarray(flags.any(axis=1)) if flags.ndim == 2 else flags

    scored = _Scalar("bool[k]: this row is a real transition.")
    active = _Scalar("bool[k]: there is a running episode that wants an action.")
    ep_return = _Scalar("float64[k]: sum of rewards of the episode so far; complete where `ended`.")
    length = _Scalar("int64[k]: transitions of the episode so far; complete where `ended`.")
    step = _Scalar("int64[k]: index of this transition in its episode; -1 on a row from a reset.")
    episode = _Scalar("int64[k]: index of the row's episode in its slot, from 0.")
    task = _Scalar("int64[k]: id of the episode's task, -1 for none; `fleet.task_value(id)` gives the value.")
    seed = _Scalar("int64[k]: the seed the episode was reset with, -1 where the env's own stream went on.")
    status = _Scalar("uint8[k]: `envfleet.slots.layout` READY, FAULT or QUARANTINED.")

    @property
    def faulted(self) -> Array:
        """bool[k]: rows that hold no data because their env failed or is quarantined."""
        return np.isin(self._field("status"), (FAULT, QUARANTINED))

    @property
    def final_obs(self) -> Any:
        """The last observation of the episode, where `ended`; zeros (None for mailbox leaves) elsewhere."""
        ended = self._ended_rows
        if ended is None:
            return self._final
        values: list[Any] = []
        leaves = self._slab.obs_leaves
        kept = [reduce(getitem, leaf.path, self._final) for leaf in leaves] if len(ended) else [()] * len(leaves)
        for leaf, rows in zip(leaves, kept):
            if leaf.dtype is None:
                items = [None] * len(self)
                for at, row in zip(ended, rows):
                    items[at] = row
                values.append(tuple(items))
            else:
                array = np.zeros((len(self), *leaf.shape), leaf.dtype)
                if len(ended):
                    array[ended] = rows
                values.append(array)
        if self._slab.layout.agents and len(ended):
            flags = self._field("terminated") | self._field("truncated")
            for array, (_, places) in zip(values, self._slab.agent_rows):
                array[~flags[:, places]] = 0
        return gather(self._slab.layout.observation_space, values)

    @property
    def info(self) -> tuple[dict[str, Any], ...]:
        """One dict per row, belonging to `obs`."""
        info = self._info
        return tuple(decoded(info, slot) for slot in self.slots.tolist())

    @property
    def final_info(self) -> tuple[dict[str, Any], ...]:
        """One dict per row, belonging to `final_obs`; empty where the episode goes on."""
        final = self._final_info
        return tuple(decoded(final, slot) if end else {} for slot, end in zip(self.slots.tolist(), self.ended.tolist()))

    def poison(self, slots: Slots) -> None:
        """Overwrite the rows of `slots` (debug mode: they were sent again, so what is here is stale)."""
        rows = np.isin(self.slots, slots)
        arrays = [(array, rows) for array in (self._field("reward"), *self._columns.values(), *_arrays(self._obs))]
        # Of final observations only the rows that ended are kept.
        ended = rows if self._ended_rows is None else rows[self._ended_rows]
        arrays += [(array, ended) for array in _arrays(self._final)]
        for array, which in arrays:
            if isinstance(array, np.ndarray):
                stale = array[which]
                make_loud(stale)
                array[which] = stale


def decoded(info: dict[int, Any], slot: int) -> dict[str, Any]:
    """The info of a slot; bytes from a worker are unpickled once, when first read."""
    value = info.get(slot)
    if value is None:
        return {}
    if isinstance(value, bytes):
        value = info[slot] = _read(value, slot)
    assert isinstance(value, dict)
    return value


def _read(data: bytes, slot: int) -> dict[str, Any]:
    """Read an info. If it cannot be unpickled, this affects its slot only, and only when it is used."""
    try:
        return read_info(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return UnreadableInfo(slot, Failure.of(error, "info"))


class UnreadableInfo(dict[str, Any]):
    """Stands for an info that cannot be unpickled in this process: using it raises EnvFailed.

    Example:
        >>> UnreadableInfo(3, Failure("info", "ImportError: no module named 'tool'", ""))
        <slot 3: its info cannot be unpickled in this process: ImportError: no module named 'tool'>
    """

    def __init__(self, slot: int, failure: Failure) -> None:
        super().__init__()
        cause = f"its info cannot be unpickled in this process: {failure.summary}"
        self._fault = Fault(slot, "failed", "info", cause, traceback=failure.traceback)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise EnvFailed(self._fault)

    __getitem__ = __contains__ = __iter__ = __len__ = __eq__ = __bool__ = __or__ = __ror__ = _refuse
    get = keys = values = items = copy = pop = setdefault = _refuse

    def __repr__(self) -> str:
        return f"<slot {self._fault.slot}: {self._fault.cause}>"


def pick(side: dict[int, Any], slots: Slots) -> dict[int, Any]:
    """What some slots have beside their rows."""
    if not side:
        return {}
    return {slot: side[slot] for slot in slots.tolist() if slot in side}


def _as_slice(slots: Slots, num_slots: int) -> Slots | slice:
    """Contiguous slots as a slice, which gives views; others by index, which copies."""
    count = len(slots)
    if count == num_slots:
        return slice(None)
    if count and int(slots[-1]) - int(slots[0]) + 1 == count:
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def _rows(array: Array, index: Slots | slice, copy: bool) -> Array:
    rows: Array = array[index, 0]
    return rows.copy() if copy and isinstance(index, slice) else rows


def _arrays(tree: Any) -> list[Any]:
    return [leaf for _, leaf in tree_leaves(tree)]
