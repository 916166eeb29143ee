"""Names from older scripts: thin views over a fleet, with the shapes those scripts expect."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from envfleet.adapters.cage2_recipe import cage2_recipe, is_cage2, refuse_missing_actions
from envfleet.adapters.fleet_view import SingleAgentView
from envfleet.adapters.true_states import TrueStates
from envfleet.core.arguments import refuse_unknown
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import BackendName, EnvOptions, FleetOptions, StartMethod
from envfleet.envs.registry import resolve_env
from envfleet.errors import BadArgument
from envfleet.native.library import is_built
from envfleet.slots.factories import env_name, resolve


class _ClassicView(SingleAgentView):
    """A fleet with its spaces, under the names of these scripts."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.n_envs = fleet.num_envs

    def render(self, slot: int = 0) -> Any:
        """What one env renders."""
        return self.fleet.render(slot)


class ParallelEnv(_ClassicView):
    """Environments in processes of their own, built from (cloud)pickled callables: one worker per env by default.

    `reset(seed)` gives env i the seed `seed + i`; ended episodes are reset in the same step, and their last observation
    and info are in `infos[i]["final_obs"]` and `infos[i]["final_info"]`.

    Example:
        >>> import gymnasium as gym
        >>> with ParallelEnv([lambda: gym.make("CartPole-v1")] * 2) as envs:
        ...     obs, infos = envs.reset(seed=0)
        ...     obs, rewards, terminated, truncated, infos = envs.step([0, 1])
        >>> obs.shape, rewards.tolist()
        ((2, 4), [1.0, 1.0])
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        start_method: StartMethod | None = None,
        *,
        num_workers: int | None = None,
        backend: BackendName = "shm",
        **options: Unpack[EnvOptions],
    ) -> None:
        fns = list(env_fns)
        workers = None if backend == "serial" else num_workers or len(fns)
        method = start_method if backend in ("shm", "pipe") else None
        super().__init__(make(fns, backend=backend, num_workers=workers, start_method=method, **options))

    def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """First observations and one info per env."""
        self._drop_leftovers()
        batch = self.fleet.reset(seed=seed, options=options)
        return batch.obs, list(batch.info)

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """obs, rewards, terminated, truncated, infos."""
        infos = [dict(info) for info in batch.info]
        for row in np.flatnonzero(batch.ended).tolist():
            infos[row]["final_obs"] = self._final_obs(row)
            infos[row]["final_info"] = batch.final_info[row]
        return batch.obs, batch.reward, batch.terminated, batch.truncated, infos


class VectorizedEnvs(_ClassicView):
    """Many envs in this process, in the old style: `reset()` gives observations, `step` gives obs, rewards, dones, infos.

    `num_envs` is the same as `n_envs`. Keyword arguments that are not `envfleet.make`'s go to the environment's constructor, as
    those of `env_kwargs` do. `infos[i]` at an end has "terminal_observation" and "TimeLimit.truncated", as old code expects.

    Example:
        >>> envs = VectorizedEnvs("CartPole-v1", n_envs=3)
        >>> envs.reset(seed=0).shape
        (3, 4)
        >>> obs, rewards, dones, infos = envs.step([0, 1, 0])
        >>> dones.tolist()
        [False, False, False]
        >>> envs.close()
    """

    backend = "serial"

    def __init__(self, env: Any, n_envs: int = 200, *, num_envs: int | None = None, **options: Any) -> None:
        options = {"backend": self.backend, **options}
        self._num_seen: int | None = None  # how much of an observation is the environment's own, where the rest is its state
        self._is_cage2 = is_cage2(env)
        if self._is_cage2:
            env, self._num_seen = cage2_recipe(env, options)
        env, options = _split_arguments(_as_recipe(env), options)
        super().__init__(make(env, n_envs if num_envs is None else num_envs, **options))
        if self._num_seen is not None:
            self.single_observation_space = gym.spaces.Box(0, 1, (self._num_seen,), np.uint8)
            self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self._true_states = TrueStates(self.fleet)

    def reset(self, seed: int | None = None) -> Any:
        """First observations."""
        self._drop_leftovers()
        return self._seen(self.fleet.reset(seed=seed).obs)

    def _seen(self, obs: Any) -> Any:
        return obs if self._num_seen is None else obs[..., : self._num_seen].copy()

    def _actions(self, actions: Any) -> Any:
        """CAGE 2: an action that does not exist is refused here, before any environment steps."""
        if self._is_cage2:
            refuse_missing_actions(actions)
        return actions

    def get_true_states(self) -> Any:
        """The true states of all envs as one array, in one call: what their `true_state()` gives.

        Those of CAGE 2 are records of `envfleet.envs.cage2.TRUE_STATE`. Where an episode has just ended, it is the state of the next.
        """
        with self._peer_errors():
            return self._true_states.read()

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """obs, rewards, dones, infos."""
        infos = [dict(info) for info in batch.info]
        for row in np.flatnonzero(batch.ended).tolist():
            infos[row] = {**batch.final_info[row], "terminal_observation": self._seen(self._final_obs(row))}
            infos[row]["TimeLimit.truncated"] = bool(batch.truncated[row] and not batch.terminated[row])
        return self._seen(batch.obs), batch.reward, batch.ended, infos


class ParallelEnvSharedMemory(VectorizedEnvs):
    """`VectorizedEnvs` on worker processes over shared memory. Without an environment it is CAGE 2 (docs/cage2.md).

    Example:
        >>> envs = ParallelEnvSharedMemory("CartPole-v1", n_envs=4, num_workers=2)
        >>> envs.reset(seed=0).shape
        (4, 4)
        >>> envs.close()
        >>> import envfleet as ef
        >>> with ParallelEnvSharedMemory(n_envs=4, red_agent_type=ef.envs.cage2.B_lineAgent) as envs:
        ...     envs.reset(seed=0).shape, envs.get_true_states()["access"].shape
        ((4, 52), (4, 13))
    """

    backend = "shm"

    def __init__(self, env: Any = "cage2", n_envs: int = 200, *, num_envs: int | None = None, **options: Any) -> None:
        super().__init__(env, n_envs, num_envs=num_envs, **options)


class VectorizedCAGE2Envs(VectorizedEnvs):
    """CAGE 2 in this process: in C++ (`backend="native"`) where that was built, else in plain Python (`backend="serial"`).

    Example:
        >>> with VectorizedCAGE2Envs(n_envs=3, red_agent_type="RedMeanderAgent", max_steps=30) as envs:
        ...     observations = envs.reset(seed=0)
        ...     observations, rewards, dones, infos = envs.step([0, 1, 2])
        ...     envs.get_true_states()["steps"].tolist()
        [1, 1, 1]
    """

    def __init__(self, n_envs: int = 200, *, num_envs: int | None = None, **options: Any) -> None:
        if "backend" not in options and not is_built():
            warnings.warn(
                "CAGE 2 in C++ was not built, so VectorizedCAGE2Envs runs it in Python, some 200 times slower: "
                "install a C++ compiler and envfleet again",
                RuntimeWarning,
                stacklevel=2,
            )
            options = {**options, "backend": "serial", "num_workers": None}  # it has no threads
        options = {"backend": "native", **options}
        super().__init__("cage2", n_envs, num_envs=num_envs, **options)


def _as_recipe(env: Any) -> Any:
    """These scripts often pass an env object: use its spec, or else a copy by value for every slot."""
    if not (isinstance(env, gym.Env) or (hasattr(env, "step") and not isinstance(env, type))):
        return env
    if getattr(env, "spec", None) is not None:
        return env.spec
    blob = cloudpickle.dumps(env)
    return lambda: cloudpickle.loads(blob)


def _split_arguments(env: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The environment with the arguments of its constructor, and the options of `make`."""
    own = {name: value for name, value in given.items() if name in {*FleetOptions.__optional_keys__, "on_end"}}
    arguments, named = dict(own.pop("env_kwargs", None) or {}), given.keys() - own.keys() - {"env_kwargs"}
    if twice := sorted(named & arguments.keys()):
        raise BadArgument(f"{twice} are given as keyword arguments and in env_kwargs: give each once")
    if isinstance(env, (list, tuple)) and (arguments or named):
        raise BadArgument(f"{sorted({*arguments, *named})} have no place in a list of callables: put them into the callables")
    takes = _parameters(env)
    if both := sorted((own.keys() - arguments.keys()) & set(takes or ())):
        raise BadArgument(f"{both} are arguments of the fleet and of {env_name(env)}: put the environment's into env_kwargs")
    arguments |= {name: given[name] for name in named}
    if takes is not None:
        refuse_unknown(
            env_name(env), arguments.keys() - set(takes), [*takes, "num_envs", "n_envs", *sorted(FleetOptions.__optional_keys__)]
        )
    if not arguments:
        return env, own
    if isinstance(env, (str, EnvSpec)) and own.get("backend") == "native":
        return env, {**own, "env_kwargs": arguments}  # `make` looks for the native version by name
    return resolve(env, arguments), own


def _parameters(env: Any) -> list[str] | None:
    """The names of the constructor's parameters; None if it takes any."""
    found = resolve_env(env) if isinstance(env, str) else env
    own: list[str] = []
    if isinstance(found, (str, EnvSpec)):
        spec = gym.spec(found) if isinstance(found, str) else found
        found = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        own += [name for name, p in inspect.signature(gym.make).parameters.items() if p.kind is not p.VAR_KEYWORD]
    parameters = inspect.signature(found).parameters if callable(found) else {}
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else [*own, *parameters]
