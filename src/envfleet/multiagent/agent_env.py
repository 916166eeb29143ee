"""`AgentEnv`: what the slot life holds if an env has many agents. It records what each agent observed and earned.

It looks like an env to the slot life. Its spaces are joint ones: every agent's part, in the order of
`possible_agents`. `step` and `reset` are the calls the life makes; `take` and `begin` read what they returned into
arrays with an agent axis, which the life copies into the row (`envfleet.multiagent.agent_row`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envfleet.multiagent.groups import AgentGroup, groups_of, joint_space, refuse_mailbox
from envfleet.slots.env_contract import attribute
from envfleet.slots.layout import Leaf, fits, leaves_of, scatter

Array = np.ndarray[Any, Any]
#: The leaf of a Dict observation that says which actions are legal; it becomes a column of its own.
MASK = "action_mask"


class AgentEnv(abc.ABC):
    """What both kinds share: groups, arrays with an agent axis, and how one agent's observation gets into them.

    After `take`, `reward`, `earned`, `scored`, `terminated`, `truncated`, `active`, `pending` are lists over agents, `over`
    says whether the episode is; `obs` and `final` are the leaves of the joint observation, `columns` the columns.
    """

    acts_at_once = False  # whether every agent with an observation acts in every step

    def __init__(self, env: Any, with_state: bool = False) -> None:
        self.env = env
        self.agents = tuple(_possible_agents(env))
        self.index = {agent: i for i, agent in enumerate(self.agents)}
        self.groups = groups_of(
            self.agents,
            [_space(env, "observation_space", agent) for agent in self.agents],
            [_space(env, "action_space", agent) for agent in self.agents],
        )
        refuse_mailbox(self.groups)
        self.observation_space = joint_space(self.groups, "observation")
        self.action_space = joint_space(self.groups, "action")
        self.metadata: dict[str, Any] = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        # Lists, one entry per agent: single entries of arrays are slow to read and to write.
        self._zeros, self._none_true = [0.0] * len(self.agents), [False] * len(self.agents)
        self._owed, self.active, self.pending = self._zeros[:], self._none_true[:], self._none_true[:]
        self._open_row()
        self.has_final = False  # whether `final` was written since it was last asked for
        self.over = False
        self.infos: dict[Any, Any] = {}
        self.obs = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves_of(self.observation_space)]
        self.final = [np.zeros_like(array) for array in self.obs]
        self._places = _places(self.groups, self.observation_space, self.obs, self.final)
        self.columns: dict[str, Array] = {}
        self.column_spaces: dict[str, gym.Space[Any]] = {}
        self._masks = self._mask_columns()
        self._action_spaces = {i: group.action_space for group in self.groups for i in group.indices}
        self._with_state = with_state
        if with_state:
            self._add_state()

    # -- what differs between the two kinds --------------------------------------------------------------------

    step: Callable[..., Any]  # steps the env with what `actions` made; `take` reads what this returns
    reset: Callable[..., Any]  # resets the env; `begin` reads what this returns

    @abc.abstractmethod
    def actions(self, each: list[Any]) -> Any:
        """The argument of `step` from one action per agent."""

    @abc.abstractmethod
    def begin(self, result: Any) -> None:
        """Read what `reset` returned."""

    @abc.abstractmethod
    def take(self, result: Any) -> None:
        """Read what `step` returned."""

    # -- columns ------------------------------------------------------------------------------------------------

    def _add_column(self, name: str, space: gym.Space[Any]) -> Array:
        (leaf,) = leaves_of(space)
        self.column_spaces[name] = space
        self.columns[name] = np.zeros(leaf.shape, leaf.dtype)
        return self.columns[name]

    def _mask_columns(self) -> list[Array | None]:
        """Per agent: its row of the column of legal actions, where its observation has one."""
        rows: list[Array | None] = [None] * len(self.agents)
        for group in self.groups:
            space = group.observation_space
            inner = space.spaces.get(MASK) if isinstance(space, spaces.Dict) else None
            if inner is None or not inner.shape:
                continue
            name = MASK if len(self.groups) == 1 else f"{MASK}:{group.name}"
            column = self._add_column(name, spaces.Box(0, 1, (len(group), *inner.shape), np.int8))
            for place, i in enumerate(group.indices):
                rows[i] = column[place]
        return rows

    def _add_state(self) -> None:
        space = getattr(self.env, "state_space", None)
        if not isinstance(space, gym.Space):
            self.env.reset()  # the only way to learn what the state looks like
            state = np.asarray(self.env.state())
            space = spaces.Box(-np.inf, np.inf, state.shape, state.dtype.type) if state.dtype.kind == "f" else None
            space = space or spaces.Box(np.iinfo(state.dtype).min, np.iinfo(state.dtype).max, state.shape, state.dtype.type)  # fmt: skip
        self._state_leaf = leaves_of(space)[0]
        self._add_column("state", space)
        self._add_column("final_state", space)

    def _write_state(self, name: str) -> None:
        try:
            self.columns[name][...] = fits(self._state_leaf, self.env.state())
        except (ValueError, TypeError) as error:
            raise type(error)(f"state() has {error}") from None

    def _place_of(self, agent: Any) -> int:
        if agent not in self.index:
            raise RuntimeError(f"agent {agent!r} is not among possible_agents, which were {list(self.agents)}")
        return self.index[agent]

    # -- one agent's part ---------------------------------------------------------------------------------------

    def _open_row(self) -> None:
        # New lists: those of the last row may still have to be written, after the reset that follows it.
        self.reward, self.earned = self._zeros[:], self._zeros[:]
        self.scored, self.terminated, self.truncated = self._none_true[:], self._none_true[:], self._none_true[:]

    def _show(self, i: int, obs: Any) -> None:
        """The agent has an observation and must act on it."""
        self._write(i, obs, 0)
        self.active[i] = True
        mask = self._masks[i]
        if mask is not None:
            mask[...] = obs[MASK]

    def _hide(self, i: int) -> None:
        """The agent has no observation: zeros, never old data."""
        for array in self._places[i][1]:
            array[...] = 0
        self.active[i] = False
        mask = self._masks[i]
        if mask is not None:
            mask[...] = 0

    def _remember(self, i: int) -> None:
        """The agent acted and will see the result later: keep its observation, in case its end brings no newer one."""
        for array, final in zip(self._places[i][1], self._places[i][2]):
            final[...] = array
        self.has_final = True

    def _finish(self, i: int, obs: Any, terminated: bool, truncated: bool) -> None:
        """The agent's last transition: its final observation is the one given, else the last it had."""
        if obs is not None:
            self._write(i, obs, 1)
        self.has_final = True
        self.scored[i], self.terminated[i], self.truncated[i] = True, terminated, truncated
        self.reward[i], self._owed[i] = self._owed[i], 0.0

    def _write(self, i: int, obs: Any, which: int) -> None:
        leaves, shown, final = self._places[i]
        arrays = final if which else shown
        values = [obs] if len(leaves) == 1 and not leaves[0].path else scatter(leaves, obs)
        for leaf, array, value in zip(leaves, arrays, values):
            if type(value) is not np.ndarray or value.shape != leaf.shape or value.dtype != leaf.dtype:
                try:
                    value = fits(leaf, value)
                except (ValueError, TypeError) as error:
                    raise type(error)(f"the observation of agent {self.agents[i]!r} has {error}") from None
            array[...] = value

    def _clear(self) -> None:
        """A new episode: no agent is active, no reward is pending."""
        for i, active in enumerate(self.active):
            if active:
                self._hide(i)
        self.pending, self._owed = self._none_true[:], self._zeros[:]

    def sample(self) -> list[Any]:
        """A random action for every agent, a legal one where a mask says which are."""
        drawn = []
        for i in range(len(self.agents)):
            space, mask = self._action_spaces[i], self._masks[i]
            legal = np.flatnonzero(mask) if mask is not None and isinstance(space, spaces.Discrete) else ()
            drawn.append(space.start + space.np_random.choice(legal) if len(legal) else space.sample())  # type: ignore[attr-defined]
        return drawn

    # -- what the slot life asks of any env ---------------------------------------------------------------------

    def about_agents(self) -> dict[str, Any]:
        """What the parent needs besides the joint spaces."""
        return {"agents": self.agents, "groups": self.groups, "agent_columns": dict(self.column_spaces)}

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the env."""
        return attribute(self.env, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the env."""
        setattr(self.env, name, value)

    def render(self) -> Any:
        """What the env shows."""
        return self.env.render()

    def close(self) -> None:
        """Close the env."""
        if callable(getattr(self.env, "close", None)):
            self.env.close()


