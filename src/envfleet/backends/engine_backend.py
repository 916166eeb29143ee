"""Fleets over a batch engine: the one place where rows are written from an engine's arrays.

The engine is called in the caller's thread, at `submit`, and makes one call for all slots that were sent. What it does not
declare is refused. Deadlines cannot be enforced. If the engine raises, all its slots have failed: nobody knows which of its
environments are still whole.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.backends.base import Backend
from envfleet.backends.batch_engine import ASKED, GO, NEXT, Array, BatchEngine, Rows
from envfleet.backends.local import Described, is_interrupt_here
from envfleet.errors import BadArgument, FleetError
from envfleet.faults.failure import Failure, Loss
from envfleet.slots.action_types import read_wide_rows
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import READY, REBUILD, STEP, Layout, Leaf, leaves_of, scatter
from envfleet.slots.slab import Slab, Slots


class EngineBackend(Backend):
    """Steps at `submit`, as `serial` does; `wait` only hands over what is done."""

    has_deadlines = False
    is_one_engine = True

    def __init__(self, engine: BatchEngine, any_end: bool = False) -> None:
        super().__init__()
        self.engine = engine
        self._any_end = any_end  # the caller did not say what shall happen at an end
        self.name = engine.kind
        self._is_built = False

    @property
    def seeds_per_slot(self) -> bool:
        """Whether each slot can have a seed of its own: see `Declared`."""
        return self.engine.declared.seeds == "slot"

    # -- building -------------------------------------------------------------------------------------------------

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the engine; all slots get the same description, or the same failure."""
        self.recipe = recipe
        self.worker_of = np.zeros(recipe.num_slots, np.int64)
        try:
            self._build(None)
        except FleetError:
            raise
        except BaseException as error:
            if is_interrupt_here(error):
                raise
            return dict.fromkeys(range(recipe.num_slots), self._failure(error, "init"))
        engine = self.engine
        if self._any_end and recipe.on_end not in engine.declared.on_end:
            self.recipe = dataclasses.replace(recipe, on_end=engine.declared.on_end[0])
        about = {
            "observation_space": engine.observation_space,
            "action_space": engine.action_space,
            "metadata": dict(engine.metadata),
            "render_mode": None,
            "spec": recipe.spec,
            "columns": {},
        }
        return {slot: {**about, "identity": (os.getpid(), id(engine), slot)} for slot in range(recipe.num_slots)}

    def _build(self, seed: int | None) -> None:
        self._is_built = False
        self.engine.build(self.recipe.num_slots, self.recipe.on_end, seed)
        self._is_built = True

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap."""
        engine = self.engine
        for what, space in (("observation", layout.observation_space), ("action", layout.action_space)):
            if not all(leaf.is_column for leaf in leaves_of(space)):
                raise BadArgument(
                    f"{engine.name}: the {what} space {space} has parts without a fixed shape; an engine has arrays"
                )
        self._refuse_on_end()
        self._count_turns()
        self.slab = Slab(layout, self.recipe.num_slots, keep_obs=self.recipe.keep_obs)
        self._columns = [(name, leaves_of(space)[0]) for name, space in layout.columns.items()]
        return self.slab

    def _refuse_on_end(self) -> None:
        engine, on_end = self.engine, self.recipe.on_end
        if on_end not in engine.declared.on_end:
            can = " or ".join(repr(name) for name in engine.declared.on_end)
            raise BadArgument(f"{engine.name} cannot do on_end={on_end!r} (it does not declare it): use on_end={can}")

    # -- what is refused ------------------------------------------------------------------------------------------

    def check_seeds(self, slots: Sequence[int], seeds: Sequence[int | None], now: bool) -> None:
        """An engine that is seeded as a whole takes the seeds s, s + 1 … of a reset of all slots: its own seed is s."""
        given = [seed for seed in seeds if seed is not None]
        if self.seeds_per_slot or not given:
            return
        if not now or len(given) != len(seeds) or not self._is_one_seed(np.asarray(slots), np.asarray(given)):
            raise BadArgument(
                f"{self.engine.name} does not declare seeds per slot: it is seeded as a whole. "
                "Use reset(seed=NUMBER) of all slots, and leave seeds out of assign() and of resets of some slots"
            )

    def _is_one_seed(self, slots: Array, seeds: Array) -> bool:
        """Whether these are all slots, with the seeds s, s + 1 …"""
        every = np.arange(self.recipe.num_slots)
        return len(slots) == len(every) and bool((slots == every).all() and seeds[0] >= 0 and (seeds == seeds[0] + every).all())

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Refuse them."""
        raise BadArgument(f"{self.engine.name} does not declare tasks: leave tasks out, or make a fleet per task with env_kwargs")

    def give_options(self, options: Mapping[int, dict[str, Any] | None]) -> None:
        """Refuse them; None, which takes them back, is no option."""
        if any(value is not None for value in options.values()):
            raise BadArgument(f"{self.engine.name} does not declare options of a reset: leave options out")

    def _refuse_part(self, slots: Slots) -> None:
        if not self.engine.declared.partial and len(slots) != self.recipe.num_slots:
            raise BadArgument(
                f"{self.engine.name} does not declare partial sends: {len(slots)} of {self.recipe.num_slots} slots were "
                "sent or reset, and it can only step or reset all of them together"
            )

    # -- one send -------------------------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """Step the slots now, in one call of the engine."""
        self._refuse_part(slots)
        where: Any = slice(None) if len(slots) == self.recipe.num_slots else slots
        turns = self.given[where] + np.uint32(1)
        self.slab.keep_rows(where, turns)
        self.given[where] = turns
        begin_ns = time.monotonic_ns()
        head = self.slab.head
        phase = "reset" if (head["command"][where] != STEP).all() else "step"
        try:
            self._advance(slots, where)
        except BaseException as error:
            self._fail(self._failure(error, phase))
            if is_interrupt_here(error):
                raise
            return
        spent_ns = (time.monotonic_ns() - begin_ns) // max(1, len(slots))
        head["step_ns"][where] = spent_ns
        head["busy_ns"][where] += spent_ns
        self.done[where] = turns

    def round(self, slots: Slots, timeout_s: float) -> bool:
        """Step all slots now."""
        self.submit(slots)
        return not self.failures

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Everything submitted is done already."""
        self.settle()

    def settle(self) -> None:
        """Slots that were given a turn and did not finish it were interrupted: the state of the engine is unknown."""
        if self.num_out:
            self._fail(Failure("step", f"{self.engine.name} was interrupted in the middle of its call; all its slots failed", ""))

    def _advance(self, slots: Slots, where: Any) -> None:
        head, engine = self.slab.head, self.engine
        command = head["command"][where]
        begin = np.where(command != STEP, ASKED, np.where(head["waiting"][where], NEXT, GO))
        rebuild = command == REBUILD
        seeds = head["next_seed"][where].copy()
        seed = int(seeds[rebuild][0]) if rebuild.any() else -1
        if not self.seeds_per_slot and rebuild.any() and not self._is_one_seed(slots, seeds):
            # Seeds that the supervisor spawned, one per slot: the engine takes the first, and no slot has one of its own.
            head["next_seed"][where] = seeds = np.full(len(slots), -1)
        if not self._is_built and not rebuild.any():
            raise RuntimeError("the engine has failed, and these slots were not asked to be rebuilt")
        begins = begin != GO
        # Before the call: a fault in it names them.
        for name in ("seed", "task"):
            head[f"now_{name}"][where] = np.where(begins, head[f"next_{name}"][where], head[f"now_{name}"][where])
        head["next_seed"][where] = np.where(begins, -1, head["next_seed"][where])
        if not self._is_built:
            self._build(seed if seed >= 0 else None)
        rows = engine.advance(slots, begin, seeds, self._actions(slots, where))
        self._write(where, begins, self._checked(rows, len(slots)))

    def _actions(self, slots: Slots, where: Any) -> Any:
        """The actions of these slots, batched, in the dtype of the space: the engine's arrays have one dtype."""
        slab, values = self.slab, []
        for i, (leaf, array) in enumerate(zip(slab.action_leaves, slab.leaf_arrays("action"))):
            assert array is not None
            rows = array[where, 0].copy()  # the engine may keep what it gets
            types = slab.head["action_type"][where, i]
            for number in np.unique(types[types > 0]).tolist():
                mine = types == number
                given = read_wide_rows(slab.arrays[f"wide_action/{i}"], slots[mine], number)
                if not np.can_cast(given.dtype, rows.dtype, "same_kind"):
                    raise TypeError(f"actions{leaf.name} have dtype {given.dtype}, and {self.engine.name} takes {rows.dtype}")
                rows[mine] = given
            values.append(rows)
        return values[0] if slab.action_leaves[0].path == () else slab.gather_action(values)

    # -- what came back -------------------------------------------------------------------------------------------

    def _checked(self, rows: Rows, count: int) -> Rows:
        """The same with plain arrays of the right shapes; `obs` and `final_obs` as lists of leaves."""
        leaves = self.slab.obs_leaves

        def batch(what: str, leaf: Leaf, value: Any) -> Array:
            array = np.asarray(value)
            if array.shape != (count, *leaf.shape):
                raise ValueError(f"{what}{leaf.name} has shape {array.shape}, but {count} slots need {(count, *leaf.shape)}")
            if leaf.dtype is not None and not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
                raise TypeError(f"{what}{leaf.name} has dtype {array.dtype}, which cannot become the space's {leaf.dtype}")
            return array

        def tree(what: str, value: Any) -> list[Array]:
            return [batch(what, leaf, part) for leaf, part in zip(leaves, scatter(leaves, value))]

        columns = {name: batch(name, leaf, rows.info[name]) for name, leaf in self._columns if name in rows.info}
        return Rows(
            tree("obs", rows.obs),
            np.asarray(rows.reward, np.float64).reshape(count),
            np.asarray(rows.terminated, np.bool_).reshape(count),
            np.asarray(rows.truncated, np.bool_).reshape(count),
            None if rows.final_obs is None else tree("final_obs", rows.final_obs),
            columns,
        )

    def _write(self, where: Any, begin: Array, rows: Rows) -> None:
        """Write the rows as the slot life would, all at once: see `SlotLife.take_step` and `SlotLife._begin`."""
        slab, head = self.slab, self.slab.scalars
        stepped = ~begin
        terminated, truncated = rows.terminated & stepped, rows.truncated & stepped
        ended = terminated | truncated
        resets = self.recipe.on_end == "reset"
        begun = ended & resets  # the next episode has begun in the same call
        fresh = begin | begun
        self._write_obs(where, ended, rows)
        reward = np.where(stepped, rows.reward, 0.0)
        ep_return = np.where(stepped, head["now_return"][where, 0] + reward, 0.0)
        step = np.where(stepped, head["now_length"][where], -1)
        head["episode"][where] = head["started"][where] - stepped  # of a slot that begins: the one that is begun
        head["step"][where], head["length"][where] = step, step + 1
        head["reward"][where, 0], head["ep_return"][where, 0] = reward, ep_return
        head["terminated"][where, 0], head["truncated"][where, 0] = terminated, truncated
        head["task"][where], head["seed"][where] = head["now_task"][where], head["now_seed"][where]
        for name in ("seed", "task"):
            head[f"now_{name}"][where] = np.where(begun, head[f"next_{name}"][where], head[f"now_{name}"][where])
        head["next_seed"][where] = np.where(begun, -1, head["next_seed"][where])
        head["now_length"][where] = np.where(fresh, 0, step + 1)
        head["now_return"][where, 0] = np.where(fresh, 0.0, ep_return)
        head["started"][where] += fresh
        head["scored"][where, 0] = stepped
        waiting = ended & (not resets)
        head["waiting"][where], head["active"][where, 0] = waiting, ~waiting
        head["over"][where], head["status"][where] = False, READY
        for name, _ in self._columns:
            slab.arrays[f"column/{name}"][where, 0] = rows.info.get(name, 0)

    def _write_obs(self, where: Any, ended: Array, rows: Rows) -> None:
        slab = self.slab
        any_ended = bool(ended.any())
        last = rows.obs if self.recipe.on_end == "wait" else rows.final_obs
        if any_ended and last is None:
            raise ValueError("an episode ended, but the engine gave no final_obs")
        at = np.flatnonzero(ended) if isinstance(where, slice) else where[ended]
        for i, (obs, final_obs) in enumerate(zip(slab.leaf_arrays("obs"), slab.leaf_arrays("final_obs"))):
            assert obs is not None and final_obs is not None
            obs[where, 0] = rows.obs[i]
            if any_ended:
                final_obs[at, 0] = last[i][ended]

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def _failure(self, error: BaseException, phase: str) -> Failure:
        failure = Failure.of(error, phase)
        count = self.recipe.num_slots
        words = f"{failure.summary} (the engine {self.engine.name} runs all {count} slots in one call, so all of them failed)"
        return dataclasses.replace(failure, summary=words)

    def _fail(self, failure: Failure) -> None:
        """Every slot has lost its env, also those that were not sent; done is set last: until then `settle` repeats this."""
        self._is_built = False
        self.failures.update(dict.fromkeys(range(self.recipe.num_slots), failure))
        self.done[:] = self.given

    # -- the rest -------------------------------------------------------------------------------------------------

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """There are no environments to call. Whether they have an attribute is answered: they have none."""
        if name != "has_wrapper_attr":
            raise BadArgument(f"{self.engine.name} has no environment object per slot, so {name!r} cannot be called or read")
        self._replies.update(dict.fromkeys(slots, False))

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """What the calls gave."""
        replies, self._replies = self._replies, {}
        return replies

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the engine. Its own close is idempotent."""
        self._is_built = False
        try:
            self.engine.close()
        except BaseException as error:
            if is_interrupt_here(error):
                raise
            return [(0, Failure.of(error, "close"))]
        return []
