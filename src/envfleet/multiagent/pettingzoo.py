"""PettingZoo environments in a slot: an `AgentEnv` around the env records, after every call, what each agent saw and earned.

Dead steps, births, deaths and rewards before an agent's next turn are handled here, so that no code above has to know
them. PettingZoo itself is not imported: an env is recognised by its interface.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from envfleet.multiagent.agent_env import AgentEnv
from envfleet.slots.env_contract import checked_info, is_many_agents, number_of, unpack_result


def as_agent_env(env: Any, with_state: bool = False) -> Any:
    """The env in an `AgentEnv`, if it has many agents; any other env as it is."""
    if isinstance(env, AgentEnv) or not is_many_agents(env):
        return env
    turns = callable(getattr(env, "last", None)) and callable(getattr(env, "observe", None))
    return AecAgentEnv(env, with_state) if turns else ParallelAgentEnv(env, with_state)


def keep_state(env: Any) -> Any:
    """A wrapper for `make`: adds `state()` of the env as the columns `state` and `final_state`."""
    if not is_many_agents(env):
        raise TypeError(f"with_state=True is for environments of many agents; {type(env).__name__} has one")
    return as_agent_env(env, with_state=True)


class ParallelAgentEnv(AgentEnv):
    """A ParallelEnv: every agent with an observation acts at once."""

    acts_at_once = True

    def __init__(self, env: Any, with_state: bool = False) -> None:
        super().__init__(env, with_state)
        self.step, self.reset = env.step, env.reset  # the env's own methods: a step costs no call more

    def actions(self, each: list[Any]) -> dict[Any, Any]:
        """The argument of `step` from one action per agent: those of active agents."""
        return {agent: action for agent, action, active in zip(self.agents, each, self.active) if active}

    def begin(self, result: Any) -> None:
        """Read what `reset` returned."""
        obs, infos = unpack_result(result, 2, "reset")
        self.infos = checked_info(infos)
        self._open_row()
        self._clear()
        for i, agent in enumerate(self.agents):
            if agent in obs:
                self._show(i, obs[agent])
        if True not in self.active:
            raise RuntimeError("reset() returned no agent's observation, so no agent can act")
        self.over = False
        if self._with_state:
            self._write_state("state")

    def take(self, result: Any) -> None:
        """Read what `step` returned."""
        obs, rewards, terminated, truncated, infos = unpack_result(result, 5, "step")
        for name, value in zip(("obs", "rewards", "terminations", "truncations"), result):
            if not isinstance(value, Mapping):
                raise TypeError(f"step() returned {name} as {type(value).__name__}, not as a dict by agent")
        self.infos = checked_info(infos)
        self._open_row()
        alive = frozenset(self.env.agents)
        if not alive <= self.index.keys():
            self._place_of(min(alive - self.index.keys()))
        living = False
        for i, agent in enumerate(self.agents):
            opened = self.active[i] or self.pending[i]
            if agent in rewards:
                self.earned[i] = number_of(rewards[agent])
                if opened:
                    self._owed[i] += self.earned[i]
            ends, cut = bool(terminated.get(agent, False)), bool(truncated.get(agent, False))
            there = agent in alive and not (ends or cut)
            living |= there
            if there and agent in obs:
                self._show(i, obs[agent])
                self.scored[i], self.pending[i] = opened, False
                self.reward[i], self._owed[i] = self._owed[i], 0.0
                continue
            if self.active[i]:
                self._remember(i)
                self._hide(i)
            self.pending[i] = opened and there  # alive without an observation: its transition stays open
            if opened and not there:
                # An agent that disappeared without a flag has terminated.
                self._finish(i, obs.get(agent), ends or not cut, cut)
        self.over = not living
        if self._with_state:
            self._write_state("final_state" if self.over else "state")


class AecAgentEnv(AgentEnv):
    """An AECEnv: one agent acts at a time; what it earns is known at its next turn, or at its end."""

    def __init__(self, env: Any, with_state: bool = False) -> None:
        super().__init__(env, with_state)
        self._bare = _below_wrappers(env)

    def reset(self, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Reset the env; gives what the first agent sees."""
        self.env.reset(**kwargs)
        return self._settle()

    def step(self, action: Any) -> list[tuple[Any, Any]]:
        """The active agent acts; returns the results of agents until the next one must act, ended ones first."""
        self.env.step(action)
        return self._settle()

    def _settle(self) -> list[tuple[Any, Any]]:
        env, results, removed = self.env, [], False
        bare = self._bare or env
        while bare.agents:
            agent = bare.agent_selection
            last = env.last() if bare is env else _last(env, bare, agent)
            results.append((agent, last))
            if not (last[2] or last[3]):
                return results
            if self._with_state and not removed:
                self._write_state("final_state")
            removed = True
            before = len(bare.agents)
            env.step(None)
            if len(bare.agents) >= before:
                raise RuntimeError(f"agent {agent!r} has ended, but step(None) did not remove it from `agents`")
        return results

    def actions(self, each: list[Any]) -> Any:
        """The argument of `step`: the action of the active agent."""
        return each[self.active.index(True)]

    def begin(self, results: list[tuple[Any, Any]]) -> None:
        """Read what the first agent sees."""
        self._clear()
        self._open_row()
        self._read(results)
        if self.over:
            raise RuntimeError("reset() left no agent that can act")

    def take(self, results: list[tuple[Any, Any]]) -> None:
        """Read the results of agents after a step."""
        self._open_row()
        acted = self.active.index(True)
        self._remember(acted)
        self._hide(acted)
        self.pending[acted] = True
        self._read(results)
        if self.over:
            for i, waits in enumerate(self.pending):
                if waits:
                    self._vanished(i)

    def _read(self, results: list[tuple[Any, Any]]) -> None:
        self.infos = {}
        self.over = True
        for agent, last in results:
            obs, reward, terminated, truncated, info = last if len(last) == 5 else unpack_result(last, 5, "step")
            i = self._place_of(agent)
            self.infos[agent] = checked_info(info)
            self._owed[i] = number_of(reward)
            self.earned[i] += self._owed[i]
            if terminated or truncated:
                if self.pending[i]:
                    self._finish(i, obs, bool(terminated), bool(truncated))
            else:
                self._show(i, obs)
                self.scored[i] = self.pending[i]
                self.reward[i] = self._owed[i] if self.pending[i] else 0.0
                self.over = False
            self._owed[i], self.pending[i] = 0.0, False
        if self._with_state and not self.over:
            self._write_state("state")

    def _vanished(self, i: int) -> None:
        """The episode is over and this agent got no result: the env emptied `agents` without its dead step."""
        agent = self.agents[i]
        self.earned[i] += number_of(self.env._cumulative_rewards.get(agent, 0.0))
        self._owed[i] = self.earned[i]
        cut = bool(self.env.truncations.get(agent, False))
        self._finish(i, None, bool(self.env.terminations.get(agent, False)) or not cut, cut)
        self.pending[i] = False


def _below_wrappers(env: Any) -> Any:
    """The env below PettingZoo's own wrappers, when results can be read there; None when it cannot.

    Every attribute of a wrapped env is looked up through all its wrappers, a dozen of them a step. PettingZoo's own wrappers
    change only actions and checks and keep no state of their own; nothing is known about other wrappers.
    """
    inner = env
    while type(inner).__module__.startswith("pettingzoo.utils.wrappers.") and hasattr(inner, "env"):
        inner = inner.env
    known = getattr(sys.modules.get("pettingzoo"), "AECEnv", None)
    own = known is not None and isinstance(inner, known) and type(inner).last is known.last
    return inner if own and inner is not env and inner.unwrapped is inner else None


def _last(env: Any, bare: Any, agent: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What `env.last()` gives."""
    return (
        env.observe(agent),
        bare._cumulative_rewards[agent],
        bare.terminations[agent],
        bare.truncations[agent],
        bare.infos[agent],
    )
