"""From rows to transitions: every agent's own sequence, as a plain `Segment` per policy.

A transition of an agent begins at the step at which it acts and is closed by the step that scores it, which may come
many rows later: others move in between, and agents die and are born. Laid one below the other, an agent's transitions are
a column of a `Segment` like any other, so the one GAE and the one update run over them unchanged. Columns differ in
length; below the last transition of a column stands the observation its agent has next, whose value it is bootstrapped from.

A transition that is still open when the segment ends is held and becomes the first of that agent's in the next segment:
it is learned from one update later, with the probability its action has by then. A transition that a fault cut off is no
transition, as in single-agent segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.multiagent.policy_map import Seats, part_of
from envfleet.networks.features import CENTRAL, MASK_KEY, OWN
from envfleet.networks.team import SEAT, mask_of
from envfleet.rollout.segments.agent_segment import STATE, AgentSegment
from envfleet.rollout.segments.segment import RaggedSegment, Segment
from envfleet.util.trees import Tree, tree_leaves, tree_map

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
TUPLE = "__tuple__"


@dataclass(frozen=True)
class Numbers:
    """The transitions of every (slot, agent), numbered from 0 through a segment."""

    begun: Ints  # [T, B, A] the one that begins at this step; -1: none
    closed: Ints  # [T, B, A] the one that this step closes; -1: none
    complete: Ints  # [B, A] how many were closed
    still_open: Bools  # [B, A] one more was begun


class Transitions:
    """Cuts segments into sequences, and holds what is still open from one segment to the next.

    Example:
        >>> from types import SimpleNamespace
        >>> import gymnasium as gym
        >>> from envfleet.multiagent.policy_map import assign_policies
        >>> spaces = dict(observation_space=gym.spaces.Box(-1, 1, (1,)), action_space=gym.spaces.Discrete(2))
        >>> group = SimpleNamespace(name="player", agents=("player_0", "player_1"), **spaces)
        >>> transitions = Transitions(assign_policies("shared", group.agents, [group]), num_envs=1, num_agents=2)
        >>> segment = AgentSegment.of(
        ...     4, obs=np.zeros((1, 2, 1)), action=np.zeros((1, 2), np.int64), active=np.zeros((1, 2), bool)
        ... )
        >>> segment.acted[[0, 2], 0, 0] = segment.acted[[1, 3], 0, 1] = True  # they take turns
        >>> segment.agent_scored[[1, 3], 0, 0] = segment.agent_scored[2, 0, 1] = True
        >>> transitions.cut(segment)["shared"].lengths.tolist(), transitions.num_held
        ([2, 1], 1)
    """

    def __init__(
        self, seats: Sequence[Seats], num_envs: int, num_agents: int, num_groups: int = 1, central: bool = False
    ) -> None:
        self.seats, self.num_groups, self.central = tuple(seats), num_groups, central
        self.held_mask: Bools = np.zeros((num_envs, num_agents), np.bool_)  # an open transition is held
        self.held: dict[str, dict[str, Tree]] = {}  # policy → what was noted when it began, each [B · P, …]
        self.num_dropped = 0  # closed transitions that nothing could be said to follow

    @property
    def num_held(self) -> int:
        """Transitions that wait for their outcome."""
        return int(self.held_mask.sum())

    def cut(self, segment: AgentSegment, multiples: Mapping[str, int] | None = None) -> dict[str, RaggedSegment]:
        """One segment per policy, [T', B · P]: T' is its longest sequence, rounded up to its multiple."""
        numbers, by = self._number(segment), multiples or {}
        made = {seats.name: self._of_policy(seats, segment, numbers, by.get(seats.name, 1)) for seats in self.seats}
        # What is open now was begun here, or was held before and is so still: both stand in the row after the last.
        self.held_mask = numbers.still_open
        return made

    def _number(self, segment: AgentSegment) -> Numbers:
        begins = segment.acted
        if SEAT in segment.extras:
            begins = begins & (segment.extras[SEAT] < 0)
        closes = segment.agent_scored | segment.agent_terminated | segment.agent_truncated
        still_open = self.held_mask.copy()  # [B, A]
        count = still_open.astype(np.int64)  # [B, A]
        begun = np.full(begins.shape, -1, np.int64)
        closed = np.full(begins.shape, -1, np.int64)
        for t in range(len(begins)):
            begun[t][begins[t]] = count[begins[t]]
            count += begins[t]
            still_open |= begins[t]
            done = still_open & closes[t]
            closed[t][done] = count[done] - 1
            still_open &= ~done
        return Numbers(begun, closed, count - still_open, still_open)

    def _of_policy(self, seats: Seats, segment: AgentSegment, numbers: Numbers, multiple: int) -> RaggedSegment:
        lengths = numbers.complete[:, seats.indices].reshape(-1)  # [B · P]
        steps = -(-max(int(lengths.max(initial=0)), 1) // multiple) * multiple
        rows = self._notes(seats, segment, numbers.begun, lengths, steps)
        columns = np.arange(len(lengths))
        self.held[seats.name] = tree_map(lambda leaf: leaf[lengths, columns].copy(), rows)
        result = RaggedSegment.empty(
            steps, len(lengths), obs=tree_map(lambda leaf: leaf[0], rows["obs"]), action=rows["raw"][0]
        )
        result.obs = tree_map(lambda leaf: leaf[:steps], rows["obs"])
        result.bootstrap_obs = tree_map(lambda leaf: leaf[steps], rows["obs"])
        result.action = rows["raw"][:steps]
        result.step, result.episode = rows["step"][:steps], rows["episode"][:steps]
        result.policy_version = rows["version"][:steps]
        result.slots = np.repeat(segment.slots, seats.count)
        result.lengths = lengths
        if MASK_KEY in rows:
            result.columns[MASK_KEY] = rows[MASK_KEY][:steps]
        self._outcomes(result, seats, segment, numbers.closed)
        self._drop_unfollowed(result, seats, segment, numbers)
        return result

    def _notes(self, seats: Seats, segment: AgentSegment, begun: Ints, lengths: Ints, steps: int) -> dict[str, Tree]:
        """What was known when each transition began, [T' + 1, B · P, …]; below the last one, what its agent has next."""
        now = self._seen(seats, segment, segment.obs, segment.columns, (slice(None), slice(None)))
        now["raw"] = self._raw(seats, segment)
        shape = (segment.num_steps, segment.num_slots, seats.count)
        now["step"] = segment.agent_step[:, :, seats.indices]
        now["episode"] = np.broadcast_to(segment.episode[..., None], shape)
        now["version"] = np.broadcast_to(segment.policy_version[..., None], shape)
        room: dict[str, Tree] = tree_map(
            lambda leaf: np.zeros((steps + 1, len(lengths), *leaf.shape[3:]), leaf.dtype), now
        )
        for _, leaf in tree_leaves(room["step"]):
            leaf[...] = -1
        before = self.held_mask[:, seats.indices].reshape(-1)
        if before.any():
            _copy(room, (0, before), self.held[seats.name], (before,))
        t, b, p = np.nonzero(begun[:, :, seats.indices] >= 0)
        _copy(room, (begun[t, b, seats.indices[p]], b * seats.count + p), now, (t, b, p))
        waiting = segment.bootstrap_active[:, seats.indices]
        b, p = np.nonzero(waiting)
        after = self._seen(seats, segment, segment.bootstrap_obs, segment.bootstrap_columns, (slice(None),))
        columns = b * seats.count + p
        _copy({name: room[name] for name in after}, (lengths[columns], columns), after, (b, p))
        return room

    def _seen(
        self, seats: Seats, segment: AgentSegment, obs: Tree, columns: dict[str, Any], lead: tuple[Any, ...]
    ) -> dict[str, Tree]:
        """Observation, and mask where there is one, of this policy's agents: [*lead, P, …]."""
        own = tree_map(lambda leaf: leaf[(*lead, seats.within)], part_of(obs, seats.group, self.num_groups))
        if self.central:
            state = columns[STATE]
            per_agent = np.repeat(np.expand_dims(state, len(lead)), seats.count, axis=len(lead))
            own = {OWN: own, CENTRAL: per_agent}
        seen: dict[str, Tree] = {"obs": own}
        mask = mask_of(columns, seats.group, self.num_groups)
        if mask is not None:
            seen[MASK_KEY] = mask[(*lead, seats.within)]
        return seen

    def _raw(self, seats: Seats, segment: AgentSegment) -> NDArray[Any]:
        drawn = segment.extras.get(f"raw/{seats.name}")
        if drawn is not None:
            return drawn
        action: NDArray[Any] = part_of(segment.action, seats.group, self.num_groups)[:, :, seats.within]
        return action

    def _outcomes(self, result: Segment, seats: Seats, segment: AgentSegment, closed: Ints) -> None:
        t, b, p = np.nonzero(closed[:, :, seats.indices] >= 0)
        a = seats.indices[p]
        where = closed[t, b, a], b * seats.count + p
        result.reward[where] = segment.agent_reward[t, b, a]
        result.terminated[where] = segment.agent_terminated[t, b, a]
        result.truncated[where] = segment.agent_truncated[t, b, a]
        result.scored[where] = segment.agent_scored[t, b, a]
        result.task[where] = segment.task[t, b]
        fates = segment.fate_index.get(seats.group)
        if fates is None:
            return
        place = np.full(
            int(max(fates[:, 2].max(), seats.within.max())) + 1, -1
        )  # place in the group → place in the policy
        place[seats.within] = np.arange(seats.count)
        t, b, p = fates[:, 0], fates[:, 1], place[fates[:, 2]]
        number = np.where(p >= 0, closed[t, b, seats.indices[p]], -1)
        ours = number >= 0
        result.end_index = np.stack([number, b * seats.count + p], axis=1)[ours]
        last: Tree = tree_map(lambda leaf: leaf[ours], segment.fate_obs[seats.group])
        result.final_obs = {OWN: last, CENTRAL: segment.fate_state[seats.group][ours]} if self.central else last
        result.end_return, result.end_length = np.zeros(int(ours.sum())), np.zeros(int(ours.sum()), np.int64)

    def _drop_unfollowed(self, result: RaggedSegment, seats: Seats, segment: AgentSegment, numbers: Numbers) -> None:
        """An agent that was scored, has not ended and has no observation: there is nothing to bootstrap from."""
        lengths = result.lengths
        goes_on = (segment.bootstrap_active | numbers.still_open)[:, seats.indices].reshape(-1)
        columns = np.flatnonzero((lengths > 0) & ~goes_on)
        last = lengths[columns] - 1
        lost = ~result.ended[last, columns]
        result.scored[last[lost], columns[lost]] = False
        self.num_dropped += int(lost.sum())

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        held = {name: _plain(rows) for name, rows in self.held.items()}
        return {"mask": self.held_mask.copy(), "held": held, "dropped": self.num_dropped}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.held_mask, self.num_dropped = np.array(state["mask"], bool), int(state["dropped"])
        self.held = {name: _tree(rows) for name, rows in state["held"].items()}

    def forget(self, slots: Ints) -> None:
        """The running episodes of these slots are not continued: nothing of them is open any more."""
        self.held_mask[slots] = False


def _copy(room: Tree, where: Any, values: Tree, at: Any) -> None:
    there = dict(tree_leaves(values))
    for path, leaf in tree_leaves(room):
        leaf[where] = there[path][at]


def _plain(tree: Tree) -> Any:
    """A tree as a checkpoint keeps it, which knows lists but no tuples."""
    if isinstance(tree, dict):
        return {name: _plain(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return {TUPLE: [_plain(part) for part in tree]}
    return np.array(tree)


def _tree(value: Any) -> Tree:
    if isinstance(value, dict) and set(value) == {TUPLE}:
        return tuple(_tree(part) for part in value[TUPLE])
    if isinstance(value, dict):
        return {name: _tree(part) for name, part in value.items()}
    return np.array(value)
