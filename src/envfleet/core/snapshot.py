"""Copies of running environments: taken from slots, and put back into these or other slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from envfleet.backends.base import Backend, EnvState
from envfleet.core.slot_table import SlotTable
from envfleet.errors import BadArgument
from envfleet.faults.failure import Failure
from envfleet.slots.layout import READY
from envfleet.slots.slab import Slots

#: Parts of the head that stay with the slot: how many episodes it has begun, how long it worked, and what its row of actions holds.
_OF_THE_SLOT = ("started", "step_ns", "busy_ns", "command", "action_type")
_TASKS = ("now_task", "next_task")


@dataclasses.dataclass(frozen=True, repr=False)
class Snapshot:
    """Environments as they were: state, random stream, task, counters and observation. Made by `Fleet.snapshot`.

    It is plain bytes and does not belong to a fleet: any fleet of the same environment with the same options can restore it.
    """

    env: str
    states: tuple[EnvState, ...]  # [k]
    heads: NDArray[np.void]  # [k]
    obs: NDArray[np.generic]  # [k, 1, …]
    tasks: Mapping[int, bytes]  # those that the heads name, pickled: another fleet has other numbers for them

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        size_bytes = sum(len(state.memory) for state in self.states) + self.heads.nbytes + self.obs.nbytes
        return f"Snapshot({len(self)} × {self.env}, {size_bytes:,} bytes)"


def take(backend: Backend, slots: Slots, table: SlotTable) -> Snapshot:
    """A snapshot of slots that are idle."""
    states, slab = backend.states(slots), backend.slab
    heads = slab.head[slots].copy()
    tasks = {task: table.task_blob(task) for name in _TASKS for task in heads[name].tolist() if task >= 0}
    return Snapshot(backend.recipe.name, tuple(states), heads, slab.arrays["obs/0"][slots].copy(), tasks)


def put_back(backend: Backend, slots: Slots, snapshot: Snapshot, table: SlotTable) -> None:
    """Give idle slots the environments of a snapshot. What runs there then is a new episode of the slot, begun in the middle."""
    slab = backend.slab
    if len(snapshot) not in (1, len(slots)):
        raise BadArgument(
            f"a snapshot of {len(snapshot)} environments does not fit {len(slots)} slots: give as many slots, or one environment"
        )
    rows = np.zeros(len(slots), np.int64) if len(snapshot) == 1 else np.arange(len(slots))
    states = [snapshot.states[row] for row in rows]
    for slot, there, here in zip(slots.tolist(), states, backend.states(slots)):
        if there.kind != here.kind or len(there.memory) != len(here.memory):
            raise BadArgument(f"this is a snapshot of {there.kind}, and slot {slot} has {here.kind}")
    if snapshot.heads.dtype != slab.head.dtype or snapshot.obs.shape[1:] != slab.arrays["obs/0"].shape[1:]:
        raise BadArgument(f"this is a snapshot of {snapshot.env}, and the fleet runs {backend.recipe.name}")
    heads = snapshot.heads[rows]
    ids = {task: table.id_of(blob, backend.give_tasks) for task, blob in snapshot.tasks.items()}
    for name in _TASKS:
        heads[name] = [ids.get(task, -1) for task in heads[name].tolist()]
    for name in _OF_THE_SLOT:
        heads[name] = slab.head[name][slots]
    heads["started"] += 1
    heads["episode"] = heads["started"] - 1
    # The row is no transition: that was counted where the snapshot was taken.
    heads["reward"], heads["terminated"], heads["truncated"], heads["scored"] = 0.0, False, False, False
    heads["task"], heads["seed"], heads["length"] = heads["now_task"], heads["now_seed"], heads["now_length"]
    heads["step"], heads["ep_return"], heads["status"] = heads["now_length"] - 1, heads["now_return"], READY
    # An exception may come at any moment (Ctrl-C): until all is written, these slots count as failed.
    broken = Failure("call", "it was interrupted while a snapshot was put into it", "")
    backend.failures.update(dict.fromkeys(slots.tolist(), broken))
    slab.head[slots] = heads
    slab.arrays["obs/0"][slots] = snapshot.obs[rows]
    backend.set_states(slots, states)
    for slot in slots.tolist():
        del backend.failures[slot]
