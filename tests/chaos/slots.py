"""What the model expects of one slot: every row that comes back must be the next row of the model, or a told fault."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import canonical

from .mischief import BIG, CODES, DIES, FAULTS, WILD, outcome_of
from .world import State, advance, begin, ends, info_of, reward_of, view

_FOREVER = 10**9
_SPAWNED = 100  # how many rebuilds of one seed are thought of


class Wrong(Exception):
    """A row that is not what the model says."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """The slot as the caller last saw it."""

    state: State
    episode: int  # the fleet's count
    ep_return: float = 0.0
    waiting: bool = False  # ended, with on_end="wait"
    loose: bool = False  # after a fault: the true count is `episode` or more
    wild: bool = False  # its observation is not the model's (an object that only this process has)


@dataclasses.dataclass(frozen=True)
class Op:
    """What a slot was sent to do."""

    what: str  # "step" or "reset"
    payload: int = 0
    code: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch, as plain values."""

    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


COLUMNS = ("status", "scored", "reward", "terminated", "truncated", "episode", "step", "length", "ep_return", "seed")


def rows_of(batch: Any, task_value: Any) -> list[tuple[int, Row]]:
    """(slot, row) of every row."""
    columns = {name: getattr(batch, name) for name in COLUMNS}
    obs, final = _each(batch.obs, len(batch)), _each(batch.final_obs, len(batch))
    infos, finals, out = _infos(batch, "info"), _infos(batch, "final_info"), []
    for i, slot in enumerate(batch.slots.tolist()):
        values = {name: column[i].item() for name, column in columns.items()}
        task = task_value(int(batch.task[i]))
        values.update(obs=obs[i], final_obs=final[i], info=infos[i], final_info=finals[i])
        values.update(task=-1 if task is None else task, ended=bool(batch.ended[i]))
        out.append((slot, Row(values)))
    return out


def _infos(batch: Any, name: str) -> Any:
    """The infos; what cannot be unpickled may be refused, with an error of ours, when it is looked at."""
    from envfleet.errors import FleetError

    try:
        return getattr(batch, name)
    except FleetError:
        return [None] * len(batch)


def _each(tree: Any, count: int) -> list[Any]:
    if isinstance(tree, dict):
        return [{name: values[i] for name, values in tree.items()} for i in range(count)]
    return [tree[i] for i in range(count)]


