"""Collecting [T, B] segments over a fleet: the loop behind `Collector.segment`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.core.batch import Batch
from envfleet.errors import BadArgument, FaultError
from envfleet.rollout.engine import Engine
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.policy_protocol import Ask
from envfleet.rollout.rollout_errors import all_gone
from envfleet.rollout.segments import lockstep
from envfleet.rollout.segments.segment import Segment
from envfleet.rollout.stats import StatsBuilder
from envfleet.rollout.tickets import TaskSource
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.util.seeding import episode_seed
from envfleet.util.trees import Tree, as_columns, tree_leaves, tree_map, tree_rows

Ints = npt.NDArray[np.int64]


class SegmentRun:
    """Slots that never stop: every segment takes up where the last one left off.

    Every slot makes exactly T steps a segment in every mode, so the data of a slot do not depend on how
    fast the others are. Episode e of slot b has the seed of (run, "segment", b, e) and the task number e *
    B + b.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        tasks: TaskSource | None,
        max_steps: int | None,
        stats: StatsBuilder,
        env_name: str,
    ) -> None:
        fleet = engine.fleet
        if fleet.on_end != "reset":
            raise BadArgument('segment() needs a fleet with on_end="reset": every row of a segment is a transition')
        self.engine, self.fleet, self.ledger = engine, fleet, ledger
        self.tasks, self.max_steps, self.stats, self.env_name = tasks, max_steps, stats, env_name
        count = fleet.num_envs
        self.episode = np.zeros(count, dtype=np.int64)  # [slot] running episode of the slot, as we count
        self.step = np.zeros(count, dtype=np.int64)  # [slot]
        self.ep_return = np.zeros(count)  # [slot]
        self.running = np.ones(count, dtype=np.bool_)  # [slot] an episode the ledger knows as in flight
        slots = np.arange(count)
        batch = fleet.reset(seed=self._seeds(slots), tasks=self._tasks_of(slots))
        self.obs: Tree = tree_map(np.array, as_columns(fleet.single_observation_space, batch.obs))
        self.columns = {name: np.array(getattr(batch, name)) for name in fleet.layout.columns}
        self.task = np.array(batch.task)
        self.ledger.start(count)
        self._begin(batch)
        self._refused_resets(batch)
        self._assign_next(slots)
        self.segment: Segment | None = None  # the one being collected

    def _begin(self, batch: Batch) -> None:
        """Runs with agents note here who is there at first."""

    def _reseated(self, batch: Batch) -> None:
        """Rows that did not come from `collect` (an episode played again): runs with agents note who is there."""

    def _seeds(self, slots: Ints, ahead: int = 0) -> list[int]:
        seed = self.engine.seed
        return [episode_seed(seed, "segment", slot, int(self.episode[slot]) + ahead) for slot in slots.tolist()]

    def _tasks_of(self, slots: Ints, ahead: int = 0) -> list[Any] | None:
        if self.tasks is None:
            return None
        count = self.fleet.num_envs
        return [self.tasks((int(self.episode[slot]) + ahead) * count + slot) for slot in slots.tolist()]

    def _assign_next(self, slots: Ints) -> None:
        if len(slots):
            self.fleet.assign(slots, seeds=self._seeds(slots, 1), tasks=self._tasks_of(slots, 1))

    # -- one segment --

    def collect(self, num_steps: int) -> Segment:
        """Make `num_steps` steps of every slot."""
        engine = self.engine
        if lockstep.fits(self):
            return lockstep.collect(self, num_steps)
        self.at = np.zeros(self.fleet.num_envs, dtype=np.int64)  # [slot] steps made of this segment
        self.segment = None
        self.ends: list[tuple[int, int, float, int, Tree]] = []
        try:
            for group in engine.halves(np.arange(self.fleet.num_envs)):
                self._act(group, num_steps)
            while engine.waiting:
                batch = engine.receive()
                begin = time.perf_counter()
                self._take(batch)
                go = batch.slots[self.at[batch.slots] < num_steps]
                engine.clock.book_s += time.perf_counter() - begin
                if len(go):
                    self._act(go, num_steps)
        except BaseException as error:
            if isinstance(error, FaultError):
                self._fault(error.fault.slot, READY)
            engine.drain()
            raise
        assert self.segment is not None
        segment, self.segment = self.segment, None
        self._close(segment)
        return segment

    def _act(self, slots: Ints, num_steps: int) -> None:
        obs = tree_rows(self.obs, slots)
        columns = {name: values[slots] for name, values in self.columns.items()}
        count = self.fleet.num_envs
        ask = Ask(
            obs=obs,
            slots=slots,
            # One number for (slot, episode), the same that tasks are dealt by.
            episode=self.episode[slots] * count + slots,
            step=self.step[slots].copy(),
            task=[self.fleet.task_value(task) for task in self.task[slots]] if self.tasks is not None else [],
            columns=columns,
            seed=self.engine.seed,
        )
        answer, version = self.engine.ask(ask)
        begin = time.perf_counter()
        if self.segment is None:
            self.segment = self._empty(num_steps, answer.actions)
        segment, at = self.segment, self.at[slots]
        _put(segment.obs, obs, at, slots)
        _put(segment.action, answer.actions, at, slots)
        segment.policy_version[at, slots] = version
        for name, values in answer.extras.items():
            if name not in segment.extras:
                shape = (num_steps, count, *values.shape[1:])
                segment.extras[name] = np.zeros(shape, dtype=values.dtype)
            segment.extras[name][at, slots] = values
        for name, values in columns.items():
            segment.columns[name][at, slots] = values
        self.engine.clock.book_s += time.perf_counter() - begin
        self.engine.send(slots, answer.actions)

    def _empty(self, num_steps: int, actions: Tree) -> Segment:
        segment = Segment.empty(num_steps, self.fleet.num_envs, obs=self.obs, action=actions)
        for name, values in self.columns.items():
            segment.columns[name] = np.zeros((num_steps, *values.shape), dtype=values.dtype)
        return segment

    def _take(self, batch: Batch) -> None:
        assert self.segment is not None
        segment, slots, at = self.segment, batch.slots, self.at[batch.slots]
        ended = batch.ended.copy()
        scored = batch.scored & (batch.status == READY)
        segment.reward[at, slots] = np.where(scored, batch.reward, 0.0)
        segment.terminated[at, slots] = batch.terminated
        segment.truncated[at, slots] = batch.truncated
        segment.scored[at, slots] = scored
        segment.episode[at, slots] = self.episode[slots]
        segment.step[at, slots] = self.step[slots]
        segment.task[at, slots] = self.task[slots]
        self.step[slots] += scored
        self.ep_return[slots] += segment.reward[at, slots]
        cut = self._cut(scored & ~ended, slots)
        segment.truncated[at[cut], slots[cut]] = True
        rows = as_columns(self.fleet.single_observation_space, batch.obs)
        if ended.any() or cut.any():
            final = as_columns(self.fleet.single_observation_space, batch.final_obs)
            for row in np.flatnonzero(ended | cut).tolist():
                slot = int(slots[row])
                last = tree_rows(rows if cut[row] else final, row)
                self.ends.append((int(at[row]), slot, float(self.ep_return[slot]), int(self.step[slot]), last))
        _put(self.obs, rows, slots)
        for name, values in self.columns.items():
            values[slots] = getattr(batch, name)
        self.at[slots] += 1
        for row in np.flatnonzero(~scored).tolist():
            self._fault(int(slots[row]), int(batch.status[row]))
        self._begin_next(slots[ended & scored], slots[cut], slots[~scored & (batch.status != QUARANTINED)])

    def _cut(self, going: npt.NDArray[np.bool_], slots: Ints) -> npt.NDArray[np.bool_]:
        if self.max_steps is None:
            return np.zeros(len(slots), dtype=np.bool_)
        reached: npt.NDArray[np.bool_] = going & (self.step[slots] >= self.max_steps)
        return reached

    def _begin_next(self, ended: Ints, cut: Ints, faulted: Ints) -> None:
        """Slots that begin a new episode: by themselves (an end, a restart), or cut off and reset by us."""
        for slot in (*ended.tolist(), *cut.tolist()):
            self.ledger.use()
            self.stats.count(self.env_name, float(self.ep_return[slot]), int(self.step[slot]))
        fresh = np.sort(np.concatenate([ended, cut, faulted]))
        if not len(fresh):
            return
        self.episode[fresh] += 1
        self.step[fresh] = 0
        self.ep_return[fresh] = 0.0
        self.ledger.start(len(fresh))
        self.running[fresh] = True
        if len(cut):
            batch = self.fleet.reset(slots=np.sort(cut))  # seed and task were assigned ahead
            _put(self.obs, as_columns(self.fleet.single_observation_space, batch.obs), batch.slots)
            for name, values in self.columns.items():
                values[batch.slots] = getattr(batch, name)
            self._refused_resets(batch)
        self.task[fresh] = self.fleet.slab.head["now_task"][fresh]
        self._assign_next(fresh)

    def _fault(self, slot: int, status: int) -> None:
        if self.running[slot]:
            self.ledger.fail(self.engine.reason(slot)[0])
            self.running[slot] = False
        if status == QUARANTINED and len(self.fleet.quarantined) == self.fleet.num_envs:
            fault = self.engine.reason(slot)[1]
            raise all_gone(fault) from fault.error()

    def _refused_resets(self, batch: Batch) -> None:
        """Resets that failed: the restarted environment has begun another episode."""
        for row in np.flatnonzero(batch.status != READY).tolist():
            slot, status = int(batch.slots[row]), int(batch.status[row])
            self._fault(slot, status)
            if status != QUARANTINED:
                self.ledger.start()
                self.running[slot] = True

    def _close(self, segment: Segment) -> None:
        """What is known at the end only: ends in order, and the observations to go on from."""
        self.ends.sort(key=lambda end: end[:2])
        segment.end_index = np.array([end[:2] for end in self.ends], dtype=np.int64).reshape(-1, 2)
        segment.end_return = np.array([end[2] for end in self.ends], dtype=np.float64)
        segment.end_length = np.array([end[3] for end in self.ends], dtype=np.int64)
        if self.ends:
            segment.final_obs = tree_map(_stacked, *(end[4] for end in self.ends))
        segment.bootstrap_obs = tree_map(np.array, self.obs)
        segment.bootstrap_columns = {name: values.copy() for name, values in self.columns.items()}

    def give_up(self) -> None:
        """The episodes that run are not continued."""
        self.engine.drain()
        self.ledger.drop("running when segments were left", int(self.running.sum()))
        self.running[:] = False


def _stacked(*rows: Any) -> npt.NDArray[Any]:
    if any(not isinstance(row, (np.ndarray, np.generic)) for row in rows):
        stacked = np.empty(len(rows), dtype=object)
        stacked[:] = rows
        return stacked
    return np.stack(rows)


def _put(arrays: Tree, rows: Tree, *index: Ints) -> None:
    there = dict(tree_leaves(rows))
    for path, array in tree_leaves(arrays):
        array[index] = there[path]
