"""What tests of many agents share: a plain loop over PettingZoo, written from the contract alone, and transitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.envs.crowd import Crowd, crowd_aec

__all__ = ["Crowd", "by_agent", "crowd_aec", "draw", "joint", "plain_aec", "plain_parallel"]


def by_agent(fleet: Any, tree: Any, row: int) -> list[Any]:
    """Per agent its own part of one row of `obs`, `final_obs` or `action_mask`."""
    parts: list[Any] = [None] * len(fleet.agents)
    for group in fleet.groups:
        mine = tree if len(fleet.groups) == 1 else tree.get(group.name)
        for place, i in enumerate(group.indices):
            if mine is not None:
                parts[i] = {k: v[row, place] for k, v in mine.items()} if isinstance(mine, dict) else mine[row, place]
    return parts


def draw(fleet: Any, batch: Any, rngs: Any) -> np.ndarray[Any, Any]:
    """A legal action per slot and agent, [n, A]: from each slot's own generator, so that interleaving does not matter."""
    sizes = [next(g for g in fleet.groups if i in g.indices).action_space.n for i in range(len(fleet.agents))]
    masks = getattr(batch, "action_mask", None) if has_masks(fleet) else None
    rows = np.zeros((len(batch), len(sizes)), np.int64)
    for row, slot in enumerate(batch.slots.tolist()):
        mine = [None] * len(sizes) if masks is None else by_agent(fleet, masks, row)
        for i, size in enumerate(sizes):
            legal = np.flatnonzero(mine[i]) if mine[i] is not None and mine[i].any() else np.arange(size)
            rows[row, i] = rngs[slot].choice(legal)
    return rows


def has_masks(fleet: Any) -> bool:
    return any(name.startswith("action_mask") for name in fleet.layout.columns)


def joint(fleet: Any, actions: np.ndarray[Any, Any]) -> Any:
    """[n, A] as the fleet takes it: as it is, or a dict by group."""
    if len(fleet.groups) == 1:
        return actions
    return {group.name: actions[:, list(group.indices)] for group in fleet.groups}


def plain_parallel(env: Any, choose: Any, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Rows of one ParallelEnv, reset at every end; `choose(step)` gives an action for every possible agent."""
    agents = env.possible_agents
    obs, _ = env.reset(seed=seed)
    rows = [{"obs": dict(obs), "active": set(obs), "scored": {}, "final": {}, "ended": False, "earned": {}}]
    for step in range(num_steps):
        acting = [agent for agent in agents if agent in rows[-1]["active"]]
        action = choose(step)
        obs, rewards, terminations, truncations, _ = env.step({a: action[agents.index(a)] for a in acting})
        scored = {a: (rewards[a], bool(terminations[a]), bool(truncations[a])) for a in acting}
        final = {a: obs[a] for a in acting if terminations[a] or truncations[a]}
        ended = not env.agents
        if ended:
            obs, _ = env.reset()
        live = {a: obs[a] for a in env.agents}
        row = {"obs": live, "active": set(live), "scored": scored, "final": final, "ended": ended}
        rows.append({**row, "earned": dict(rewards)})
    return rows


def plain_aec(env: Any, choose: Any, num_steps: int, seed: int) -> list[tuple[Any, ...]]:
    """Transitions (agent, action, reward, terminated, truncated) of one AECEnv, as its own loop gives them.

    `choose(n)` gives the n-th action. Dead agents are stepped with None, as PettingZoo asks for.
    """
    env.reset(seed=seed)
    made, opened, acts = [], {}, 0
    while True:
        if not env.agents:
            assert not opened
            env.reset()
        agent = env.agent_selection
        _, reward, terminated, truncated, _ = env.last()
        if agent in opened:
            made.append((agent, opened.pop(agent), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            env.step(None)
            continue
        if acts == num_steps:
            return made
        opened[agent] = choose(acts)[env.possible_agents.index(agent)]
        env.step(opened[agent])
        acts += 1