@functools.lru_cache(4096)
def spawned(base: int) -> frozenset[int]:
    """The seeds a rebuilt env may get after `base`."""
    return frozenset(
        int(np.random.SeedSequence(base, spawn_key=(k,)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        for k in range(1, _SPAWNED)
    )


class SlotModel:
    """One slot: `seen` are the states it may be in (one, but for calls that were interrupted), `out` what it is doing."""

    def __init__(self, slot: int, shape: str, on_end: str, local: bool) -> None:
        self.slot, self.shape, self.on_end, self.local = slot, shape, on_end, local
        self.seen: list[Seen] = []
        self.delivered: list[Seen] = []  # what a fault row may tell of
        self.out: Op | None = None
        self.excuse = 0  # rows for which a fault is no surprise
        self.why = ""
        self.unseen_tasks: set[int] = set()  # tasks of episodes whose first row was a fault row that was dropped
        self.murky = False  # an interrupted call may have swallowed a row or lost the env
        self.dead = False  # quarantined
        self.known_faults = 0
        self.seeds: set[int | None] = {None}
        self.tasks: set[int] = {-1}
        self.late: list[tuple[int | None, int | None, bool]] = []
        self.bases: list[int] = []

    # -- what is done to it --------------------------------------------------------------------------------------

    def excuse_for(self, rows: int, why: str) -> None:
        """A fault within the next rows has a reason."""
        self.excuse, self.why = max(self.excuse, rows), why

    def assign(self, seed: int | None, task: int | None, sure: bool = True) -> None:
        """The next reset uses these; None leaves as it is."""
        if self.out is not None:  # it counts from the next send; also when nobody knows whether it was heard
            self.late.append((seed, task, sure))
            if seed is not None:
                self.bases.append(seed)
            return
        self._flush()
        if seed is not None:
            self.seeds = {seed} if sure else self.seeds | {seed}
            self.bases.append(seed)
        if task is not None:
            self.tasks = {task} if sure else self.tasks | {task}

    def _flush(self) -> None:
        """What was assigned while it was out counts from now on; what is assigned later still replaces it."""
        late, self.late = self.late, []
        for seed, task, sure in late:
            self.assign(seed, task, sure)

    def sent(self, op: Op) -> None:
        """It was handed over."""
        self.out = None
        self._flush()
        self.out = op
        if op.what == "step":
            outcome = outcome_of(op.code, self.local, self.shape)
            if outcome in (FAULTS, DIES, WILD, "dies or right"):
                self.excuse_for(1, CODES[op.code].name)

    def swallowed(self) -> None:
        """It was out, a call was interrupted, and now it is not: its row was taken, or its env given up."""
        op, self.out = self.out, None
        assert op is not None
        self.seen = [seen for _, seen in self._wants(op)]
        self.delivered = self.delivered + self.seen
        if self.excuse or self.murky:
            self.unseen_tasks |= self.tasks  # it may have been a fault row: then another episode has begun
        if self.excuse or self.murky or not self.seen or len(self.seen) > 8:
            self.seen = []  # nobody knows: it must be reset
        self.murky = True

    # -- what comes back -----------------------------------------------------------------------------------------

    def take(self, row: Row, faults: list[Any]) -> str:
        """Check a row; gives "ready", "reset", "fault" or "quarantined"."""
        op, self.out = self.out, None
        if op is None:
            raise Wrong("a row came back for a slot that was not out")
        if row.status == QUARANTINED:
            return self._quarantined(row)
        if row.status == FAULT:
            return self._fault(row, faults, op)
        if row.status != READY:
            raise Wrong(f"status {row.status}")
        return self._ready(row, op)

    def _ready(self, row: Row, op: Op) -> str:
        wants = self._wants(op)
        matches = [_settled(seen, row, self.on_end) for want, seen in wants if not _differs(want, row.values, self.shape)]
        if not matches:
            raise Wrong(self._explain(row, op, wants))
        self.seen = list(dict.fromkeys(matches))
        self.delivered = list(self.seen)
        self.unseen_tasks.clear()
        state = self.seen[0].state
        if row.step < 0 or (row.ended and self.on_end == "reset"):
            self.seeds, self.tasks = {None}, {state.task}
        if self.excuse:
            self.excuse -= 1
        self.murky = False
        return "ready" if row.scored else "reset"

    def _explain(self, row: Row, op: Op, wants: list[Any]) -> str:
        what = f"slot {self.slot}, {op.what} {op.payload} {CODES[op.code].name if op.code else ''}"
        if not wants:
            return f"{what}: READY, but there can be no good row (seen {self.seen}); row {_short(row.values)}"
        return f"{what}: {_differs(wants[0][0], row.values, self.shape)}; {len(wants)} wanted; row {_short(row.values)}"

    def _quarantined(self, row: Row) -> str:
        if row.scored:
            raise Wrong("a quarantined row is scored")
        if not self.dead and not self.excuse and not self.murky:
            raise Wrong(f"slot {self.slot} was quarantined for nothing")
        self.dead, self.seen = True, []
        return "quarantined"

    def _fault(self, row: Row, faults: list[Any], op: Op) -> str:
        mine = [fault for fault in faults if fault.slot == self.slot]
        new, self.known_faults = mine[self.known_faults :], len(mine)
        if not self.excuse and not self.murky:
            raise Wrong(f"slot {self.slot}: a fault nobody caused: {str(mine[-1:])[:600]}")
        if not new and self.murky:
            new = mine[-1:]  # it was lost, and that was known, before a call was interrupted or its last row came
        if not new:
            raise Wrong(f"slot {self.slot}: FAULT, but nothing new in fleet.faults")
        if row.scored or row.reward != 0 or row.terminated or not row.truncated:
            raise Wrong(f"slot {self.slot}: a fault row with data: {_short(row.values)}")
        said = {d: _fault_differs(d, row, self.shape) for d in self.delivered}
        if said and None not in said.values() and not self._tells_unseen(row):
            raise Wrong(f"slot {self.slot}: the fault row does not tell the last delivered transition: "
                        f"{next(iter(said.values()))}; cause {new[-1].cause[:100]!r}; {_short(row.values)}")  # fmt: skip
        told = [d for d, problem in said.items() if problem is None and not d.waiting and not d.loose]
        if told and not any(fault.episode == row.episode for fault in new):
            raise Wrong(f"slot {self.slot}: row says episode {row.episode}, faults {[f.episode for f in new]}")
        self._begin_anew(row)
        return "fault"

    def _tells_unseen(self, row: Row) -> bool:
        """Whether it tells, whole, the episode that a fault row began which was complete and dropped."""
        numbers = row.final_obs["row"] if self.shape == "mail" else row.final_obs
        seed, task = int(numbers[1]), int(numbers[5])
        first = Seen(begin(self.slot, seed, 0, task), row.episode, loose=True)
        return task in self.unseen_tasks and self._is_seed(seed) and _fault_differs(first, row, self.shape) is None

    def _begin_anew(self, row: Row) -> None:
        numbers = row.obs["row"] if self.shape == "mail" else row.obs
        seed, task = int(numbers[1]), int(numbers[5])
        state = begin(self.slot, seed, 0, task)
        if canonical(view(state, self.shape)) != canonical(row.obs):
            raise Wrong(f"slot {self.slot}: the observation after a fault is no first one: {np.asarray(numbers)[:6]}")
        if task not in self.tasks or not self._is_seed(seed):
            raise Wrong(f"slot {self.slot}: rebuilt with seed {seed} and task {task}; allowed {self.seeds}, {self.tasks}")
        self.seen = self.delivered = [Seen(state, row.episode + 1, loose=True)]
        self.unseen_tasks.clear()
        self.seeds, self.tasks = {None}, {task}
        # Not 0: a second signal to the same worker may be on its way.
        self.excuse, self.murky = (self.excuse if self.excuse >= _FOREVER // 2 else max(0, self.excuse - 1)), False

    def lost_again(self) -> None:
        """Its env was lost after the row was made: that fault is in the list already, and its row comes with the next send."""
        self.known_faults = max(0, self.known_faults - 1)
        self.murky = True

    def _is_seed(self, seed: int) -> bool:
        return seed in self.seeds or seed == -1 or any(seed in spawned(base) or seed == base for base in self.bases)

    # -- what is expected ----------------------------------------------------------------------------------------

    def _wants(self, op: Op) -> list[tuple[dict[str, Any], Seen]]:
        """Every row that would be right, and the slot after it."""
        if op.what == "reset":
            return self._reset_wants()
        found: list[tuple[dict[str, Any], Seen]] = []
        for seen in self.seen:
            if seen.waiting:
                found += self._begun(seen, self._firsts(seen))
            elif outcome_of(op.code, self.local, self.shape) not in (FAULTS, DIES):
                found += self._stepped(seen, op)
        return found

    def _reset_wants(self) -> list[tuple[dict[str, Any], Seen]]:
        found: list[tuple[dict[str, Any], Seen]] = []
        for seen in self.seen or [Seen(begin(self.slot, -1, -1, -1), -1, loose=bool(self.delivered or self.murky))]:
            firsts = self._firsts(seen)
            if self.excuse or self.murky or not self.seen:
                # It may have been rebuilt: then it has a seed of its own, and the count may have gone on.
                seeds = {s for base in self.bases[-6:] for s in spawned(base)} | (self.seeds - {None})
                firsts += [begin(self.slot, seed, 0, task) for seed in seeds for task in self.tasks]
                seen = dataclasses.replace(seen, loose=True)
            found += self._begun(seen, firsts)
        return found

    def _firsts(self, seen: Seen) -> list[State]:
        state = seen.state
        return [
            begin(self.slot, state.seed, state.episode + 1, task) if seed is None else begin(self.slot, seed, 0, task)
            for seed in self.seeds
            for task in self.tasks
        ]

    def _begun(self, seen: Seen, firsts: list[State]) -> list[tuple[dict[str, Any], Seen]]:
        return [
            (_want(state, state, seen.loose, seen.episode + 1, -1, 0.0, 0.0, info_of(state)),
             Seen(state, seen.episode + 1, loose=seen.loose))
            for state in firsts
        ]  # fmt: skip

    def _stepped(self, seen: Seen, op: Op) -> list[tuple[dict[str, Any], Seen]]:
        state = advance(seen.state, op.payload)
        name = CODES[op.code].name if op.code else ""
        wild = outcome_of(op.code, self.local, self.shape) == WILD
        reward = float("nan") if name == "reward_nan" else reward_of(state)
        info: Any = {"big": b"i" * BIG} if name == "info_big" else info_of(state)
        info = _ANY if wild else info
        total, (terminated, truncated) = seen.ep_return + reward, ends(state)
        want = _want(state, state, seen.loose, seen.episode, state.step - 1, reward, total, info)
        want.update(terminated=terminated, truncated=truncated, ended=terminated or truncated, scored=True)
        if wild and name.startswith("mail_"):
            want["obs"] = _ANY
        if not want["ended"]:
            return [(want, Seen(state, seen.episode, total, loose=seen.loose, wild=want["obs"] is _ANY))]
        want["final_obs"] = want["obs"] if want["obs"] is _ANY else state
        want["final_info"] = info
        if self.on_end == "wait":
            return [(want, Seen(state, seen.episode, total, True, seen.loose, want["obs"] is _ANY))]
        return [
            ({**want, "obs": first, "info": info_of(first)}, Seen(first, seen.episode + 1, loose=seen.loose))
            for first in self._firsts(seen)
        ]


_ANY = object()


def _want(obs: State, told: State, loose: bool, episode: int, step: int, reward: float, total: float, info: Any) -> Any:
    # What is cheap to compare comes first: there may be hundreds of these, of observations of megabytes.
    return {
        "seed": told.given_seed, "task": told.task, "step": step, "episode": (episode, loose), "obs": obs, "final_obs": None, "info": info, "final_info": {}, "reward": reward, "ep_return": total,
        "terminated": False, "truncated": False, "ended": False, "scored": False, "length": step + 1,
    }  # fmt: skip


def _differs(want: dict[str, Any], row: dict[str, Any], shape: str) -> str | None:
    """The first difference between a wanted row and a given one, in words; None: there is none."""
    for name, value in want.items():
        if value is _ANY or (name == "final_obs" and value is None):
            continue
        given = row[name]
        if name == "episode":
            at, loose = value
            if given == at or (loose and given >= at):
                continue
        elif isinstance(value, State):
            if canonical(view(value, shape)) == canonical(given):
                continue
        elif canonical(value) == canonical(given):
            continue
        return f"{name} is {_short(given)}, wanted {_short(value)}"
    return None


def _settled(seen: Seen, row: Row, on_end: str) -> Seen:
    """The slot after a row that was right: the row tells the count, if that was not known."""
    if not seen.loose:
        return seen
    return dataclasses.replace(seen, episode=row.episode + (row.ended and on_end == "reset"), loose=False)


def _fault_differs(seen: Seen, row: Row, shape: str) -> str | None:
    """What a fault row says wrongly of the last delivered transition."""
    if not seen.wild and canonical(view(seen.state, shape)) != canonical(row.final_obs):
        return f"final_obs is {_short(row.final_obs)}, wanted {_short(view(seen.state, shape))}"
    if seen.waiting:
        return None  # the episode was over: nothing of it was cut short
    step = seen.state.step
    said = {"step": row.step, "length": row.length, "ep_return": row.ep_return}
    wanted = {"step": step, "length": step, "ep_return": seen.ep_return}
    if canonical(said) != canonical(wanted) or not (row.episode == seen.episode or seen.loose):
        return f"said {said} episode {row.episode}, wanted {wanted} episode {seen.episode}"
    return None


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size > 12:
        value = f"{value.ravel()[:6].tolist()} … {value.ravel()[-6:].tolist()}, {len(np.unique(value))} kinds"
    if isinstance(value, dict):
        value = {name: _short(item) for name, item in value.items()}
    return str(value)[:400]
