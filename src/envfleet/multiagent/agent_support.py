"""What backends give the slot life, so that it can deal with environments of many agents."""

from __future__ import annotations

from typing import Any

from envfleet.multiagent.agent_row import AgentRow
from envfleet.multiagent.pettingzoo import as_agent_env
from envfleet.slots.slab import Slab


class AgentSupport:
    """`envfleet.slots.slot_life.ManyAgents`, by this package."""

    def adapt(self, env: Any) -> Any:
        """The env as one with joint spaces, if it has many agents; any other env as it is."""
        return as_agent_env(env)

    def row(self, slab: Slab, slot: int) -> AgentRow:
        """Writes the row of a slot with many agents."""
        return AgentRow(slab, slot)


AGENTS = AgentSupport()
