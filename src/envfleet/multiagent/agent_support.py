"""What backends pass to the slot life for environments of many agents."""

from __future__ import annotations

from envfleet.multiagent.agent_row import AgentRow
from envfleet.multiagent.pettingzoo import as_agent_env


class AgentSupport:
    """`envfleet.slots.slot_life.ManyAgents`, by this package."""

    adapt = staticmethod(as_agent_env)
    row = AgentRow


AGENTS = AgentSupport()
