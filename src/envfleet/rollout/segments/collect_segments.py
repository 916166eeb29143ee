"""Collecting [T, B] segments over a fleet: the loop behind `Collector.segment`, and how a checkpoint restores it."""

from __future__ import annotations

import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from envfleet.core.batch import Batch
from envfleet.errors import BadArgument, FaultError
from envfleet.rollout.segments.agent_segment import ACTIVE, AGENT_STEP, FINAL_STATE, STATE, AgentSegment
from envfleet.rollout.segments.segment import Bools, Floats, Ints, Segment
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.util.seeding import episode_seed, episode_seeds
from envfleet.util.trees import (
    Tree,
    as_columns,
    tree_concatenate,
    tree_leaves,
    tree_length,
    tree_map,
    tree_put,
    tree_rows,
    tree_stack,
)

if TYPE_CHECKING:
    from envfleet.rollout.collector import Collector

_ALL = slice(None)
LEFT = "ended in a segment that was left"  # a reason in the ledger


class SegmentRun:
    """Slots that run without a stop: every segment continues where the last one ended.

    Every slot makes exactly T steps a segment in every mode, so the data of a slot do not depend on how fast the others
    are. Episode e of slot b has the seed of (run, "segment", b, e) and the task number e * B + b. An engine that is seeded as
    a whole gets one seed when the run begins, and one when it is resumed.

    In mode "sync" all slots are stepped together, and a step is written as one whole row of the [T, B] arrays. In the
    other modes slots are at different steps, and their results are written at (step, slot).

    Fleets with agents are collected in mode "sync". Their policy is asked with two columns beside the declared ones:
    `active` [k, A], which agents must act, and `agent_step` [k, A], how many actions each of them has made since it
    joined (0: a recurrent policy restarts its memory there).
    """

    def __init__(self, collector: Collector, episode: Ints | None = None) -> None:
        self.engine = engine = collector.engine
        self.fleet = fleet = collector.fleet
        self.ledger, self.stats, self.env_name = collector.ledger, collector.stats_builder, collector.env_name
        self.tasks, self.max_steps = collector.tasks, collector.max_steps
        self.whole = engine.mode == "sync"
        self.has_agents = bool(fleet.agents)
        self._check()
        count = fleet.num_envs
        self.slots = np.arange(count)
        self.total = engine.total
        self.actions = RunningActions(count) if collector.resumable else None
        self.episode = np.zeros(count, dtype=np.int64)  # [slot] running episode of the slot, as we count
        if episode is not None:  # a stored run goes on with these: the tasks of earlier ones must not be dealt a second time
            self.episode[:] = episode
        self.step = np.zeros(count, dtype=np.int64)  # [slot]
        self.ep_return = np.zeros(count)  # [slot]
        self.running = np.ones(count, dtype=np.bool_)  # [slot] an episode the ledger knows as in flight
        self.at: Any = self._first()  # steps made of the segment
        engine.drain()  # what a call has left that was interrupted before its own drain
        self._drop_running()
        batch = self._reset(self.slots)
        obs = as_columns(fleet.single_observation_space, batch.obs)
        self.has_objects = any(leaf.dtype == object for _, leaf in tree_leaves(obs))
        # [T + 1, B, ...]: row t is what step t acts on. Between segments there is one row.
        self.obs: Tree = tree_map(lambda leaf: np.array(leaf[None]), obs)
        hidden = FINAL_STATE if self.has_agents else None  # belongs to ends, not to observations
        names = [name for name in fleet.layout.columns if name != hidden]
        self.columns = {name: np.array(getattr(batch, name)[None]) for name in names}
        self.task = np.array(fleet.slab.head["now_task"])  # of what runs: a row of a failed reset has the task that failed
        self.active: Bools = np.array(batch.active)  # [slot, agent] with agents
        self.agent_step: Ints = np.zeros(self.active.shape, np.int64)
        self.ledger.start(count)
        self._refused_resets(batch)
        self._assign_next(self.slots)
        self.segment: Any = None  # the one being collected: a Segment, with agents an AgentSegment
        self.ends: list[Tree] = []
        self.num_ended = 0  # episodes that ended in it
        self.fates: dict[str, list[Tree]] = {}

    def _check(self) -> None:
        if self.fleet.on_end != "reset":
            raise BadArgument('segment() needs a fleet with on_end="reset": every row of a segment is a transition')
        if self.has_agents and not self.whole:
            raise BadArgument(f'mode={self.engine.mode!r}: fleets with agents are collected in mode "sync"')
        if self.has_agents and self.max_steps is not None:
            raise BadArgument("max_steps: fleets with agents end their episodes themselves; wrap the environment")

    def _first(self) -> Any:
        """The step at which slots begin: one number for all of them, or one each, [slot]."""
        return 0 if self.whole else np.zeros(self.fleet.num_envs, dtype=np.int64)

    def _where(self, slots: Ints) -> tuple[Any, Any]:
        """Where these slots are now: in a [T, B] array (a whole row, or step and slot), and in a [B] array."""
        if not self.whole:
            return (self.at[slots], slots), slots
        return (self.at, _ALL) if len(slots) == len(self.slots) else ((self.at, slots), slots)

    # -- episodes that begin --

    def _seeds(self, slots: Ints, ahead: int = 0) -> list[int]:
        numbers = slots + self.engine.first_slot
        seeds: list[int] = episode_seeds(self.engine.seed, "segment", numbers, self.episode[slots] + ahead).tolist()
        return seeds

    def _tasks_of(self, slots: Ints, ahead: int = 0) -> list[Any] | None:
        if self.tasks is None:
            return None
        numbers = (self.episode[slots] + ahead) * self.total + slots + self.engine.first_slot
        return [self.tasks(number) for number in numbers.tolist()]

    def _reset(self, slots: Ints) -> Batch:
        seeds: Any = self._seeds(slots)
        if not self.fleet.seeds_per_slot:
            # One engine with one seed: a reset of all slots gets a new one, and after it the engine's own stream goes on.
            begun, is_all = int(self.episode.sum()), len(slots) == len(self.slots)
            seeds = episode_seed(self.engine.seed, "engine", self.engine.first_slot, begun) >> 1 if is_all else None
        return self.fleet.reset(seed=seeds, tasks=self._tasks_of(slots), slots=slots)

    def _assign_next(self, slots: Ints) -> None:
        if len(slots):
            seeds = self._seeds(slots, 1) if self.fleet.seeds_per_slot else None
            self.fleet.assign(slots, seeds=seeds, tasks=self._tasks_of(slots, 1))

    def _begin_next(self, ended: Ints, cut: Ints, faulted: Ints) -> None:
        """Slots that begin a new episode: by themselves (an end, a restart), or cut off and reset by us."""
        self.num_ended += len(ended) + len(cut)
        for slot in (*ended.tolist(), *cut.tolist()):
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
            self._see(batch)
            self._refused_resets(batch)
        self.task[fresh] = self.fleet.slab.head["now_task"][fresh]
        self._assign_next(fresh)

    # -- one segment --

    def collect(self, num_steps: int) -> Segment:
        """Make `num_steps` steps of every slot."""

        def room(leaf: Any) -> Any:
            longer = np.empty((num_steps + 1, *leaf.shape[1:]), leaf.dtype)
            longer[0] = leaf[0]
            return longer

        self.obs, self.columns = tree_map(room, self.obs), tree_map(room, self.columns)
        self.segment = self._empty(num_steps)
        self.ends, self.fates, self.num_ended = [], {}, 0
        try:
            self._make_steps(num_steps)
            segment: Segment = self.segment
            self.segment, self.at = None, self._first()
            self._close(segment)
        except BaseException as error:
            self.ledger.drop(LEFT, self.num_ended)  # nobody gets them
            if isinstance(error, FaultError):
                self._fault(error.fault.slot, READY)
            self.engine.drain()
            raise
        self.ledger.use(self.num_ended)
        return segment

    def _empty(self, num_steps: int) -> Segment:
        """A segment to be filled. What slots see is written once: the segment has all rows of it but the last."""
        first = tree_rows(self.obs, 0)
        segment: Segment
        if self.has_agents:
            segment = AgentSegment.of(num_steps, obs=first, active=self.active)
        else:
            segment = Segment.empty(num_steps, len(self.slots), obs=first)
        segment.obs = tree_rows(self.obs, slice(num_steps))
        segment.columns = tree_rows(self.columns, slice(num_steps))
        return segment

    def _make_steps(self, num_steps: int) -> None:
        engine = self.engine
        if self.whole:
            for _ in range(num_steps):
                # Views do not hold what has no fixed shape.
                self._take(engine.step(self._act(self.slots), copy=self.has_objects))
            return
        for group in engine.halves(self.slots):
            engine.post(group, self._act(group))
        while engine.waiting:
            batch = engine.receive()
            self._take(batch)
            go = batch.slots[self.at[batch.slots] < num_steps]
            if len(go):
                engine.post(go, self._act(go))

    def _act(self, slots: Ints) -> Tree:
        """The policy's actions for these slots; written down with what the slots saw."""
        segment = self.segment
        here, own = self._where(slots)
        segment.episode[here], segment.step[here] = self.episode[own], self.step[own]
        segment.task[here] = self.task[own]
        columns = {name: values[here] for name, values in self.columns.items()}
        if self.has_agents:
            segment.acted[here], segment.agent_step[here] = self.active, self.agent_step
            columns |= {ACTIVE: segment.acted[here], AGENT_STEP: segment.agent_step[here]}
        answer, version = self.engine.ask(
            obs=tree_rows(self.obs, here),
            slots=slots,
            episode=self.episode[own] * self.total + slots + self.engine.first_slot,  # the number that also selects the task
            step=segment.step[here],
            task=[self.fleet.task_value(task) for task in self.task[own]] if self.tasks is not None else [],
            columns=columns,
        )
        if segment.action is None:
            segment.action = tree_map(self._room, answer.actions)
        tree_put(segment.action, here, answer.actions)
        segment.policy_version[here] = version
        for name, values in answer.extras.items():
            if name not in segment.extras:
                segment.extras[name] = self._room(values)
            segment.extras[name][here] = values
        return answer.actions

    def _room(self, rows: Any) -> Any:
        """Zeros [T, B, ...] for what comes in rows [k, ...]."""
        return np.zeros((*self.segment.reward.shape, *rows.shape[1:]), rows.dtype)

    def _take(self, batch: Batch) -> None:
        """Write the results of a step, and start what is next."""
        segment, slots, status = self.segment, batch.slots, batch.status
        here, own = self._where(slots)
        scored = status == READY
        if self.has_agents:
            scored &= batch.step >= 0  # the row of a slot that came back is of a reset
            reward, terminated, truncated = self._take_agents(here, batch, scored)
            ended = batch.ended
        else:
            scored &= batch.scored
            reward, terminated, truncated = batch.reward, batch.terminated, batch.truncated
            ended = terminated | truncated
        made: Any = 1  # transition of every slot
        all_scored = np.count_nonzero(scored) == len(slots)
        if not all_scored:
            made, reward = scored, np.where(scored, reward, 0.0)
        segment.reward[here], segment.scored[here] = reward, made
        segment.terminated[here], segment.truncated[here] = terminated, truncated
        self.step[own] += made
        self.ep_return[own] += reward
        over, cut, faulted = ended, slots[:0], slots[:0]
        if self.max_steps is not None:
            reached = scored & ~ended & (self.step[own] >= self.max_steps)
            segment.truncated[here] |= reached
            over, cut = ended | reached, slots[reached]
        rows = over.nonzero()[0]
        if len(rows):
            self._note_ends(batch, rows, ended)
        if self.whole:
            self.at += 1
        else:
            self.at[slots] += 1
        self._see(batch)
        if not all_scored:
            for row in np.flatnonzero(~scored).tolist():
                self._fault(int(slots[row]), int(status[row]))
            faulted = slots[~scored & (status != QUARANTINED)]
        if len(rows) or len(faulted):
            self._begin_next(slots[ended & scored], cut, faulted)

    def _take_agents(self, here: Any, batch: Batch, good: Bools) -> tuple[Floats, Bools, Bools]:
        """Write what belongs to agents; give reward, terminated and truncated of the environments."""
        segment = self.segment
        scored = batch.scored & good[:, None]
        reward = np.where(scored, batch.reward, 0.0)
        segment.agent_reward[here], segment.agent_scored[here] = reward, scored
        segment.agent_terminated[here], segment.agent_truncated[here] = batch.terminated, batch.truncated
        flags = batch.terminated | batch.truncated
        if flags.any():
            self._note_fates(batch, flags)
        # An episode was cut short if no agent reached a terminal state in its last step.
        terminal = batch.ended & batch.terminated.any(axis=1)
        return reward.mean(axis=1), terminal, batch.ended & ~terminal

    def _rows(self, obs: Any) -> Tree:
        return as_columns(self.fleet.single_observation_space, obs) if self.has_objects else obs

    def _see(self, batch: Batch) -> None:
        """Write what the slots of a batch act on next."""
        there, own = self._where(batch.slots)
        tree_put(self.obs, there, self._rows(batch.obs))
        for name, values in self.columns.items():
            values[there] = getattr(batch, name)
        if self.has_agents:
            acted = self.agent_step[own] + self.active[own]
            new = batch.ended | (batch.step < 0) | (batch.status != READY)
            acted[new[:, None] | batch.terminated | batch.truncated] = 0
            self.agent_step[own], self.active[own] = acted, batch.active

    def _note_ends(self, batch: Batch, rows: Ints, ended: Bools) -> None:
        """Note the episodes that are over: by themselves (`ended`), or cut off by us."""
        slots = batch.slots[rows]
        if self.has_agents:
            last: Tree = batch.ep_return[rows]  # [k, A]
            self.ep_return[slots] = last.mean(axis=1)
        else:
            last = tree_rows(self._rows(batch.final_obs), rows)
            if self.max_steps is not None:
                cut = ~ended[rows]
                tree_put(last, cut, tree_rows(self._rows(batch.obs), rows[cut]))
        place = (self.at if self.whole else self.at[slots]) * len(self.slots) + slots  # in [T, B], counted through
        self.ends.append((place, self.ep_return[slots], self.step[slots], last))

    def _note_fates(self, batch: Batch, flags: Bools) -> None:
        """Note the agents that ended, with their last observations and the state of that moment."""
        groups, final = self.fleet.groups, batch.final_obs
        for group in groups:
            b, k = np.nonzero(flags[:, np.asarray(group.indices)])
            if not len(b):
                continue
            fate = {
                "index": np.stack([np.full(len(b), self.at), b, k], axis=1),
                "obs": tree_rows(final if len(groups) == 1 else final[group.name], (b, k)),
            }
            if STATE in self.columns:
                now, at_end = getattr(batch, STATE), getattr(batch, FINAL_STATE)
                over = batch.ended.reshape(-1, *(1,) * (now.ndim - 1))
                fate["state"] = np.where(over, at_end, now)[b]
            self.fates.setdefault(group.name, []).append(fate)

    def _close(self, segment: Segment) -> None:
        """Write what is known only at the end: the ends in order, and the bootstrap observations."""
        if self.ends:
            place, returns, lengths, last = tree_concatenate(self.ends)
            order = np.argsort(place)
            segment.end_index = np.stack(np.divmod(place[order], len(self.slots)), axis=1)
            segment.end_return, segment.end_length = returns[order], lengths[order]
            if isinstance(segment, AgentSegment):
                segment.end_returns = last[order]
            else:
                segment.final_obs = tree_rows(last, order)
        if isinstance(segment, AgentSegment):
            for name, found in self.fates.items():
                fate = tree_concatenate(found)
                segment.fate_index[name], segment.fate_obs[name] = fate["index"], fate["obs"]
                if "state" in fate:
                    segment.fate_state[name] = fate["state"]
            segment.bootstrap_active = self.active.copy()
        segment.bootstrap_obs = tree_rows(self.obs, -1)
        segment.bootstrap_columns = tree_rows(self.columns, -1)
        self.obs, self.columns = tree_map(lambda leaf: leaf[-1:].copy(), (self.obs, self.columns))
        if self.actions is not None:
            self.actions.add(segment)

    # -- what goes wrong --

    def _fault(self, slot: int, status: int) -> None:
        if self.running[slot]:
            self.ledger.fail(self.engine.reason(slot)[0])
            self.running[slot] = False
        if status == QUARANTINED:
            self.engine.check_slots_left(slot)

    def _refused_resets(self, batch: Batch) -> None:
        """Resets that failed: the restarted environment has begun another episode."""
        for row in np.flatnonzero(batch.status != READY).tolist():
            slot, status = int(batch.slots[row]), int(batch.status[row])
            self._fault(slot, status)
            if status != QUARANTINED:
                self.ledger.start()
                self.running[slot] = True

    def give_up(self) -> None:
        """The episodes that run are not continued."""
        self.engine.drain()
        self._drop_running()
        self.running[:] = False

    def _drop_running(self) -> None:
        # Not by `running`: an interrupt may have come between the two.
        self.ledger.drop("running when segments were left", self.ledger.in_flight)

    # -- checkpoints --

    def state(self, running: bool = True) -> dict[str, Any]:
        """What a checkpoint stores between two segments.

        A running episode is stored as its actions so far (its seed and task follow from its number), or as the state of
        its environment where that offers `get_state` and `set_state`. Without `running` only the numbers of the running
        episodes are stored: a run that is restored from them begins the next ones.
        """
        state: dict[str, Any] = {"episode": self.episode.copy(), "ledger": self.ledger.state()}
        if not running:
            return state
        lost = self.fleet.quarantined
        states, actions = self._states(np.setdiff1d(self.slots, lost)), None
        if states is None and self.actions is None:
            raise BadArgument("the environment has no get_state: make the collector with resumable=True")
        if states is None and self.actions is not None:
            actions = [np.zeros(0) if slot in lost else self.actions.of(slot) for slot in self.slots.tolist()]
        return state | {
            "step": self.step.copy(),
            "ep_return": self.ep_return.copy(),
            "obs": [leaf[0].copy() for _, leaf in tree_leaves(self.obs)],
            "columns": {name: values[0].copy() for name, values in self.columns.items()},
            "actions": actions,
            "states": states,
            "lost": lost,
            "last_reward": self.engine.last_reward.copy(),
        }

    def _states(self, slots: Ints) -> list[Any] | None:
        """The states of the environments, None for a slot that has none; None when they do not offer them."""
        try:
            if not self._have("get_state", slots):
                return None
            found = dict(zip(slots.tolist(), self.fleet.call("get_state", slots=slots)))
        except FaultError:
            if self.actions is None:
                raise
            return None  # a worker ended just now: the next step reports it, and the actions are enough
        return [found.get(slot) for slot in self.slots.tolist()]

    def restore(self, stored: dict[str, Any], how: str = "replay") -> Ints:
        """Restore what `state` returned; returns the slots whose running episodes had to be ended.

        Every slot is reset with the seed of its running episode and plays the stored actions again. The observation it
        arrives at is compared with the stored one, bit for bit. Where they differ the environment is not determined by
        its seed, and the episode is ended. `how="end"` ends all of them; so does a fleet without seeds per slot.
        """
        self.episode[:] = stored["episode"]
        self.ledger.load(stored["ledger"])
        ended = self.slots
        if how != "end" and "obs" in stored and self.fleet.seeds_per_slot:
            self._resume(self._reset(self.slots))
            if stored["states"] is not None:
                self._set_states(stored)
            else:
                self._replay(stored["actions"])
            self.step[:], self.ep_return[:] = stored["step"], stored["ep_return"]
            self.engine.last_reward[:] = stored.get("last_reward", 0.0)
            differs = self._differs(stored["obs"])
            differs[stored.get("lost", [])] = True  # quarantined then: it begins anew
            ended = np.flatnonzero(differs)
            if self.actions is not None and stored["actions"] is not None:
                for slot in np.flatnonzero(~differs).tolist():
                    self.actions.set(slot, tree_map(np.array, stored["actions"][slot]))
            if len(changed := np.setdiff1d(ended, stored.get("lost", []))):
                warnings.warn(
                    f"the running episodes of slots {changed.tolist()} could not be restored (the environment is not "
                    "determined by its seed and offers no get_state/set_state); they were ended, so the run goes on "
                    "but not bit by bit",
                    stacklevel=3,
                )
        if len(ended):
            self._end_running(ended)
        self._assign_next(self.slots)
        return ended

    def _resume(self, batch: Batch) -> None:
        """Take over slots that were reset here, not by the fleet at an end."""
        self._see(batch)
        self.task[batch.slots] = self.fleet.slab.head["now_task"][batch.slots]

    def _replay(self, stored: list[Tree]) -> None:
        actions = [tree_map(np.array, part) for part in stored]
        lengths = np.array([tree_length(part) for part in actions])
        for t in range(int(lengths.max(initial=0))):
            going = np.flatnonzero(lengths > t)
            self.fleet.send(tree_stack([tree_rows(actions[slot], t) for slot in going]), going)
            self._see(self.fleet.recv(going))

    def _set_states(self, stored: dict[str, Any]) -> None:
        for slot in np.setdiff1d(self.slots, stored.get("lost", [])).tolist():
            state = stored["states"][slot]
            self.fleet.call("set_state", state, slots=[slot])
        # Gymnasium's TimeLimit counts outside the environment, so its count is not in the environment's state.
        if self._have("_elapsed_steps", self.slots):
            self.fleet.set_attr("_elapsed_steps", [int(step) for step in stored["step"]])
        # set_state gives no observation; the checkpoint has it.
        for (_, leaf), old in zip(tree_leaves(self.obs), stored["obs"]):
            leaf[0] = old
        for name, values in stored["columns"].items():
            self.columns[name][0] = values

    def _have(self, name: str, slots: Ints) -> bool:
        """Whether the environment of every slot has an attribute. Many-agent environments are always played again."""
        # Asked of the environment, because a call that fails would be counted as a fault of the slot.
        return not self.has_agents and all(self.fleet.call("has_wrapper_attr", name, slots=slots))

    def _differs(self, stored: list[Any]) -> Bools:
        count = len(self.slots)
        differs = np.zeros(count, dtype=np.bool_)
        for (_, leaf), old in zip(tree_leaves(self.obs), stored):
            now, then = leaf.reshape(count, -1), old.reshape(count, -1)
            both_nan = (now != now) & (then != then)
            differs |= ~((now == then) | both_nan).all(axis=1)
        return differs

    def _end_running(self, slots: Ints) -> None:
        self.ledger.drop("ended when the run was resumed", len(slots))
        self.ledger.start(len(slots))
        self.episode[slots] += 1
        self.step[slots] = 0
        self.ep_return[slots] = 0.0
        self._resume(self._reset(slots))