def _possible_agents(env: Any) -> list[Any]:
    try:
        agents = list(env.possible_agents)
    except AttributeError:
        raise TypeError(
            f"{type(env).__name__} has no possible_agents: the list of all agents that may ever appear is needed to lay "
            "out the rows; set it in the environment's constructor"
        ) from None
    if not agents:
        raise TypeError(f"{type(env).__name__}.possible_agents is empty: name all agents that may ever appear")
    if len(set(agents)) != len(agents):
        raise TypeError(f"{type(env).__name__}.possible_agents names an agent twice: {agents}")
    return agents


def _space(env: Any, kind: str, agent: Any) -> gym.Space[Any]:
    space = getattr(env, kind)(agent)
    if not isinstance(space, gym.Space):
        raise TypeError(f"{kind}({agent!r}) of {type(env).__name__} is {type(space).__name__}, not a Gymnasium space")
    return space


def _places(
    groups: tuple[AgentGroup, ...], joint: gym.Space[Any], obs: list[Array], final: list[Array]
) -> list[tuple[list[Leaf], list[Array], list[Array]]]:
    """Per agent: the leaves of its own space, and its rows of the joint `obs` and `final` arrays."""
    at = {leaf.path: i for i, leaf in enumerate(leaves_of(joint))}
    places: dict[int, tuple[list[Leaf], list[Array], list[Array]]] = {}
    for group in groups:
        leaves = leaves_of(group.observation_space)
        joined = [at[leaf.path if len(groups) == 1 else (group.name, *leaf.path)] for leaf in leaves]
        for place, i in enumerate(group.indices):
            rows = ([array[joint_i][place, ...] for joint_i in joined] for array in (obs, final))
            places[i] = (leaves, *rows)  # type: ignore[assignment]
    return [places[i] for i in range(len(places))]


def joint_columns(columns: Mapping[str, gym.Space[Any]], num_agents: int) -> dict[str, gym.Space[Any]]:
    """Columns declared for one agent, for all of them."""
    return {name: batch_space(space, num_agents) for name, space in columns.items()}
