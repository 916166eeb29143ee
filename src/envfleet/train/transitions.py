"""From rows to transitions: every agent's own sequence, as a plain `Segment` per policy.

A transition of an agent begins at the step at which it acts and is closed by the step that scores it, which may come
many rows later: others move in between, and agents die and are born. The transitions of an agent form one column of a
`Segment`, so the same GAE and the same update run over them unchanged. Columns differ in
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

from envfleet.multiagent.policy_map import Assignment, part_of
from envfleet.networks.features import CENTRAL, MASK_KEY, OWN
from envfleet.networks.team import PAST, mask_of
from envfleet.rollout.segments.agent_segment import STATE, AgentSegment
from envfleet.rollout.segments.segment import RaggedSegment, Segment
from envfleet.util.trees import Tree, tree_map, tree_put, tree_rows

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Numbers:
    """The transitions of every (slot, agent), numbered from 0 through a segment."""

    begun: Ints  # [T, B, A] the one that begins at this step; -1: none
    closed: Ints  # [T, B, A] the one that this step closes; -1: none
    complete: Ints  # [B, A] how many were closed
    still_open: Bools  # [B, A] one more was begun


class Transitions:
    """Cuts segments into sequences, and holds what is still open from one segment to the next."""

    def __init__(self, assigned: Sequence[Assignment], num_envs: int, central: bool = False) -> None:
        self.assigned, self.central = tuple(assigned), central
        self.num_groups = len({each.group for each in assigned})
        num_agents = sum(each.count for each in assigned)
        self.held_mask: Bools = np.zeros((num_envs, num_agents), np.bool_)  # an open transition is held
        self.held: dict[str, dict[str, Tree]] = {}  # policy → what was noted when it began, each [B · P, …]
        self.num_dropped = 0  # closed transitions without an observation that follows

    @property
    def num_held(self) -> int:
        """Transitions that wait for their outcome."""
        return int(self.held_mask.sum())

    def cut(self, segment: AgentSegment, multiples: Mapping[str, int] | None = None) -> dict[str, RaggedSegment]:
        """One segment per policy, [T', B · P]: T' is its longest sequence, rounded up to its multiple."""
        numbers, by = self._number(segment), multiples or {}
        made = {each.name: self._of_policy(each, segment, numbers, by.get(each.name, 1)) for each in self.assigned}
        # What is open now was begun here, or was held before and is so still: both stand in the row after the last.
        self.held_mask = numbers.still_open
        return made

    def _number(self, segment: AgentSegment) -> Numbers:
        begins = segment.acted
        if PAST in segment.extras:
            begins = begins & (segment.extras[PAST] < 0)
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

    def _of_policy(self, ours: Assignment, segment: AgentSegment, numbers: Numbers, multiple: int) -> RaggedSegment:
        lengths = numbers.complete[:, ours.indices].reshape(-1)  # [B · P]
        steps = -(-max(int(lengths.max(initial=0)), 1) // multiple) * multiple
        rows = self._notes(ours, segment, numbers.begun, lengths, steps)
        columns = np.arange(len(lengths))
        self.held[ours.name] = tree_map(lambda leaf: leaf[lengths, columns].copy(), rows)
        result = RaggedSegment.empty(steps, len(lengths), obs=tree_map(lambda leaf: leaf[0], rows["obs"]), action=rows["raw"][0])
        result.obs = tree_map(lambda leaf: leaf[:steps], rows["obs"])
        result.bootstrap_obs = tree_map(lambda leaf: leaf[steps], rows["obs"])
        result.action = rows["raw"][:steps]
        result.step, result.episode = rows["step"][:steps], rows["episode"][:steps]
        result.policy_version = rows["version"][:steps]
        result.slots = np.repeat(segment.slots, ours.count)
        result.lengths = lengths
        if MASK_KEY in rows:
            result.columns[MASK_KEY] = rows[MASK_KEY][:steps]
        self._outcomes(result, ours, segment, numbers.closed)
        self._drop_unfollowed(result, ours, segment, numbers)
        return result

    def _notes(self, ours: Assignment, segment: AgentSegment, begun: Ints, lengths: Ints, steps: int) -> dict[str, Tree]:
        """What was known when each transition began, [T' + 1, B · P, …]; below the last one, what its agent has next."""
        now = self._seen(ours, segment, segment.obs, segment.columns, (slice(None), slice(None)))
        now["raw"] = self._raw(ours, segment)
        shape = (segment.num_steps, segment.num_slots, ours.count)
        now["step"] = segment.agent_step[:, :, ours.indices]
        now["episode"] = np.broadcast_to(segment.episode[..., None], shape)
        now["version"] = np.broadcast_to(segment.policy_version[..., None], shape)
        room: dict[str, Tree] = tree_map(lambda leaf: np.zeros((steps + 1, len(lengths), *leaf.shape[3:]), leaf.dtype), now)
        room["step"][...] = -1
        before = self.held_mask[:, ours.indices].reshape(-1)
        if before.any():
            tree_put(room, (0, before), tree_rows(self.held[ours.name], before))
        t, b, p = np.nonzero(begun[:, :, ours.indices] >= 0)
        tree_put(room, (begun[t, b, ours.indices[p]], b * ours.count + p), tree_rows(now, (t, b, p)))
        waiting = segment.bootstrap_active[:, ours.indices]
        b, p = np.nonzero(waiting)
        after = self._seen(ours, segment, segment.bootstrap_obs, segment.bootstrap_columns, (slice(None),))
        columns = b * ours.count + p
        tree_put({name: room[name] for name in after}, (lengths[columns], columns), tree_rows(after, (b, p)))
        return room

    def _seen(
        self, ours: Assignment, segment: AgentSegment, obs: Tree, columns: dict[str, Any], lead: tuple[Any, ...]
    ) -> dict[str, Tree]:
        """Observation, and mask where there is one, of this policy's agents: [*lead, P, …]."""
        own = tree_map(lambda leaf: leaf[(*lead, ours.within)], part_of(obs, ours.group, self.num_groups))
        if self.central:
            state = columns[STATE]
            per_agent = np.repeat(np.expand_dims(state, len(lead)), ours.count, axis=len(lead))
            own = {OWN: own, CENTRAL: per_agent}
        seen: dict[str, Tree] = {"obs": own}
        mask = mask_of(columns, ours.group, self.num_groups)
        if mask is not None:
            seen[MASK_KEY] = mask[(*lead, ours.within)]
        return seen

    def _raw(self, ours: Assignment, segment: AgentSegment) -> NDArray[Any]:
        drawn = segment.extras.get(f"raw/{ours.name}")
        if drawn is not None:
            return drawn
        action: NDArray[Any] = part_of(segment.action, ours.group, self.num_groups)[:, :, ours.within]
        return action

    def _outcomes(self, result: Segment, ours: Assignment, segment: AgentSegment, closed: Ints) -> None:
        t, b, p = np.nonzero(closed[:, :, ours.indices] >= 0)
        a = ours.indices[p]
        where = closed[t, b, a], b * ours.count + p
        result.reward[where] = segment.agent_reward[t, b, a]
        result.terminated[where] = segment.agent_terminated[t, b, a]
        result.truncated[where] = segment.agent_truncated[t, b, a]
        result.scored[where] = segment.agent_scored[t, b, a]
        result.task[where] = segment.task[t, b]
        fates = segment.fate_index.get(ours.group)
        if fates is None:
            return
        size = int(max(fates[:, 2].max(), ours.within.max())) + 1
        place = np.full(size, -1)  # place in the group → place in the policy
        place[ours.within] = np.arange(ours.count)
        t, b, p = fates[:, 0], fates[:, 1], place[fates[:, 2]]
        number = np.where(p >= 0, closed[t, b, ours.indices[p]], -1)
        kept = number >= 0
        result.end_index = np.stack([number, b * ours.count + p], axis=1)[kept]
        last: Tree = tree_map(lambda leaf: leaf[kept], segment.fate_obs[ours.group])
        result.final_obs = {OWN: last, CENTRAL: segment.fate_state[ours.group][kept]} if self.central else last
        result.end_return, result.end_length = np.zeros(int(kept.sum())), np.zeros(int(kept.sum()), np.int64)

    def _drop_unfollowed(self, result: RaggedSegment, ours: Assignment, segment: AgentSegment, numbers: Numbers) -> None:
        """An agent that was scored, has not ended and has no observation: there is nothing to bootstrap from."""
        lengths = result.lengths
        goes_on = (segment.bootstrap_active | numbers.still_open)[:, ours.indices].reshape(-1)
        columns = np.flatnonzero((lengths > 0) & ~goes_on)
        last = lengths[columns] - 1
        lost = ~result.ended[last, columns]
        result.scored[last[lost], columns[lost]] = False
        self.num_dropped += int(lost.sum())

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        held = {name: tree_map(np.array, rows) for name, rows in self.held.items()}
        return {"mask": self.held_mask.copy(), "held": held, "dropped": self.num_dropped}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.held_mask, self.num_dropped = np.array(state["mask"], bool), int(state["dropped"])
        self.held = {name: tree_map(np.array, rows) for name, rows in state["held"].items()}

    def forget(self, slots: Ints) -> None:
        """Drop the open transitions of these slots, whose running episodes are not continued."""
        self.held_mask[slots] = False
