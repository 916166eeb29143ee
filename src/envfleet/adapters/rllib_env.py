"""A fleet as the vector environment that RLlib steps, and the creator that builds it in every env runner. Needs no Ray.

RLlib assumes NextStep and does not look at `metadata["autoreset_mode"]`: the row after an end is a reset row, whose action is
ignored. It has no place for a row without data either. So the view here differs from `make_vec` in what it does with faults.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, get_type_hints

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from envfleet.adapters.gymnasium import FleetVectorEnv, parse_autoreset_mode
from envfleet.adapters.peer_errors import for_gymnasium
from envfleet.core.arguments import refuse_unknown
from envfleet.core.batch import Batch, decoded
from envfleet.core.construct import is_remote, make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import EnvLike, FleetOptions, OnEnd
from envfleet.errors import BadArgument, FleetError
from envfleet.faults.failure import Fault
from envfleet.slots.env_contract import is_many_agents
from envfleet.slots.factories import env_name, pack_registry, pickled, register_packed, resolve
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.util.seeding import episode_seed
from envfleet.util.trees import as_columns, tree_map, tree_put, tree_rows

Seeds = Literal["streams", "gymnasium"]
#: What the info of a row says whose environment failed.
FAULT_KEY, CAUSE_KEY = "envfleet.fault", "envfleet.fault_cause"

#: Options of `make` that `env_config` may have; every other name in it is the environment's.
_OPTIONS = frozenset(get_type_hints(FleetOptions))


class FleetEnv(FleetVectorEnv):
    """The vector environment that `fleet_env` builds in an env runner.

    A step that fails is the last row of its episode: truncated, never terminated, reward 0, the last good observation,
    and `info["envfleet.fault"]`. The next row of that slot is the first observation of the restarted environment, as RLlib
    expects it; the action for it is not used. A quarantined slot raises, because RLlib would learn from its rows.

    Example:
        >>> envs = FleetEnv(make("CartPole-v1", 2, backend="serial", on_end="wait", on_fault="restart"))
        >>> envs.reset(seed=0)[0].shape, envs.metadata["autoreset_mode"].value
        ((2, 4), 'NextStep')
        >>> envs.close()
    """

    def __init__(self, fleet: Fleet, seeds: Seeds = "streams") -> None:
        if fleet.on_end != "wait":
            fleet.close()
            raise BadArgument(_SAME_STEP.format(given='a fleet with on_end="reset"'))
        super().__init__(fleet, AutoresetMode.NEXT_STEP)
        self.seeds: Seeds = seeds
        self._held = np.zeros(self.num_envs, bool)  # [slot] restarted: its first observation is still to be shown

    def faults(self) -> list[Fault]:
        """Every fault so far."""
        return list(self.fleet.faults)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all. RLlib's seed of a runner is spread over its slots as `seeds` says."""
        if self.seeds == "streams" and isinstance(seed, (int, np.integer)):
            # RLlib adds the number of the runner to the seed, and Gymnasium that of the slot: such sums collide.
            seed = [episode_seed(int(seed), "rllib", slot, 0) for slot in range(self.num_envs)]
        return super().reset(seed=seed, options=options)

    def _reset_result(self, batch: Batch) -> tuple[Any, dict[str, Any]]:
        self._held[batch.slots] = False
        self._refuse_quarantined(batch)
        obs, infos = super()._reset_result(batch)
        return obs, self._flag(infos, batch.slots[batch.status != READY])

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments but those that were just restarted."""
        if not self._held.any():
            return super().step(actions)
        slots = np.flatnonzero(~self._held)
        try:
            if not len(slots):
                return self._rows(None)
            self.fleet.send(_of_slots(actions, slots), slots)
            return self._rows(self.fleet.recv(slots))
        except FleetError as error:
            raise for_gymnasium(error) from error.__cause__

    def step_async(self, actions: Any) -> None:
        """Not here: RLlib steps synchronously, and a restarted slot could not be held."""
        raise BadArgument("FleetEnv is stepped by step(); envfleet.make_vec has step_async")

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if (batch.status == READY).all():
            return super()._result(batch)
        return self._rows(batch)

    def _rows(self, batch: Batch | None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The rows of a step in which not every slot made one: some were held, or failed."""
        count, was_over = self.num_envs, self._ended.copy()
        reward, infos = np.zeros(count), dict[str, Any]()
        terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
        self._held[:] = False
        obs = self._observations()
        if batch is not None:
            self._refuse_quarantined(batch)
            slots, failed = batch.slots, batch.status != READY
            reward[slots], terminated[slots], truncated[slots] = batch.reward, batch.terminated, batch.truncated
            for slot in sorted(batch._info):
                infos = self._add_info(infos, decoded(batch._info, slot), slot)
            infos = self._flag(infos, slots[failed])
            # A reset that failed was made again by the restart, so its row is a reset row all the same.
            reset = slots[failed & was_over[slots]]
            terminated[reset], truncated[reset], reward[reset] = False, False, 0.0
            broken = failed & ~was_over[slots]
            if broken.any():
                self._held[slots[broken]] = True
                terminated[slots[broken]], truncated[slots[broken]], reward[slots[broken]] = False, True, 0.0
                obs = as_columns(self.single_observation_space, obs)
                last = as_columns(self.single_observation_space, batch.final_obs)
                tree_put(obs, slots[broken], tree_rows(last, np.flatnonzero(broken)))
        self._ended = terminated | truncated
        return obs, reward, terminated, truncated, infos

    def _flag(self, infos: dict[str, Any], slots: Any) -> dict[str, Any]:
        for slot in slots.tolist():
            infos = self._add_info(infos, {FAULT_KEY: True, CAUSE_KEY: str(self._newest_fault(slot))}, slot)
        return infos

    def _newest_fault(self, slot: int) -> Fault:
        return next(fault for fault in reversed(self.fleet.faults) if fault.slot == slot)

    def _refuse_quarantined(self, batch: Batch) -> None:
        lost = batch.slots[batch.status == QUARANTINED].tolist()
        if lost:
            error = self._newest_fault(lost[0]).error()
            error.add_note(
                f"Slots {lost} failed too often (max_restarts) and are quarantined; RLlib would learn from their empty rows. "
                "FleetEnvRunner goes on without them; fault_tolerance(restart_failed_sub_environments=True) builds all anew."
            )
            raise error


