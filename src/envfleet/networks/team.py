"""Several policies in one environment: one forward pass per policy and batch, for all agents that must act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.multiagent.policy_map import Assignment, part_of
from envfleet.networks.features import MASK_KEY
from envfleet.networks.network_policy import NotFinite, Policy
from envfleet.rollout.policy_protocol import Answer, Ask
from envfleet.rollout.segments.agent_segment import ACTIVE, AGENT_STEP
from envfleet.util.trees import Tree, tree_map

if TYPE_CHECKING:
    from envfleet.train.selfplay import Pool  # past policies that play some of the agents

Ints = NDArray[np.int64]
PAST = "past_policy"  # [k, A] number of the past policy that plays an agent; -1: the present one


class TeamPolicy:
    """Answers a collector for all agents: gathers the rows of every policy, runs it once, scatters the actions.

    Memory is kept per environment and agent, and advances only for agents that act. The extras of an answer hold what
    was drawn where that differs from what the environment gets (`raw/<policy>`) and, with opponents, `past_policy`.
    """

    answers_fit = True

    def __init__(self, assigned: Sequence[Assignment], policies: Mapping[str, Policy], opponents: Pool | None = None) -> None:
        self.assigned, self.policies, self.opponents = tuple(assigned), dict(policies), opponents
        self.version = 0  # counts updates; the collector writes it beside every action
        self._sizes: dict[str, int] = {}  # group → its agents
        for each in self.assigned:
            self._sizes[each.group] = max(self._sizes.get(each.group, 0), int(each.within.max()) + 1)

    def arrive(self, rng: np.random.Generator, before: TeamPolicy | None) -> None:
        """Go on from another copy in a worker (see `FragmentCollector`)."""
        if self.opponents is not None:  # who plays a running episode, and what past policies remember, is known in one place only
            raise BadArgument("past policies do not travel to workers: use Collector")
        for (name, policy), own in zip(self.policies.items(), rng.spawn(len(self.policies))):
            policy.arrive(own, None if before is None else before.policies.get(name))

    def act(self, ask: Ask) -> Answer:
        """Choose an action for every active agent; the actions of the others are zeros, which the fleet ignores."""
        past = self.opponents.assign(ask) if self.opponents is not None else None
        actions: dict[str, NDArray[Any]] = {}
        extras: dict[str, Any] = {} if past is None else {PAST: past}
        for each in self.assigned:
            space = each.action_space
            if each.group not in actions:
                shape = (len(ask), self._sizes[each.group], *(space.shape or ()))
                actions[each.group] = np.zeros(shape, space.dtype)
            raw = self._play(each, ask, past, actions[each.group])
            if raw is not None:
                extras[f"raw/{each.name}"] = raw
        together: Tree = actions if len(self._sizes) > 1 else next(iter(actions.values()))
        return Answer(together, extras)

    def _play(self, ours: Assignment, ask: Ask, past: Ints | None, out: NDArray[Any]) -> NDArray[Any] | None:
        """Fill in the actions of one policy's agents; return what was drawn, [k, P, …], where that is not the same."""
        obs = part_of(ask.obs, ours.group, len(self._sizes))
        mask = mask_of(ask.columns, ours.group, len(self._sizes))
        policy = self.policies[ours.name]
        kinds = policy.net.actions
        drawn: NDArray[Any] | None = None
        if not kinds.raw_is_env:
            drawn = np.zeros((len(ask), ours.count, *kinds.raw_shape()), kinds.raw_dtype())
        active = ask.columns[ACTIVE][:, ours.indices]  # [k, P]
        number = None if past is None else past[:, ours.indices]  # [k, P]
        for playing in [-1] if number is None else np.unique(number[active]).tolist():
            b, p = np.nonzero(active if number is None else active & (number == playing))
            if not len(b):
                continue
            player = policy if playing < 0 or self.opponents is None else self.opponents.player(playing, ours.name)
            at = b, ours.within[p]
            try:
                action, raw = player.choose(
                    tree_map(lambda leaf, at=at: leaf[at], obs),
                    ask.slots[b] * ours.count + p,
                    ask.columns[AGENT_STEP][b, ours.indices[p]] == 0,
                    None if mask is None else mask[at],
                )
            except NotFinite as error:
                raise NotFinite(_where(error, ask, ours, b, p), error.rows) from error
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


def _where(error: NotFinite, ask: Ask, ours: Assignment, b: Ints, p: Ints) -> str:
    row = error.rows[0] if error.rows else 0
    where = f"slot {int(ask.slots[b[row]])}, agent {ours.agents[p[row]]}, step {int(ask.step[b[row]])}"
    return f"{error} at {where}: the observation or the network holds NaN"
