"""`AgentSegment`: a segment of a fleet with agents.

Axes: T steps, B slots, A agents, k the agents of one group. What belongs to an environment keeps the meaning it has in
`Segment` ([T, B]: `scored`, `step`, `episode`, …); what belongs to an agent has the agent axis and a name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.rollout.segments.segment import Bools, Floats, Ints, Segment
from envfleet.util.trees import Tree

ACTIVE, AGENT_STEP = "active", "agent_step"
STATE, FINAL_STATE = "state", "final_state"


@dataclass(kw_only=True)
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

    acted: Bools  # [T, B, A]
    agent_step: Ints  # [T, B, A] actions of this life
    agent_reward: Floats  # [T, B, A]
    agent_terminated: Bools  # [T, B, A]
    agent_truncated: Bools  # [T, B, A]
    agent_scored: Bools  # [T, B, A]
    bootstrap_active: Bools  # [B, A]
    end_returns: Floats  # [ended episodes, A]
    fate_index: dict[str, Ints] = field(default_factory=dict)  # group → [K, 3]: (t, b, place in the group) of ends
    fate_obs: dict[str, Tree] = field(default_factory=dict)  # group → [K, …] the last observations of those agents
    fate_state: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # group → [K, …] the state() of those moments

    @classmethod
    def of(cls, num_steps: int, *, obs: Tree, active: Bools, action: Tree = None) -> AgentSegment:
        """Make a segment to be filled; obs, action and active shaped like one batch ([B, A, …])."""
        slots, agents = active.shape
        shape = (num_steps, slots, agents)
        flags = ("acted", "agent_terminated", "agent_truncated", "agent_scored")
        return cls.empty(
            num_steps,
            slots,
            obs=obs,
            action=action,
            agent_step=np.zeros(shape, np.int64),
            agent_reward=np.zeros(shape),
            bootstrap_active=active.copy(),
            end_returns=np.zeros((0, agents)),
            **{name: np.zeros(shape, np.bool_) for name in flags},
        )