_SAME_STEP = (
    "RLlib assumes NextStep, and {given} is SameStep: every episode would end in the first observation of the next one, and begin "
    "with its second. Leave it out: fleet_env uses NextStep (FleetEnvRunner keeps the last observations itself)"
)


class FleetEnvCreator:
    """What `fleet_env` returns: RLlib calls it in every env runner, here or in a remote actor."""

    def __init__(self, recipe: EnvLike, options: Mapping[str, Any], seeds: Seeds) -> None:
        self.recipe, self.options, self.seeds = recipe, dict(options), seeds
        self.name = "servers" if is_remote(recipe) else env_name(recipe)
        self.registered = pack_registry()  # ids that only this process knows

    def __call__(self, env_config: Mapping[str, Any] | None = None, **more: Any) -> FleetEnv:
        """The vector environment of one env runner. RLlib gives `env_config` with `num_envs` in it."""
        config = {**(env_config or {}), **more}
        num_envs = config.pop("num_envs", None)
        if num_envs is None:
            raise BadArgument(
                "RLlib asked for one environment, but a fleet is a whole vector environment: set "
                'config.env_runners(gym_env_vectorize_mode="vector_entry_point"), or use envfleet.adapters.rllib.environment(config, …)'
            )
        return FleetEnv(self.fleet(num_envs, config, on_end="wait"), self.seeds)

    def fleet(self, num_envs: int, env_config: Mapping[str, Any], on_end: OnEnd) -> Fleet:
        """The fleet of one env runner; `env_config` as the user gave it."""
        register_packed(self.registered)
        own = {name: value for name, value in env_config.items() if name not in _OPTIONS}
        options = {**self.options, **{name: value for name, value in env_config.items() if name in _OPTIONS}}
        _refuse_same_step(own)
        own = {**(self.options.get("env_kwargs") or {}), **(env_config.get("env_kwargs") or {}), **own}
        options.pop("env_kwargs", None)
        options.setdefault("on_fault", "restart")
        cpus = _cpus_of_this_actor()
        if cpus is not None and options.get("backend", "auto") in ("auto", "pipe", "shm"):
            options.setdefault("num_workers", cpus)
        recipe: Any = self.recipe
        if not isinstance(recipe, (str, EnvSpec)) and not is_remote(recipe):
            recipe, own = _with_config(recipe, own), {}
        return make(recipe, num_envs, on_end=on_end, env_kwargs=own or None, **options)

    def __repr__(self) -> str:
        return f"fleet_env({self.name})"


