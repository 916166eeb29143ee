"""Policies that play together: one forward pass per policy and batch, whoever's turn it is in whichever environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envfleet.multiagent.policy_map import Seats, part_of
from envfleet.networks.features import MASK_KEY
from envfleet.networks.network_policy import NotFinite, Policy
from envfleet.rollout.policy_protocol import Answer, Ask
from envfleet.rollout.segments.agent_segment import ACTIVE, AGENT_STEP
from envfleet.util.trees import Tree, tree_map

Ints = NDArray[np.int64]
SEAT = "seat"


class Opponents(Protocol):
    """Who else may sit at the table: -1 stands for the policies themselves, anything else for somebody of a pool."""

    def seating(self, ask: Ask) -> Ints:
        """Return who plays whom, [k, A]; episodes that begin are seated anew."""
        ...

    def player(self, number: int, policy: str) -> Policy:
        """Return who acts for a policy."""
        ...


class TeamPolicy:
    """Answers a collector for all agents: gathers the rows of every policy, asks it once, scatters the actions.

    Memory is kept per environment and agent, and only those who act advance theirs. Beside the actions it notes what
    was drawn where that differs from what the environment gets (`raw/<policy>`) and, with opponents, who sat where (`seat`).
    """

    answers_fit = True

    def __init__(
        self,
        seats: Sequence[Seats],
        policies: Mapping[str, Policy],
        num_agents: int,
        num_groups: int,
        opponents: Opponents | None = None,
    ) -> None:
        self.seats, self.policies = tuple(seats), dict(policies)
        self.num_agents, self.num_groups = num_agents, num_groups
        self.opponents = opponents
        self.version = 0
        sizes: dict[str, int] = {}
        for each in self.seats:
            sizes[each.group] = max(sizes.get(each.group, 0), int(each.within.max()) + 1)
        self._sizes = sizes  # agents of every group

    def act(self, ask: Ask) -> Answer:
        """Choose an action for every active agent; the others' are zeros, which nobody looks at."""
        active, first = ask.columns[ACTIVE], ask.columns[AGENT_STEP] == 0
        seating = self.opponents.seating(ask) if self.opponents is not None else None
        actions: dict[str, NDArray[Any]] = {}
        extras: dict[str, Any] = {} if seating is None else {SEAT: seating}
        for seats in self.seats:
            space = seats.action_space
            if seats.group not in actions:
                shape = (len(ask), self._sizes[seats.group], *(space.shape or ()))
                actions[seats.group] = np.zeros(shape, space.dtype)
            raw = self._play(seats, ask, active, first, seating, actions[seats.group])
            if raw is not None:
                extras[f"raw/{seats.name}"] = raw
        together: Tree = actions if self.num_groups > 1 else next(iter(actions.values()))
        return Answer(together, extras)

    def _play(
        self,
        seats: Seats,
        ask: Ask,
        active: NDArray[np.bool_],
        first: NDArray[np.bool_],
        seating: Ints | None,
        out: NDArray[Any],
    ) -> NDArray[Any] | None:
        """Fill in the actions of one policy's agents; return what was drawn, [k, P, …], where that is not the same."""
        obs = part_of(ask.obs, seats.group, self.num_groups)
        mask = mask_of(ask.columns, seats.group, self.num_groups)
        ours = self.policies[seats.name]
        kinds = ours.net.actions
        drawn: NDArray[Any] | None = None
        if not kinds.raw_is_env:
            drawn = np.zeros((len(ask), seats.count, *kinds.raw_shape()), kinds.raw_dtype())
        b, p = np.nonzero(active[:, seats.indices])
        who = seating[b, seats.indices[p]] if seating is not None else None
        for number in [-1] if who is None else np.unique(who).tolist():
            if who is not None:
                b, p = np.nonzero(active[:, seats.indices] & (seating == number)[:, seats.indices])  # type: ignore[index]
            if not len(b):
                continue
            player = ours if number < 0 or self.opponents is None else self.opponents.player(number, seats.name)
            at = b, seats.within[p]
            try:
                action, raw = player.choose(
                    tree_map(lambda leaf, at=at: leaf[at], obs),
                    ask.slots[b] * seats.count + p,
                    first[b, seats.indices[p]],
                    None if mask is None else mask[at],
                )
            except NotFinite as error:
                raise NotFinite(_where(error, ask, seats, b, p), error.rows) from error
            out[at] = action
            if drawn is not None:
                drawn[b, p] = raw
        return drawn


def mask_of(columns: Mapping[str, Any], group: str, num_groups: int) -> Any:
    """The column of legal actions of a group [k, agents, n]; None where there is none.

    Example:
        >>> mask_of({"action_mask:red": 1}, "red", 2), mask_of({}, "agent", 1)
        (1, None)
    """
    return columns.get(MASK_KEY if num_groups == 1 else f"{MASK_KEY}:{group}")


def _where(error: NotFinite, ask: Ask, seats: Seats, b: Ints, p: Ints) -> str:
    row = error.rows[0] if error.rows else 0
    where = f"slot {int(ask.slots[b[row]])}, agent {seats.agents[p[row]]}, step {int(ask.step[b[row]])}"
    return f"{error} at {where}: the observation or the network holds NaN"
