"""Several agents as one: a PettingZoo environment with one joint observation and one joint action, for a single policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import BadArgument

Joint = npt.NDArray[np.float32]


class FlattenMultiAgentWrapper(gym.Env[Any, Any]):
    """A PettingZoo AEC or parallel environment as one single-agent Gymnasium environment.

    The observation is one float32 vector: every agent's observation, flattened, in the order of `possible_agents`
    (an action mask among them too). The action is a MultiDiscrete with an entry for each agent (Discrete and MultiDiscrete
    agents) or one Box (Box agents). An inactive agent has zeros in the observation; in the step in which an agent ends, its
    part is its last observation. `info["active"]` says which agents act next, `info["agents"]` holds the
    agents' own infos when there are any, and `info["is_success"]` comes at the end if all agents reported one.

    The episode is over when no agent is left: `truncated` if one of the last agents was truncated, else `terminated`.

    For an AEC environment a step is one full cycle: each live agent acts once, in the environment's order, with the part
    of the joint action that was chosen before the cycle began.

    This is centralised control. It suits a few cooperating agents; it is wrong for games in which they compete (one policy
    plays both sides, and the sum of their rewards is constant), and in turn-based games the second
    player cannot react to the first. Mixed kinds of actions are refused.

    Args:
        env: the environment, an instance.
        reward: "sum" or "mean" over the agents rewarded in the step, or a callable of {agent: reward}.
        dead_actions: "ignore" actions of inactive agents, or "refuse" them (an error unless they are zero).

    Example:
        >>> from envfleet.envs.gridworld import GridWorldEnvParallel
        >>> env = FlattenMultiAgentWrapper(GridWorldEnvParallel(size=4))
        >>> observation, info = env.reset(seed=1)
        >>> observation.shape, env.action_space, info["active"]
        ((126,), MultiDiscrete([5 5]), array([1, 1], dtype=int8))
        >>> observation, reward, terminated, truncated, info = env.step([0, 0])
        >>> round(reward, 3)
        -0.02
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012 (the base class has it so)

    def __init__(
        self,
        env: Any,
        reward: Literal["sum", "mean"] | Callable[[Mapping[str, float]], float] = "sum",
        dead_actions: Literal["ignore", "refuse"] = "ignore",
    ) -> None:
        if not hasattr(env, "possible_agents"):
            raise BadArgument(
                f"{type(env).__name__} has no possible_agents: give an instance of a PettingZoo AECEnv or ParallelEnv "
                "(a Gymnasium environment needs no flattening)"
            )
        self.env, self._parallel = env, _AecCycles(env) if hasattr(env, "agent_iter") else env
        if not callable(reward) and reward not in ("sum", "mean"):
            raise BadArgument(f"reward={reward!r}: choose 'sum', 'mean' or give a callable of {{agent: reward}}")
        if dead_actions not in ("ignore", "refuse"):
            raise BadArgument(f"dead_actions={dead_actions!r}: choose 'ignore' or 'refuse'")
        self._reward, self._refuse = reward, dead_actions == "refuse"
        self.agents: tuple[str, ...] = tuple(env.possible_agents)
        self.render_mode = getattr(env, "render_mode", None)
        self.metadata = {**self.metadata, **env.metadata}
        self._seen = {agent: env.observation_space(agent) for agent in self.agents}
        self._acts = {agent: env.action_space(agent) for agent in self.agents}
        self.observation_space = _joint_observation(self._seen)
        self._places = _parts([spaces.flatdim(space) for space in self._seen.values()], self.agents)
        self.action_space, self._parts = _joint_action(self._acts)
        self._active: dict[str, Any] = {}  # live agent -> its observation
        self._success: dict[str, bool] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Joint, dict[str, Any]]:
        """Reset the environment; returns the joint observation and info."""
        super().reset(seed=seed)
        self._success = {}
        observations, infos = self._parallel.reset(seed=seed, options=options)
        self._active = {agent: observations[agent] for agent in self.env.agents}
        return self._joint(observations), self._info(infos, over=False)

    def step(self, action: Any) -> tuple[Joint, float, bool, bool, dict[str, Any]]:
        """One action of every live agent."""
        joint = np.asarray(action)
        if joint.shape != self.action_space.shape:
            raise BadArgument(f"the joint action has shape {joint.shape}, the space {self.action_space.shape}")
        if self._refuse:
            self._check_dead(joint)
        chosen = {agent: self._part(agent, joint) for agent in self._active}
        observations, rewards, terminated, truncated, infos = self._parallel.step(chosen)
        over = not self.env.agents
        self._active = {agent: observations[agent] for agent in self.env.agents}
        cut = over and any(cut and not terminated.get(agent) for agent, cut in truncated.items())
        info = self._info(infos, over)
        return self._joint(observations), self._joint_reward(rewards), over and not cut, cut, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """The agents' action masks one after the other, as sb3-contrib's MaskablePPO asks for them.

        Only for Discrete agents. Without a mask every action is legal; an inactive agent has only the first action.
        """
        masks = []
        for agent in self.agents:
            if not isinstance(space := self._acts[agent], spaces.Discrete):
                raise BadArgument(f"action_masks() needs Discrete actions; {agent} has {space}")
            mask = np.zeros(int(space.n), np.bool_)
            if agent in self._active:
                seen = self._active[agent]
                mask[:] = seen["action_mask"] if isinstance(seen, Mapping) and "action_mask" in seen else True
            if not mask.any():  # not there, or there but not its turn
                mask[0] = True
            masks.append(mask)
        return np.concatenate(masks)

    def render(self) -> Any:
        """What the environment renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    # -- joint values ----------------------------------------------------------------------------------------------

    def _joint(self, observations: Mapping[str, Any]) -> Joint:
        out = np.zeros(self.observation_space.shape or (), np.float32)
        for agent, part in self._places.items():
            if agent in observations:
                flat: Any = spaces.flatten(self._seen[agent], observations[agent])
                out[part] = flat
        return out

    def _part(self, agent: str, joint: npt.NDArray[Any]) -> Any:
        space, part = self._acts[agent], joint[self._parts[agent]]
        if isinstance(space, spaces.Discrete):
            return int(part[0]) + int(space.start)
        if isinstance(space, spaces.MultiDiscrete):
            return (part + space.start).astype(space.dtype).reshape(space.shape)
        return part.astype(space.dtype).reshape(space.shape)

    def _check_dead(self, joint: npt.NDArray[Any]) -> None:
        for agent, part in self._parts.items():
            if agent not in self._active and np.any(joint[part]):
                raise BadArgument(
                    f"an action for {agent}, which is not there: give zeros where info['active'] is 0, or dead_actions='ignore'"
                )

    def _joint_reward(self, rewards: Mapping[str, float]) -> float:
        if callable(self._reward):
            return float(self._reward(rewards))
        total = float(sum(rewards.values()))
        return total / len(rewards) if self._reward == "mean" and rewards else total

    def _info(self, infos: Mapping[str, Any], over: bool) -> dict[str, Any]:
        info: dict[str, Any] = {"active": np.array([agent in self._active for agent in self.agents], np.int8)}
        said = {agent: one for agent, one in infos.items() if one}
        if said:
            info["agents"] = said
        self._success.update({agent: bool(one["is_success"]) for agent, one in said.items() if "is_success" in one})
        if over and len(self._success) == len(self.agents):
            info["is_success"] = all(self._success.values())
        return info


# -- one agent after the other ------------------------------------------------------------------------------------

Result = tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]


class _AecCycles:
    """An AEC environment, one full cycle at a time, with the methods of a parallel one."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        return self._observations(), dict(self.env.infos)

    def step(self, actions: dict[str, Any]) -> Result:
        env, rewards = self.env, dict[str, float]()
        ends: dict[str, tuple[Any, bool, bool, Any]] = {}
        while env.agents:
            agent = env.agent_selection
            if env.terminations[agent] or env.truncations[agent]:
                ends[agent] = (env.observe(agent), bool(env.terminations[agent]), bool(env.truncations[agent]), env.infos[agent])
                env.step(None)
            elif agent in actions:
                env.step(actions.pop(agent))
                for other, reward in env.rewards.items():
                    rewards[other] = rewards.get(other, 0.0) + float(reward)
            else:  # round again, or an agent born in this cycle
                break
        observations, infos = self._observations(), dict(env.infos)
        terminated, truncated = dict.fromkeys(env.agents, False), dict.fromkeys(env.agents, False)
        for agent, end in ends.items():
            observations[agent], terminated[agent], truncated[agent], infos[agent] = end
        return observations, rewards, terminated, truncated, infos

    def _observations(self) -> dict[str, Any]:
        return {agent: self.env.observe(agent) for agent in self.env.agents}