def fleet_env(recipe: EnvLike, *, seeds: Seeds = "streams", **options: Unpack[FleetOptions]) -> FleetEnvCreator:
    """A creator for `ray.tune.register_env`: every env runner then steps a fleet of `recipe`.

    Set `env_runners(gym_env_vectorize_mode="vector_entry_point")` too; `envfleet.adapters.rllib.environment` does both.

    Args:
        recipe: what `envfleet.make` takes, but no list of callables: an id, a spec, a callable, addresses of servers.
        seeds: RLlib gives every runner one seed. "streams": every slot of every runner gets a stream of its own from it.
            "gymnasium": slot i gets seed + i, as with RLlib's own vectorisation; with several runners these collide.
        options: those of `envfleet.make`. `on_fault` is "restart" unless given.

    `env_config` may have these options too; they go before those given here. Every other name in it is for the environment:
    a keyword of `gymnasium.make` or of the callable. A callable that needs an argument gets one mapping of them, as RLlib's
    own environments do.

    Example:
        >>> creator = fleet_env("CartPole-v1", backend="serial")
        >>> envs = creator({"num_envs": 3, "sutton_barto_reward": True})  # RLlib does this
        >>> envs.reset(seed=0)[0].shape
        (3, 4)
        >>> envs.close()
    """
    if seeds not in ("streams", "gymnasium"):
        raise BadArgument(f"seeds={seeds!r}: choose 'streams' or 'gymnasium'")
    given: dict[str, Any] = {**options}
    _refuse_same_step(given)
    refuse_unknown("fleet_env", given.keys() - _OPTIONS, _OPTIONS | {"seeds"})
    if isinstance(recipe, (Fleet, VectorEnv)):
        what = "a fleet" if isinstance(recipe, Fleet) else f"a vector environment ({type(recipe).__name__})"
        raise BadArgument(
            f"got {what}; every env runner builds its own: give what you gave to make(), e.g. fleet_env('CartPole-v1')"
        )
    if isinstance(recipe, (list, tuple)) and not is_remote(recipe):
        raise BadArgument("got a list of callables, but RLlib says how many environments a runner has: give one callable")
    if is_many_agents(recipe):
        raise BadArgument(
            "this environment has many agents, for which RLlib has its own MultiAgentEnv: fleet_env takes environments with one agent"
        )
    if not is_remote(recipe):
        resolve(recipe)  # an unknown id, or an environment object instead of a callable, is refused here and not in a runner
    creator = FleetEnvCreator(recipe, given, seeds)
    pickled((recipe, given), "the environment of fleet_env")  # it must reach the runners; this error names the part that cannot
    return creator


def _refuse_same_step(given: dict[str, Any]) -> None:
    """Take NextStep out of the options; anything else corrupts what RLlib learns from."""
    if "autoreset_mode" in given and parse_autoreset_mode(mode := given.pop("autoreset_mode")) != AutoresetMode.NEXT_STEP:
        raise BadArgument(_SAME_STEP.format(given=f"autoreset_mode={getattr(mode, 'value', mode)!r}"))
    if "on_end" in given and given.pop("on_end") != "wait":
        raise BadArgument(_SAME_STEP.format(given='on_end="reset"'))


class _Configured:
    """A callable of the user's with what `env_config` has for it."""

    def __init__(self, build: Callable[..., Any], config: Mapping[str, Any], as_mapping: bool) -> None:
        self.build, self.config, self.as_mapping = build, dict(config), as_mapping
        self.__qualname__ = env_name(build)

    def __call__(self) -> Any:
        """Build one environment."""
        return self.build(dict(self.config)) if self.as_mapping else self.build(**self.config)


def _with_config(recipe: Any, config: Mapping[str, Any]) -> Any:
    """The recipe, called with `config` in the way its signature asks for."""
    try:
        parameters = list(inspect.signature(recipe).parameters.values()) if callable(recipe) else []
    except ValueError:  # a built-in without a signature
        parameters = []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(one.default is one.empty and one.kind in by_place for one in parameters):
        return _Configured(recipe, config, as_mapping=True)
    if not config:
        return recipe
    if not callable(recipe):
        raise BadArgument(f"env_config has {sorted(config)} for an environment that takes no arguments")
    if not any(one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters):
        known = [one.name for one in parameters]
        refuse_unknown(f"env_config: {env_name(recipe)}", config.keys() - set(known), [*known, *_OPTIONS])
    return _Configured(recipe, config, as_mapping=False)


def _of_slots(actions: Any, slots: Any) -> Any:
    if isinstance(actions, list):
        return [actions[slot] for slot in slots.tolist()]
    return tree_map(lambda leaf: np.asarray(leaf)[slots], actions)


def _cpus_of_this_actor() -> int | None:
    """How many CPUs Ray gave to the actor we are in; None outside of actors."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return None if context.get_actor_id() is None else max(1, int(context.get_assigned_resources().get("CPU", 1)))
