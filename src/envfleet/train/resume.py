"""The episodes that are running when a checkpoint is written, and how a resumed run gets back into them.

A running episode is given by its seed, its task and its actions so far. A resumed run resets every slot with that seed,
plays the actions again and compares the observation it arrives at with the stored one, bit for bit. Where they
differ the environment is not determined by its seed, and the episode is ended there instead. An environment that
offers `get_state` and `set_state` is put back by them, without a replay.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.core.fleet import Fleet
from envfleet.rollout.collector import Collector
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.segments.agent_segment import segment_run
from envfleet.rollout.segments.collect_segments import SegmentRun
from envfleet.rollout.segments.segment import Segment
from envfleet.util.trees import Tree, tree_leaves, tree_length, tree_map, tree_stack


class Histories:
    """The actions of every slot's running episode, taken from the segments as they come.

    Example:
        >>> histories = Histories(num_slots=1)
        >>> segment = Segment.empty(3, 1, obs=np.zeros((1, 1)), action=np.zeros(1, np.int64))
        >>> segment.action[:, 0], segment.terminated[1, 0] = [5, 6, 7], True
        >>> histories.take(segment)
        >>> histories.actions(0).tolist()
        [7]
    """

    def __init__(self, num_slots: int) -> None:
        self._parts: list[list[Tree]] = [[] for _ in range(num_slots)]

    def take(self, segment: Segment) -> None:
        """Add a segment."""
        ended = segment.ended
        steps = segment.num_steps
        last_end = np.where(ended.any(axis=0), steps - 1 - ended[::-1].argmax(axis=0), -1)
        for slot, end in enumerate(last_end.tolist()):
            if end >= 0:
                self._parts[slot] = []
            if end + 1 < steps:
                self._parts[slot].append(
                    tree_map(lambda leaf, at=(end + 1, slot): leaf[at[0] :, at[1]], segment.action)
                )

    def actions(self, slot: int) -> Tree:
        """Return the actions of the slot's running episode, in order."""
        parts = self._parts[slot]
        if len(parts) > 1:
            self._parts[slot] = parts = [tree_map(lambda *leaves: np.concatenate(leaves), *parts)]
        return parts[0] if parts else np.zeros(0)

    def set(self, slot: int, actions: Tree) -> None:
        """Begin from actions that a checkpoint stored."""
        self._parts[slot] = [actions] if tree_length(actions) else []


def capture(collector: Collector, histories: Histories) -> dict[str, Any] | None:
    """Return what a checkpoint stores of a collector between two segments."""
    run = collector._segments
    if run is None:
        return None
    fleet = collector.fleet
    states = _states(fleet)
    return {
        "episode": run.episode.copy(),
        "step": run.step.copy(),
        "ep_return": run.ep_return.copy(),
        "obs": [np.array(leaf) for _, leaf in tree_leaves(run.obs)],
        "columns": {name: values.copy() for name, values in run.columns.items()},
        "actions": [histories.actions(slot) for slot in range(fleet.num_envs)] if states is None else None,
        "states": states,
        "ledger": ledger_state(collector.ledger),
    }


def episodes_so_far(collector: Collector) -> dict[str, Any] | None:
    """Return which episodes are running, and nothing to restore them by: a run that resumes from it begins the next ones."""
    run = collector._segments
    if run is None:
        return None
    return {"episode": run.episode.copy(), "ledger": ledger_state(collector.ledger)}


def restore(collector: Collector, histories: Histories, stored: dict[str, Any] | None, how: str) -> NDArray[np.int64]:
    """Bring a new collector to where a checkpoint was taken; return the slots whose episodes had to be ended.

    `how` is "replay", or "end": every running episode is dropped, and the next one begins.
    """
    nobody = np.zeros(0, dtype=np.int64)
    if stored is None:
        return nobody
    fleet = collector.fleet
    run = _open(collector)
    run.episode[:] = stored["episode"]
    load_ledger(collector.ledger, stored["ledger"])
    if how == "end" or "obs" not in stored:
        how = "end"
        ended = np.arange(fleet.num_envs)
    else:
        _back_in(run, stored)
        differs = _differs(run, stored)
        ended = np.flatnonzero(differs)
        run.step[:] = stored["step"]
        run.ep_return[:] = stored["ep_return"]
        for slot in np.flatnonzero(~differs).tolist():
            actions = stored["actions"]
            histories.set(slot, tree_map(np.array, actions[slot]) if actions is not None else np.zeros(0))
    if len(ended):
        _begin_anew(run, ended)
    run._assign_next(np.arange(fleet.num_envs))
    if how != "end" and len(ended):
        warnings.warn(
            f"the running episodes of slots {ended.tolist()} could not be restored (the environment is not determined "
            "by its seed and offers no get_state/set_state); they were ended, so the run goes on but not bit by bit",
            stacklevel=2,
        )
    return ended


