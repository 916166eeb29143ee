"""Which policy plays which agent: one for all, one each, or groups by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.multiagent.groups import AgentGroup

Policies = str | dict[str, list[str]]
SHARED, INDEPENDENT = "shared", "independent"


@dataclass(frozen=True)
class Assignment:
    """One policy and the agents it plays. P is their number, in the order of the agent axis."""

    name: str
    agents: tuple[str, ...]
    indices: NDArray[np.int64]  # [P] on the agent axis of all agents
    group: str  # the group they belong to
    within: NDArray[np.int64]  # [P] on the agent axis of the group's arrays
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]

    @property
    def count(self) -> int:
        """P, the agents of one environment that this policy plays."""
        return len(self.agents)


def read_policies(value: Any) -> Policies:
    """Bring a setting into its plain form; text may be "shared", "independent" or "a=agent_0+agent_1,b=agent_2".

    Example:
        >>> read_policies("red=red_0+red_1,blue=blue_0")
        {'red': ['red_0', 'red_1'], 'blue': ['blue_0']}
    """
    if isinstance(value, Mapping):
        if not value:
            raise BadArgument("policies={}: name at least one policy and its agents")
        lists = {str(name): members for name, members in value.items()}
        return {name: _members(name, members) for name, members in lists.items()}
    if value in (SHARED, INDEPENDENT):
        return str(value)
    if isinstance(value, str) and "=" in value:
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        return read_policies({name.strip(): members for name, _, members in pairs})
    raise BadArgument(
        f'policies={value!r}: it is "shared", "independent", or the agents of every policy by name, '
        'like {"red": ["red_0", "red_1"], "blue": ["blue_0"]} (on the command line: red=red_0+red_1,blue=blue_0)'
    )


def _members(name: str, members: Any) -> list[str]:
    listed = members.split("+") if isinstance(members, str) else list(members)
    found = [str(agent).strip() for agent in listed if str(agent).strip()]
    if not found:
        raise BadArgument(f"policies: the policy {name!r} has no agents")
    return found


def assign_policies(policies: Policies, agents: Sequence[str], groups: Sequence[AgentGroup]) -> tuple[Assignment, ...]:
    """Assign every agent to a policy. Agents of one policy need equal spaces; the error names those that differ.

    Example:
        >>> from types import SimpleNamespace
        >>> spaces = dict(observation_space=gym.spaces.Discrete(4), action_space=gym.spaces.Discrete(2))
        >>> group = SimpleNamespace(name="agent", agents=("agent_0", "agent_1"), **spaces)
        >>> [(one.name, one.agents) for one in assign_policies("independent", group.agents, [group])]
        [('agent_0', ('agent_0',)), ('agent_1', ('agent_1',))]
    """
    if policies == SHARED:
        wanted = {SHARED: list(agents)}
    elif policies == INDEPENDENT:
        wanted = {agent: [agent] for agent in agents}
    else:
        assert isinstance(policies, dict)
        wanted = policies
        _check_names(wanted, agents)
    return tuple(_assign(name, members, agents, groups) for name, members in wanted.items())


def _check_names(wanted: dict[str, list[str]], agents: Sequence[str]) -> None:
    named = [agent for members in wanted.values() for agent in members]
    unknown = [agent for agent in named if agent not in agents]
    missing = [agent for agent in agents if agent not in named]
    twice = sorted({agent for agent in named if named.count(agent) > 1})
    known = f"the agents are {', '.join(agents)}"
    if unknown:
        raise BadArgument(f"policies: there is no agent {', '.join(map(repr, unknown))}; {known}")
    if missing:
        raise BadArgument(f"policies: no policy plays {', '.join(missing)}; {known}")
    if twice:
        raise BadArgument(f"policies: {', '.join(twice)} appear more than once; an agent has one policy")


def _assign(name: str, members: list[str], agents: Sequence[str], groups: Sequence[AgentGroup]) -> Assignment:
    ordered = tuple(agent for agent in agents if agent in members)
    homes = [group for group in groups if any(agent in group.agents for agent in ordered)]
    if len(homes) > 1:
        raise BadArgument(
            f"policies: {name!r} cannot play agents with different spaces: {'; '.join(_spaces_of(ordered, homes))}. "
            'Give them policies of their own: policies="independent", or one per kind of agent by name'
        )
    home = homes[0]
    return Assignment(
        name,
        ordered,
        np.array([list(agents).index(agent) for agent in ordered], dtype=np.int64),
        home.name,
        np.array([list(home.agents).index(agent) for agent in ordered], dtype=np.int64),
        home.observation_space,
        home.action_space,
    )


def _spaces_of(agents: tuple[str, ...], groups: Sequence[AgentGroup]) -> list[str]:
    lines = []
    for group in groups:
        names = ", ".join(agent for agent in agents if agent in group.agents)
        verb = "observe" if "," in names else "observes"
        lines.append(f"{names} {verb} {group.observation_space} and act in {group.action_space}")
    return lines


def part_of(tree: Any, group: str, num_groups: int) -> Any:
    """The part of observations, actions or masks that belongs to a group: all of it where there is only one.

    Example:
        >>> part_of({"red": 1, "blue": 2}, "blue", 2), part_of(3, "agent", 1)
        (2, 3)
    """
    return tree if num_groups == 1 else tree[group]
