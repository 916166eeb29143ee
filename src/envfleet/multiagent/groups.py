"""Agents with equal spaces form a group; a group's spaces, batched over its agents, are what a row holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envfleet.slots.layout import leaves_of

Spaces = Sequence[gym.Space[Any]]


@dataclasses.dataclass(frozen=True)
class AgentGroup:
    """Agents that share one observation space and one action space.

    `indices` are the agents' places on the agent axis; the spaces are those of one agent.

    Example:
        >>> two = [spaces.Discrete(2)] * 2
        >>> groups_of(["red_0", "red_1"], two, two)[0].name
        'red'
    """

    name: str
    agents: tuple[str, ...]
    indices: tuple[int, ...]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]

    def __len__(self) -> int:
        return len(self.agents)


def groups_of(agents: Sequence[str], observation_spaces: Spaces, action_spaces: Spaces) -> tuple[AgentGroup, ...]:
    """The groups of some agents, in the order in which their first agents come.

    Example:
        >>> see, act = spaces.Discrete(3), spaces.Discrete(2)
        >>> [(g.name, g.indices) for g in groups_of(["cat_0", "mouse_0", "cat_1"], [see, act, see], [act] * 3)]
        [('cat', (0, 2)), ('mouse', (1,))]
    """
    members: list[list[int]] = []
    for i in range(len(agents)):
        for group in members:
            if observation_spaces[group[0]] == observation_spaces[i] and action_spaces[group[0]] == action_spaces[i]:
                group.append(i)
                break
        else:
            members.append([i])
    made: list[AgentGroup] = []
    for group in members:
        names = tuple(str(agents[i]) for i in group)
        name = _name(names)
        if any(name == other.name for other in made):
            name = names[0]
        made.append(AgentGroup(name, names, tuple(group), observation_spaces[group[0]], action_spaces[group[0]]))
    return tuple(made)


def _name(agents: tuple[str, ...]) -> str:
    """What the agents' names have in common, without a trailing number; the first agent's name if that is nothing."""
    shortest, common = min(agents, key=len), 0
    while common < len(shortest) and len({agent[common] for agent in agents}) == 1:
        common += 1
    return shortest[:common].rstrip("_0123456789") or agents[0]


def joint_space(groups: Sequence[AgentGroup], kind: str) -> gym.Space[Any]:
    """The space of all agents' observations or actions together: batched over a group, a dict over several.

    Example:
        >>> joint_space(groups_of(["a_0", "a_1"], [spaces.Discrete(3)] * 2, [spaces.Discrete(2)] * 2), "action")
        MultiDiscrete([2 2])
    """
    batched = {group.name: batch_space(getattr(group, f"{kind}_space"), len(group)) for group in groups}
    return batched[groups[0].name] if len(groups) == 1 else spaces.Dict(batched)


def refuse_mailbox(groups: Sequence[AgentGroup]) -> None:
    """Agents' spaces must be made of arrays: refuse Text, Sequence, Graph and what is not known."""
    for group in groups:
        for kind in ("observation", "action"):
            for leaf in leaves_of(getattr(group, f"{kind}_space")):
                if not leaf.is_column:
                    raise TypeError(
                        f"the {kind} space of agent {group.agents[0]!r} has {leaf.space}{leaf.name}, which has no fixed "
                        "shape: with many agents only Box, Discrete, MultiDiscrete and MultiBinary (and Dict or Tuple "
                        "of them) can be stored"
                    )
