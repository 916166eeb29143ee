"""Copies of running environments: taken from slots, and put back into these or other slots."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from envfleet.backends.base import Backend
from envfleet.errors import BadArgument
from envfleet.faults.failure import Failure
from envfleet.slots.slab import Slots

#: Parts of the head that stay with the slot: how many episodes it has begun, and how long it worked.
_OF_THE_SLOT = ("started", "step_ns", "busy_ns", "command")


@dataclasses.dataclass(frozen=True, repr=False)
class Snapshot:
    """Environments as they were: state, random stream, task, counters and observation. Made by `Fleet.snapshot`.

    It is plain bytes and does not belong to a fleet: any fleet of the same environment can restore it.
    """

    env: str
    states: NDArray[np.uint8]  # [k, bytes]
    heads: NDArray[np.void]  # [k]
    obs: NDArray[np.generic]  # [k, 1, …]

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"Snapshot({len(self)} × {self.env}, {self.states.nbytes + self.heads.nbytes + self.obs.nbytes:,} bytes)"


def take(backend: Backend, slots: Slots) -> Snapshot:
    """A snapshot of slots that are idle."""
    slab = backend.slab
    return Snapshot(backend.recipe.name, backend.states(slots), slab.head[slots].copy(), slab.arrays["obs/0"][slots].copy())


def put_back(backend: Backend, slots: Slots, snapshot: Snapshot) -> None:
    """Give idle slots the environments of a snapshot. What runs there then is a new episode of the slot, begun in the middle."""
    slab = backend.slab
    if len(snapshot) not in (1, len(slots)):
        raise BadArgument(
            f"a snapshot of {len(snapshot)} environments does not fit {len(slots)} slots: give as many slots, or one environment"
        )
    if (
        snapshot.env != backend.recipe.name
        or snapshot.heads.dtype != slab.head.dtype
        or snapshot.obs.shape[1:] != slab.arrays["obs/0"].shape[1:]
    ):
        raise BadArgument(f"this is a snapshot of {snapshot.env}, and the fleet runs {backend.recipe.name}")
    rows = np.zeros(len(slots), np.int64) if len(snapshot) == 1 else np.arange(len(slots))
    heads = snapshot.heads[rows]
    for name in _OF_THE_SLOT:
        heads[name] = slab.head[name][slots]
    heads["started"] += 1
    heads["episode"] = heads["started"] - 1
    # The row is no transition: that was counted where the snapshot was taken.
    heads["reward"], heads["terminated"], heads["truncated"], heads["scored"] = 0.0, False, False, False
    heads["task"], heads["seed"], heads["length"] = heads["now_task"], heads["now_seed"], heads["now_length"]
    heads["step"], heads["ep_return"] = heads["now_length"] - 1, heads["now_return"]
    # An exception may come at any moment (Ctrl-C): until all is written, these slots count as failed.
    broken = Failure("call", "it was interrupted while a snapshot was put into it", "")
    backend.failures.update(dict.fromkeys(slots.tolist(), broken))
    slab.head[slots] = heads
    slab.arrays["obs/0"][slots] = snapshot.obs[rows]
    backend.set_states(slots, snapshot.states[rows])
    for slot in slots.tolist():
        del backend.failures[slot]
