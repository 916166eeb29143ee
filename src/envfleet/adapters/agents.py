"""Fleets of many agents as other libraries show them: a dict by agent, or agents as rows of one batch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.adapters.fleet_view import FleetView
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import BackendName, EnvOptions, StartMethod
from envfleet.errors import BadArgument
from envfleet.multiagent.groups import AgentGroup
from envfleet.slots.layout import gather, leaves_of
from envfleet.util.trees import space_tree, tree_map

Array = np.ndarray[Any, Any]


class AsyncPettingZooVecEnv(FleetView):
    """PettingZoo environments side by side, as a dict agent -> [N, …] arrays: observations, rewards, flags, infos.

    ParallelEnv or AECEnv factories (of an AEC env one agent is active per row). An ended episode is reset in the same
    step, whether it was terminated or truncated. An inactive agent has zeros, False and 0.0;
    `infos[agent]["active"]` says which are active. Where an agent ended, `infos[agent]["final_obs"]` holds its last
    observation (`"_final_obs"` says where) and `"final_info"` its last info; `"scored"` marks the rewards and flags that
    belong to an action. Values of `info` are there by key, with `"_key"` for where, as in Gymnasium's vector envs.

    Args:
        env_fns: callables, one per env, each building an env with the same agents and spaces.
        copy: False gives views that are valid until the next step.
        context: how workers start: "forkserver" (default), "spawn" or "fork".
        dead_actions: what to do with an action for an inactive agent: "ignore" it, or "refuse" it (BadArgument). Leave
            entries out with a masked array, NaN or None.
        backend: a backend of `envfleet.make`; all other options are `make`'s too.

    Example:
        >>> from envfleet.envs.crowd import Crowd
        >>> with AsyncPettingZooVecEnv([Crowd] * 3, backend="serial") as envs:
        ...     obs, infos = envs.reset(seed=1)
        ...     actions = {agent: [0, 1, 2] for agent in envs.agents}
        ...     obs, rewards, terminated, truncated, infos = envs.step(actions)
        >>> obs["walker_0"].shape, terminated["walker_0"].dtype, infos["walker_0"]["active"].shape
        ((3, 4), dtype('bool'), (3,))
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        copy: bool = True,
        context: StartMethod | None = None,
        *,
        dead_actions: Literal["ignore", "refuse"] = "ignore",
        backend: BackendName = "shm",
        num_workers: int | None = None,
        **options: Unpack[EnvOptions],
    ) -> None:
        if dead_actions not in ("ignore", "refuse"):
            raise BadArgument(f"dead_actions={dead_actions!r}: choose 'ignore' or 'refuse'")
        if "on_end" in options:
            raise BadArgument("AsyncPettingZooVecEnv resets ended episodes at once; leave on_end out")
        self.fleet = make(list(env_fns), backend=backend, num_workers=num_workers, start_method=context, **options)
        if not self.fleet.agents:
            self.fleet.close()
            raise BadArgument("these environments have one agent: use envfleet.make_vec for them")
        self.copy, self.dead_actions = copy, dead_actions
        self.num_envs, self.num_agents = self.fleet.num_envs, self.fleet.num_agents
        self.possible_agents, self.agents = list(self.fleet.agents), list(self.fleet.agents)
        self.metadata, self.render_mode = self.fleet.metadata, self.fleet.render_mode
        self.active = dict.fromkeys(self.agents, np.zeros(self.num_envs, bool))
        self._of = {agent: (group, place) for group in self.fleet.groups for place, agent in enumerate(group.agents)}

    @property
    def unwrapped(self) -> AsyncPettingZooVecEnv:
        """This view: no wrapper is around it."""
        return self

    def single_observation_space(self, agent: str) -> gym.Space[Any]:
        """What this agent sees in one env."""
        return self._of[agent][0].observation_space

    def single_action_space(self, agent: str) -> gym.Space[Any]:
        """What this agent can do in one env."""
        return self._of[agent][0].action_space

    def observation_space(self, agent: str) -> gym.Space[Any]:
        """What this agent sees in all envs."""
        return batch_space(self.single_observation_space(agent), self.num_envs)

    def action_space(self, agent: str) -> gym.Space[Any]:
        """What this agent can do in all envs."""
        return batch_space(self.single_action_space(agent), self.num_envs)

    # -- stepping -----------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset all; an int gives env i the seed `seed + i`."""
        self._drop_leftovers()
        batch = self.fleet.reset(seed=seed, options=options)
        return self._observations(batch.obs), self._infos(batch)

    def _result(self, batch: Batch) -> Any:
        """(observations, rewards, terminated, truncated, infos), each a dict by agent."""
        return (
            self._observations(batch.obs),
            self._by_agent(batch.reward),
            self._by_agent(batch.terminated),
            self._by_agent(batch.truncated),
            self._infos(batch),
        )

    def _by_agent(self, columns: Array) -> dict[str, Array]:
        return {agent: columns[:, i] for i, agent in enumerate(self.agents)}

    def _observations(self, tree: Any) -> dict[str, Any]:
        return {agent: agent_part(self.fleet, tree, group, place) for agent, (group, place) in self._of.items()}

    def _infos(self, batch: Batch) -> dict[str, Any]:
        self.active = self._by_agent(batch.active)
        scored = self._by_agent(batch.scored)
        infos: dict[str, Any] = {a: {"active": self.active[a], "scored": scored[a]} for a in self.agents}
        masks = action_masks(self.fleet, batch)
        for agent, (group, place) in self._of.items():
            if group.name in masks:
                infos[agent]["action_mask"] = masks[group.name][:, place]
        for row, said in enumerate(batch.info):
            for agent, info in said.items():
                for key, value in info.items():
                    if agent in infos:
                        _put(infos[agent], key, value, row, self.num_envs)
        ends = batch.terminated | batch.truncated
        if ends.any():
            self._add_finals(infos, batch, ends)
        return infos

    def _add_finals(self, infos: dict[str, Any], batch: Batch, ends: Array) -> None:
        final = self._observations(batch.final_obs)
        over, later = batch.ended, batch.final_info
        for i, agent in enumerate(self.agents):
            if not ends[:, i].any():
                continue
            infos[agent]["final_obs"], infos[agent]["_final_obs"] = final[agent], ends[:, i]
            for row in np.flatnonzero(ends[:, i]).tolist():
                # If the env continues without this agent, the agent's last info is in this row's info.
                last = later[row] if over[row] else batch.info[row]
                _put(infos[agent], "final_info", last.get(agent, {}), row, self.num_envs)

    # -- actions ------------------------------------------------------------------------------------------------

    def _actions(self, actions: Any) -> Any:
        """A dict agent -> [N, …], or a list with a dict (or a list in the order of `agents`) per env."""
        if not isinstance(actions, Mapping):
            if len(actions) != self.num_envs:
                raise BadArgument(f"actions for {len(actions)} envs; there are {self.num_envs}")
            rows = [row if isinstance(row, Mapping) else dict(zip(self.agents, row)) for row in actions]
            named = dict.fromkeys(agent for row in rows for agent in row)
            actions = {agent: [row.get(agent) for row in rows] for agent in named}
        strange = set(actions) - set(self.agents)
        if strange:
            raise BadArgument(f"actions for {sorted(map(str, strange))}, but the agents are {self.agents}")
        joined: dict[str, Any] = {}
        for group in self.fleet.groups:
            leaves = leaves_of(group.action_space)
            arrays = [np.zeros((self.num_envs, len(group), *leaf.shape), leaf.dtype) for leaf in leaves]
            for place, agent in enumerate(group.agents):
                self._fill(agent, actions.get(agent), leaves, [array[:, place] for array in arrays])
            joined[group.name] = gather(group.action_space, arrays)
        return joined if len(self.fleet.groups) > 1 else joined[self.fleet.groups[0].name]

    def _fill(self, agent: str, value: Any, leaves: list[Any], rows: list[Array]) -> None:
        active = self.active[agent]
        given = some = np.zeros(self.num_envs, bool)
        if value is not None:
            parts = [functools.reduce(operator.getitem, leaf.path, value) for leaf in leaves]
            filled = [_fill_given(row, part, agent, self.num_envs) for row, part in zip(rows, parts)]
            given, some = np.all(filled, axis=0), np.any(filled, axis=0)
        if (some & ~given).any():
            raise BadArgument(f"agent {agent!r} has only a part of its action in envs {np.flatnonzero(some & ~given).tolist()}")
        missing = np.flatnonzero(active & ~given)
        if len(missing):
            raise BadArgument(f"agent {agent!r} is active in envs {missing.tolist()}, but has no action there")
        dead = np.flatnonzero(given & ~active)
        if len(dead) and self.dead_actions == "refuse":
            raise BadArgument(
                f"an action for agent {agent!r} in envs {dead.tolist()}, where it is not active: leave it out (a masked "
                "array, NaN or None), or use dead_actions='ignore'"
            )