def _open(collector: Collector) -> SegmentRun:
    if collector._segments is None:
        parts = collector._engine, collector.ledger, collector._tasks, collector.max_steps
        collector._segments = segment_run(*parts, collector._stats, collector.env_name)
    return collector._segments


def _back_in(run: SegmentRun, stored: dict[str, Any]) -> None:
    """Reset every slot into its running episode, and play the stored actions or set the stored state."""
    fleet = run.fleet
    slots = np.arange(fleet.num_envs)
    batch = fleet.reset(seed=run._seeds(slots), tasks=run._tasks_of(slots))
    _read(run, batch)
    run.task[:] = batch.task
    if stored["states"] is not None:
        fleet._call("call", "set_state", [(state,) for state in stored["states"]], {}, None, each=True)
        _set_elapsed(fleet, stored["step"])
        for (_, leaf), old in zip(tree_leaves(run.obs), stored["obs"]):
            leaf[...] = old  # set_state shows nothing; what was seen is in the checkpoint
        for name, values in stored["columns"].items():
            run.columns[name][...] = values
        return
    actions = [tree_map(np.array, part) for part in stored["actions"]]
    lengths = np.array([tree_length(part) for part in actions])
    for t in range(int(lengths.max(initial=0))):
        going = np.flatnonzero(lengths > t)
        fleet.send(tree_stack([tree_map(lambda leaf, t=t: leaf[t], actions[slot]) for slot in going]), going)
        _read(run, fleet.recv(going))


def _read(run: SegmentRun, batch: Any) -> None:
    from envfleet.util.trees import as_columns

    def put(array: NDArray[Any], rows: NDArray[Any]) -> None:
        array[batch.slots] = rows

    tree_map(put, run.obs, as_columns(run.fleet.single_observation_space, batch.obs))
    for name, values in run.columns.items():
        values[batch.slots] = getattr(batch, name)
    run._reseated(batch)


def _differs(run: SegmentRun, stored: dict[str, Any]) -> NDArray[np.bool_]:
    count = run.fleet.num_envs
    differs = np.zeros(count, dtype=bool)
    for (_, leaf), old in zip(tree_leaves(run.obs), stored["obs"]):
        same = leaf.reshape(count, -1) == old.reshape(count, -1)
        both_nan = (leaf != leaf).reshape(count, -1) & (old != old).reshape(count, -1)
        differs |= ~(same | both_nan).all(axis=1)
    return differs


def _begin_anew(run: SegmentRun, slots: NDArray[np.int64]) -> None:
    run.ledger.drop("ended when the run was resumed", len(slots))
    run.ledger.start(len(slots))
    run.episode[slots] += 1
    run.step[slots] = 0
    run.ep_return[slots] = 0.0
    batch = run.fleet.reset(seed=run._seeds(slots), tasks=run._tasks_of(slots), slots=slots)
    _read(run, batch)
    run.task[slots] = batch.task


def _states(fleet: Fleet) -> list[Any] | None:
    """What `get_state` of every environment gives; None where they have none."""
    return list(fleet.call("get_state")) if _have(fleet, "get_state") else None


def _set_elapsed(fleet: Fleet, steps: NDArray[np.int64]) -> None:
    # Gymnasium's TimeLimit counts outside the environment, so its count is not in the environment's state.
    if _have(fleet, "_elapsed_steps"):
        fleet.set_attr("_elapsed_steps", [int(step) for step in steps])


def _have(fleet: Fleet, name: str) -> bool:
    if fleet.agents:  # episodes of many agents are played again
        return False
    # Asked of the environment, because a call that fails would be counted as a fault of the slot.
    return all(fleet.call("has_wrapper_attr", name))


def ledger_state(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger as plain values."""
    return {
        "started": ledger.started,
        "used": ledger.used,
        "retried": ledger.retried,
        "dropped": dict(ledger.dropped),
        "failed": dict(ledger.failed),
    }


def load_ledger(ledger: Ledger, state: dict[str, Any]) -> None:
    """Take over what `ledger_state` returned."""
    ledger.started, ledger.used, ledger.retried = state["started"], state["used"], state["retried"]
    ledger.dropped, ledger.failed = Counter(state["dropped"]), Counter(state["failed"])
