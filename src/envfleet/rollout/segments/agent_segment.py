"""Segments of fleets with an agent axis.

Axes: T steps, B slots, A agents, k the agents of one group. What belongs to an environment keeps the meaning it has in
`Segment` ([T, B]: `scored`, `step`, `episode`, …); what belongs to an agent has the agent axis and a name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import BadArgument, FaultError
from envfleet.rollout.policy_protocol import Ask
from envfleet.rollout.segments.collect_segments import SegmentRun
from envfleet.rollout.segments.segment import Bools, Floats, Ints, Segment
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.util.trees import Tree, tree_leaves, tree_map

if TYPE_CHECKING:
    from envfleet.core.batch import Batch
    from envfleet.rollout.engine import Engine

ACTIVE, AGENT_STEP = "active", "agent_step"
STATE, FINAL_STATE = "state", "final_state"


@dataclass
class AgentSegment(Segment):
    """T steps of B environments with A agents each.

    `obs` and `action` are as the fleet gives and takes them: [T, B, A, …], or {group: [T, B, k, …]} where groups of
    agents have spaces of their own. `acted[t, b, a]`: the agent had an observation at step t and its action counts.
    `agent_scored[t, b, a]`: step t closed a transition of that agent, begun at the last step at which it acted.
    `reward` and `end_return` are means over agents.

    Example:
        >>> zeros = np.zeros((2, 3, 4))
        >>> segment = AgentSegment.of(5, obs=zeros, action=np.zeros((2, 3), np.int64), active=np.ones((2, 3), bool))
        >>> segment.obs.shape, segment.agent_reward.shape, segment.ended.shape
        ((5, 2, 3, 4), (5, 2, 3), (5, 2))
    """

    acted: Bools = field(default_factory=lambda: np.zeros((0, 0, 0), np.bool_))  # [T, B, A]
    agent_step: Ints = field(default_factory=lambda: np.zeros((0, 0, 0), np.int64))  # [T, B, A] actions of this life
    agent_reward: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))  # [T, B, A]
    agent_terminated: Bools = field(default_factory=lambda: np.zeros((0, 0, 0), np.bool_))  # [T, B, A]
    agent_truncated: Bools = field(default_factory=lambda: np.zeros((0, 0, 0), np.bool_))  # [T, B, A]
    agent_scored: Bools = field(default_factory=lambda: np.zeros((0, 0, 0), np.bool_))  # [T, B, A]
    bootstrap_active: Bools = field(default_factory=lambda: np.zeros((0, 0), np.bool_))  # [B, A]
    fate_index: dict[str, Ints] = field(default_factory=dict)  # group → [K, 3]: (t, b, place in the group) of ends
    fate_obs: dict[str, Tree] = field(default_factory=dict)  # group → [K, …] the last observations of those agents
    fate_state: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # group → [K, …] the state() of those moments
    end_returns: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [ended episodes, A]

    @classmethod
    def of(cls, num_steps: int, *, obs: Tree, action: Tree, active: Bools) -> AgentSegment:
        """Make a segment to be filled; obs, action and active shaped like one batch ([B, A, …])."""
        slots, agents = active.shape
        segment = cls.empty(num_steps, slots, obs=obs, action=action)
        shape = (num_steps, slots, agents)
        segment.acted = np.zeros(shape, np.bool_)
        segment.agent_step = np.zeros(shape, np.int64)
        segment.agent_reward = np.zeros(shape)
        segment.agent_terminated = np.zeros(shape, np.bool_)
        segment.agent_truncated = np.zeros(shape, np.bool_)
        segment.agent_scored = np.zeros(shape, np.bool_)
        segment.bootstrap_active = active.copy()
        segment.end_returns = np.zeros((0, agents))
        return segment

    @property
    def num_agents(self) -> int:
        """A, the agents."""
        return int(self.acted.shape[2])


class AgentSegmentRun(SegmentRun):
    """Slots with agents that never stop. All slots are stepped together (mode "sync").

    The policy is asked with two columns beside the declared ones: `active` [k, A], who must act, and `agent_step`
    [k, A], how many actions each of them has made in this life (0: a recurrent policy restarts its memory there).
    """

    def _begin(self, batch: Batch) -> None:
        if self.engine.mode != "sync":
            raise BadArgument(f'mode={self.engine.mode!r}: fleets with agents are collected in mode "sync"')
        if self.max_steps is not None:
            raise BadArgument("max_steps: fleets with agents end their episodes themselves; wrap the environment")
        self.columns.pop(FINAL_STATE, None)  # belongs to ends, not to observations
        self.active: Bools = np.array(batch.active)
        self.agent_step: Ints = np.zeros(self.active.shape, np.int64)

    def _reseated(self, batch: Batch) -> None:
        slots = batch.slots
        acted = self.active[slots] & (batch.step >= 0)[:, None]
        self.agent_step[slots] = np.where((batch.step < 0)[:, None], 0, self.agent_step[slots] + acted)
        ended = batch.terminated | batch.truncated
        self.agent_step[slots] = np.where(ended, 0, self.agent_step[slots])
        self.active[slots] = batch.active

    def collect(self, num_steps: int) -> Segment:
        """Make `num_steps` steps of every slot."""
        self.at = np.zeros(self.fleet.num_envs, dtype=np.int64)
        self.segment = None
        self.ends = []
        self.returns: list[Floats] = []
        self.fates: dict[str, list[tuple[Ints, Tree, Any]]] = {group.name: [] for group in self.fleet.groups}
        try:
            for t in range(num_steps):
                self._step(t, num_steps)
        except BaseException as error:
            self.engine.out[:] = self.fleet.is_out
            if isinstance(error, FaultError):
                self._fault(error.fault.slot, READY)
            self.engine.drain()
            raise
        segment, self.segment = self.segment, None
        assert isinstance(segment, AgentSegment)
        self._close(segment)
        return segment

    def _step(self, t: int, num_steps: int) -> None:
        fleet, slots = self.fleet, self.fleet._all
        ask = Ask(
            obs=self.obs,
            slots=slots,
            episode=self.episode * fleet.num_envs + slots,
            step=self.step.copy(),
            task=[fleet.task_value(task) for task in self.task] if self.tasks is not None else [],
            columns={**self.columns, ACTIVE: self.active, AGENT_STEP: self.agent_step},
            seed=self.engine.seed,
        )
        trusted = bool(getattr(self.engine.policy, "answers_fit", False))
        answer = self.engine._call(ask) if trusted else self.engine.ask(ask)[0]
        if t == 0:
            self.segment = AgentSegment.of(num_steps, obs=self.obs, action=answer.actions, active=self.active)
            for kind, found in (("extras", answer.extras), ("columns", self.columns)):
                room = tree_map(lambda leaf: np.zeros((num_steps, *leaf.shape), leaf.dtype), dict(found))
                setattr(self.segment, kind, room)
        segment = self.segment
        assert isinstance(segment, AgentSegment)
        for tree, values in (
            (segment.obs, self.obs),
            (segment.action, answer.actions),
            (segment.extras, dict(answer.extras)),
            (segment.columns, self.columns),
        ):
            _put(tree, t, values)
        segment.policy_version[t] = getattr(self.engine.policy, "version", 0)
        segment.acted[t], segment.agent_step[t] = self.active, self.agent_step
        self.agent_step += self.active
        self._take_row(segment, t, fleet.step(answer.actions, copy=False))

    def _take_row(self, segment: AgentSegment, t: int, batch: Batch) -> None:
        good = batch.status == READY
        scored = batch.scored & good[:, None]
        over = np.asarray(batch.ended)
        segment.agent_reward[t] = np.where(scored, batch.reward, 0.0)
        segment.agent_terminated[t], segment.agent_truncated[t] = batch.terminated, batch.truncated
        segment.agent_scored[t] = scored
        segment.reward[t] = segment.agent_reward[t].mean(axis=1)
        # An episode was cut short if nobody reached a terminal state in its last step.
        terminal = over & segment.agent_terminated[t].any(axis=1)
        segment.terminated[t], segment.truncated[t] = terminal, over & ~terminal
        segment.scored[t] = good
        segment.episode[t], segment.step[t], segment.task[t] = self.episode, self.step, self.task
        self.step += good
        ended = segment.agent_terminated[t] | segment.agent_truncated[t]
        self.agent_step[ended | over[:, None] | ~good[:, None]] = 0
        if ended.any():
            self._note_fates(t, batch, ended, over)
        if over.any():
            returns = np.asarray(batch.ep_return)
            for slot in np.flatnonzero(over).tolist():
                self.ep_return[slot] = float(returns[slot].mean())
                self.ends.append((t, slot, float(self.ep_return[slot]), int(self.step[slot]), None))
                self.returns.append(returns[slot].copy())
        _put_all(self.obs, batch.obs)
        _put_all(self.columns, {name: getattr(batch, name) for name in self.columns})
        self.active[...] = batch.active
        for slot in np.flatnonzero(~good).tolist():
            self._fault(slot, int(batch.status[slot]))
        nobody = np.zeros(0, np.int64)
        faulted = np.flatnonzero(~good & (batch.status != QUARANTINED))
        if len(faulted) or over.any():
            self._begin_next(np.flatnonzero(over & good), nobody, faulted)

    def _note_fates(self, t: int, batch: Batch, ended: Bools, over: Bools) -> None:
        groups = self.fleet.groups
        final = batch.final_obs
        for group in groups:
            b, k = np.nonzero(ended[:, np.asarray(group.indices)])
            if not len(b):
                continue
            part = final if len(groups) == 1 else final[group.name]
            last = tree_map(lambda leaf, at=(b, k): np.array(leaf[at]), part)
            state: Any = None
            if STATE in self.columns:
                at_end, now = getattr(batch, FINAL_STATE), getattr(batch, STATE)
                state = np.where(_wide(over, now), at_end, now)[b]
            index = np.stack([np.full(len(b), t), b, k], axis=1)
            self.fates[group.name].append((index, last, state))

    def _close(self, segment: Segment) -> None:
        assert isinstance(segment, AgentSegment)
        ends = sorted(zip(self.ends, self.returns), key=lambda end: end[0][:2])
        segment.end_index = np.array([end[:2] for end, _ in ends], dtype=np.int64).reshape(-1, 2)
        segment.end_return = np.array([end[2] for end, _ in ends], dtype=np.float64)
        segment.end_length = np.array([end[3] for end, _ in ends], dtype=np.int64)
        segment.end_returns = np.array([each for _, each in ends]).reshape(-1, segment.num_agents)
        for name, found in self.fates.items():
            if found:
                segment.fate_index[name] = np.concatenate([index for index, _, _ in found])
                segment.fate_obs[name] = tree_map(lambda *parts: np.concatenate(parts), *(obs for _, obs, _ in found))
                if STATE in self.columns:
                    segment.fate_state[name] = np.concatenate([state for _, _, state in found])
        segment.bootstrap_obs = tree_map(np.array, self.obs)
        segment.bootstrap_columns = {name: values.copy() for name, values in self.columns.items()}
        segment.bootstrap_active = self.active.copy()


def segment_run(engine: Engine, *parts: Any) -> SegmentRun:
    """The run that fits a fleet: with an agent axis where it has agents."""
    kind = AgentSegmentRun if getattr(engine.fleet, "agents", ()) else SegmentRun
    return kind(engine, *parts)


def _put(tree: Tree, t: int, values: Tree) -> None:
    for (_, leaf), (_, row) in zip(tree_leaves(tree), tree_leaves(values)):
        leaf[t] = row


def _put_all(tree: Tree, values: Tree) -> None:
    there = dict(tree_leaves(values))
    for path, leaf in tree_leaves(tree):
        leaf[...] = there[path]


def _wide(flags: Bools, like: npt.NDArray[Any]) -> Bools:
    """Flags [B] with as many trailing axes as `like` has."""
    wide: Bools = flags.reshape(-1, *(1,) * (like.ndim - 1))
    return wide