class AgentsAsBatch(FleetView, VectorEnv[Any, Any, Any]):
    """A fleet whose agents are rows of one batch: row `slot * A + agent`, for policies that all agents share.

    `infos["active"]` says which rows have an observation and act on it; actions of the others are ignored.
    `infos["scored"]` marks rows whose reward and flags belong to an action; `infos["final_obs"]` (where
    `infos["_final_obs"]`) is the last observation of agents that ended, `infos["action_mask"]` the legal actions if there
    are any. All agents must have equal spaces.

    Example:
        >>> import envfleet as ef
        >>> from envfleet.envs.crowd import Crowd
        >>> with ef.make(Crowd, num_envs=2, backend="serial") as fleet:
        ...     rows = AgentsAsBatch(fleet)
        ...     obs, infos = rows.reset(seed=0)
        ...     obs, reward, terminated, truncated, infos = rows.step([0] * rows.num_envs)
        >>> rows.num_envs, obs.shape, infos["active"].shape
        (8, (8, 4), (8,))
    """

    def __init__(self, fleet: Fleet) -> None:
        if not fleet.agents:
            raise BadArgument("this fleet's environments have one agent each: envfleet.make_vec is the view for them")
        if len(fleet.groups) > 1:
            named = "; ".join(f"{', '.join(g.agents)}: {g.observation_space} -> {g.action_space}" for g in fleet.groups)
            raise BadArgument(f"agents can only be rows of one batch if their spaces are equal; here they are {named}")
        (group,) = fleet.groups
        self.fleet = fleet
        self.num_envs = fleet.num_envs * fleet.num_agents
        self.single_observation_space, self.single_action_space = group.observation_space, group.action_space
        self.observation_space = batch_space(group.observation_space, self.num_envs)
        self.action_space = batch_space(group.action_space, self.num_envs)
        self.metadata = {**fleet.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = fleet.render_mode

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs; an int gives env i the seed `seed + i`."""
        self._drop_leftovers()
        batch = self.fleet.reset(seed=seed, options=options)
        return _rows(batch.obs), self._infos(batch)

    def _actions(self, actions: Any) -> Any:
        shape = self.fleet.num_envs, self.fleet.num_agents
        spaces = space_tree(self.single_action_space)
        return tree_map(lambda space, part: np.asarray(part).reshape(*shape, *space.shape), spaces, actions)

    def _result(self, batch: Batch) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        flat = self.num_envs
        flags = batch.terminated.reshape(flat), batch.truncated.reshape(flat)
        return _rows(batch.obs), batch.reward.reshape(flat), *flags, self._infos(batch)

    def _infos(self, batch: Batch) -> dict[str, Any]:
        infos: dict[str, Any] = {"active": batch.active.reshape(-1), "scored": batch.scored.reshape(-1)}
        for mask in action_masks(self.fleet, batch).values():
            infos["action_mask"] = _rows(mask)
        ends = (batch.terminated | batch.truncated).reshape(-1)
        if ends.any():
            infos["final_obs"], infos["_final_obs"] = _rows(batch.final_obs), ends
        return infos


def action_masks(fleet: Fleet, batch: Batch) -> dict[str, Array]:
    """The column of legal actions by group; {} if there is none.

    Example:
        >>> from envfleet import make
        >>> with make("gridworld-parallel", 3, backend="serial") as fleet:
        ...     masks = action_masks(fleet, fleet.reset(seed=0))
        >>> [mask.shape for mask in masks.values()]
        [(3, 2, 5)]
    """
    columns = batch.columns
    if "action_mask" in columns:
        return {group.name: columns["action_mask"][:, list(group.indices)] for group in fleet.groups}
    prefix = "action_mask:"
    return {name.removeprefix(prefix): mask for name, mask in columns.items() if name.startswith(prefix)}


def agent_part(fleet: Fleet, tree: Any, group: AgentGroup, place: int) -> Any:
    """One agent's part, [n, …], of `batch.obs` or `batch.final_obs`.

    Example:
        >>> from envfleet import make
        >>> with make("gridworld-parallel", 3, backend="serial") as fleet:
        ...     agent_part(fleet, fleet.reset(seed=0).obs, fleet.groups[0], 1)["action_mask"].shape
        (3, 5)
    """
    mine = tree if len(fleet.groups) == 1 else tree[group.name]
    return tree_map(lambda leaf: leaf[:, place], mine)


def _rows(tree: Any) -> Any:
    """[n, A, …] as [n * A, …], leaf by leaf."""
    return tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _put(info: dict[str, Any], key: str, value: Any, row: int, count: int) -> None:
    """One env's value under a key: an array over envs (numbers keep their type, all else is objects), and where it is."""
    if key not in info:
        kind = np.asarray(value)
        plain = kind.dtype.kind in "biuf" and not isinstance(value, (list, tuple, dict))
        info[key] = np.zeros((count, *kind.shape), kind.dtype) if plain else np.full(count, None, object)
        info[f"_{key}"] = np.zeros(count, bool)
    is_object = info[key].dtype == object
    fits = is_object or (np.shape(value) == info[key].shape[1:] and np.can_cast(np.asarray(value).dtype, info[key].dtype))
    if not fits:  # of another shape or type than the first env's: keep what is there, as objects
        kept = np.full(count, None, object)
        kept[:] = list(info[key])
        info[key] = kept
    info[key][row] = value
    info[f"_{key}"][row] = True


def _fill_given(row: Array, value: Any, agent: str, count: int) -> Array:
    """Write an agent's actions, [N, …]; gives where there were any. What is masked, NaN or None is left out."""
    given = np.ones(count, bool)
    if isinstance(value, (list, tuple)) and any(item is None for item in value):
        given = np.array([item is not None for item in value])
        value = [np.zeros(row.shape[1:], row.dtype) if item is None else item for item in value]
    masked = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else None
    array = np.asarray(value.filled(0) if isinstance(value, np.ma.MaskedArray) else value)
    if array.shape != row.shape or len(given) != count:
        raise BadArgument(f"actions of agent {agent!r} have shape {array.shape}; {count} envs need {row.shape}")
    if masked is not None:
        given &= ~masked.reshape(count, -1).any(axis=1)
    if array.dtype.kind == "f":
        holes = np.isnan(array)
        given &= ~holes.reshape(count, -1).any(axis=1)
        array = np.where(holes, 0, array)
        if row.dtype.kind in "iu" and (array == np.floor(array)).all():
            array = array.astype(row.dtype)  # NaN made floats of them
    if not np.can_cast(array.dtype, row.dtype, "same_kind"):
        raise BadArgument(f"actions of agent {agent!r} have dtype {array.dtype}, which cannot become {row.dtype} safely")
    row[...] = array
    return given