class RunningActions:
    """The actions of every slot's running episode: with its seed and task, all that is needed to play it again.

    Whole segments of actions are kept while an episode runs that began in or before them, so that a segment costs no work per slot. An episode that runs
    for much longer than the others gets a copy of its own actions, so that it does not hold theirs.
    """

    def __init__(self, num_slots: int) -> None:
        self._kept: deque[Tree] = deque()  # [T, B, ...] of the latest segments
        self._oldest = 0  # its number
        self._begin = np.zeros((2, num_slots), np.int64)  # [segment and step, slot] where the running episode begins in them
        self._before: dict[int, list[Tree]] = {}  # its actions before that: what a checkpoint stored, and copies

    def add(self, segment: Segment) -> None:
        """Add a segment; actions of episodes that ended in it are dropped."""
        # What is no transition is of no episode either: a slot in quarantine has only such rows, and its episode has no end.
        over, number = segment.ended | ~segment.scored, self._oldest + len(self._kept)
        slots = np.flatnonzero(over.any(axis=0))
        self._begin[0, slots] = number
        self._begin[1, slots] = segment.num_steps - over[::-1, slots].argmax(axis=0)
        for slot in self._before.keys() & set(slots.tolist()):
            del self._before[slot]
        self._kept.append(segment.action)
        age = number + 1 - self._begin[0]
        for slot in np.flatnonzero(age > 2 * max(8.0, float(np.median(age)))).tolist():
            if parts := self._latest(slot):
                self._before.setdefault(slot, []).append(tree_concatenate(parts))
            self._begin[:, slot] = number + 1, 0
        while self._oldest < self._begin[0].min():
            self._kept.popleft()
            self._oldest += 1

    def _latest(self, slot: int) -> list[Tree]:
        """The slot's actions in the segments that are kept; none of them is empty."""
        first, begin = self._begin[:, slot].tolist()
        begins = {first: begin}  # 0 in every later segment
        segments = [(n, part) for n, part in enumerate(self._kept, self._oldest) if n >= first]
        parts = [tree_rows(part, (slice(begins.get(n, 0), None), slot)) for n, part in segments]
        return [part for part in parts if tree_length(part)]

    def of(self, slot: int) -> Tree:
        """The actions of the slot's running episode, in order."""
        parts = self._before.get(slot, []) + self._latest(slot)
        return tree_concatenate(parts) if parts else np.zeros(0)

    def set(self, slot: int, actions: Tree) -> None:
        """Begin from actions that a checkpoint stored."""
        if tree_length(actions):
            self._before[slot] = [actions]