# -- joint spaces --------------------------------------------------------------------------------------------------


def _joint_observation(seen: Mapping[str, spaces.Space[Any]]) -> spaces.Box:
    lows, highs = [], []
    for agent, space in seen.items():
        flat = spaces.flatten_space(space) if space.is_np_flattenable else None
        if not isinstance(flat, spaces.Box):
            raise BadArgument(f"the observations of {agent} cannot be flattened into a vector: {space}")
        # An inactive agent is shown as zeros, so they belong to the space.
        lows.append(np.minimum(flat.low, 0).astype(np.float32))
        highs.append(np.maximum(flat.high, 0).astype(np.float32))
    return spaces.Box(np.concatenate(lows), np.concatenate(highs), dtype=np.float32)


def _parts(widths: Sequence[int], agents: Sequence[str]) -> dict[str, slice]:
    """The slice of each agent in a vector of parts of these widths."""
    edges = np.cumsum([0, *widths]).tolist()
    return {agent: slice(first, last) for agent, (first, last) in zip(agents, itertools.pairwise(edges))}


def _joint_action(acts: Mapping[str, spaces.Space[Any]]) -> tuple[spaces.Space[Any], dict[str, slice]]:
    """The joint space and the slice of each agent in it."""
    widths = [1 if isinstance(space, spaces.Discrete) else int(np.prod(space.shape or ())) for space in acts.values()]
    parts = _parts(widths, tuple(acts))
    if all(isinstance(space, spaces.Box) for space in acts.values()):
        boxes = [space for space in acts.values() if isinstance(space, spaces.Box)]
        low, high = (np.concatenate([getattr(box, end).reshape(-1) for box in boxes]) for end in ("low", "high"))
        return spaces.Box(low, high, dtype=np.result_type(*(box.dtype for box in boxes)).type), parts
    choices: list[int] = []
    for agent, space in acts.items():
        if isinstance(space, spaces.Discrete):
            choices.append(int(space.n))
        elif isinstance(space, spaces.MultiDiscrete):
            choices += [int(n) for n in space.nvec.reshape(-1)]
        else:
            kinds = ", ".join(f"{agent}: {space}" for agent, space in acts.items())
            raise BadArgument(
                f"the actions of {agent} do not go into one joint action with the others ({kinds}): "
                "either all are Box, or all are Discrete or MultiDiscrete"
            )
    return spaces.MultiDiscrete(choices), parts
