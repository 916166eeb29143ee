"""The short way of `SegmentRun.collect`, for the case a trainer is in all day long.

All slots are stepped together, by a policy that vouches for its answers (`answers_fit = True`). Then a row of the segment is the fleet's row: it is copied whole, once, instead of slot by slot. Ends,
seeds, tasks and the ledger stay `SegmentRun`'s, and a row in which anything is out of the ordinary is handed to
it as it is. The result is the same to the byte; a test compares the two ways.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from envfleet.errors import FaultError
from envfleet.rollout.policy_protocol import Answer, Ask
from envfleet.rollout.segments.segment import Segment
from envfleet.slots.layout import READY
from envfleet.util.trees import Tree, tree_leaves, tree_map

if TYPE_CHECKING:
    from envfleet.rollout.segments.collect_segments import SegmentRun


def fits(run: SegmentRun) -> bool:
    """Whether this run can be collected the short way."""
    engine = run.engine
    plain = all(leaf.dtype != object for _, leaf in tree_leaves(run.obs))
    trusted = bool(getattr(engine.policy, "answers_fit", False))
    return plain and trusted and engine.mode == "sync" and not engine._warmup


def collect(run: SegmentRun, num_steps: int) -> Segment:
    """Make `num_steps` steps of every slot, together."""
    run.at = np.zeros(run.fleet.num_envs, dtype=np.int64)
    run.ends = []
    # One row more than the segment has: the observations that follow step t are those that step t + 1 acts on.
    room: Tree = tree_map(lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), run.obs)
    _set(room, 0, run.obs)
    try:
        for t in range(num_steps):
            _step(run, room, t, num_steps)
    except BaseException as error:
        run.engine.out[:] = run.fleet.is_out
        if isinstance(error, FaultError):
            run._fault(error.fault.slot, READY)
        run.engine.drain()
        raise
    assert run.segment is not None
    segment, run.segment = run.segment, None
    segment.obs = tree_map(lambda leaf: leaf[:num_steps], room)
    run.obs = tree_map(lambda leaf: leaf[num_steps].copy(), room)
    run._close(segment)
    return segment


def _step(run: SegmentRun, room: Tree, t: int, num_steps: int) -> None:
    fleet, slots, clock = run.fleet, run.fleet._all, run.engine.clock
    begin = time.perf_counter()
    obs = _row(room, t)
    ask = Ask(
        obs=obs,
        slots=slots,
        episode=run.episode * fleet.num_envs + slots,
        step=run.step.copy(),
        task=[fleet.task_value(task) for task in run.task] if run.tasks is not None else [],
        columns=run.columns,
        seed=run.engine.seed,
    )
    answer: Answer = run.engine._call(ask)
    clock.policy_s += time.perf_counter() - begin
    if t == 0:
        run.segment = run._empty(num_steps, answer.actions)
        for name, values in answer.extras.items():
            run.segment.extras[name] = np.zeros((num_steps, *values.shape), dtype=values.dtype)
    segment = run.segment
    assert segment is not None
    _set(segment.action, t, answer.actions)
    segment.policy_version[t] = run.engine.policy.version
    for name, values in answer.extras.items():
        segment.extras[name][t] = values
    for name, values in run.columns.items():
        segment.columns[name][t] = values
    batch = run.engine.step(answer.actions)
    begin = time.perf_counter()
    if (batch.status != READY).any() or not batch.scored.all() or run.max_steps is not None:
        run.obs = tree_map(np.array, obs)  # a copy of its own: it is written into
        run.at[:] = t
        run._take(fleet._batch(slots, True))
        _set(room, t + 1, run.obs)
    else:
        _take(run, segment, room, t, batch)
    clock.book_s += time.perf_counter() - begin


def _take(run: SegmentRun, segment: Segment, room: Tree, t: int, batch: Any) -> None:
    """What `SegmentRun._take` does, for a row in which every slot made a transition."""
    reward = batch.reward
    segment.reward[t] = reward
    segment.terminated[t] = batch.terminated
    segment.truncated[t] = batch.truncated
    segment.scored[t] = True
    segment.episode[t] = run.episode
    segment.step[t] = run.step
    segment.task[t] = run.task
    run.step += 1
    run.ep_return += reward
    _set(room, t + 1, batch.obs)
    for name, values in run.columns.items():
        values[...] = getattr(batch, name)
    ended = np.flatnonzero(segment.terminated[t] | segment.truncated[t])
    if len(ended):
        final = batch.final_obs
        for slot in ended.tolist():
            last = tree_map(lambda leaf, slot=slot: np.array(leaf[slot]), final)
            run.ends.append((t, slot, float(run.ep_return[slot]), int(run.step[slot]), last))
        run.obs = _row(room, t + 1)
        run._begin_next(ended, ended[:0], ended[:0])


def _row(tree: Tree, t: int) -> Tree:
    return tree[t] if isinstance(tree, np.ndarray) else tree_map(lambda leaf: leaf[t], tree)


def _set(tree: Tree, t: int, rows: Tree) -> None:
    if isinstance(tree, np.ndarray):
        tree[t] = rows
    else:
        for (_, leaf), (_, row) in zip(tree_leaves(tree), tree_leaves(rows)):
            leaf[t] = row
