"""`make`: builds a running fleet from what users pass."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import gymnasium as gym

from envfleet.autotune.auto import decide
from envfleet.backends.base import Backend
from envfleet.backends.ray_options import RayOptions, RayTransport
from envfleet.backends.slot_mover import Mover
from envfleet.core.arguments import refuse_unknown
from envfleet.core.engine_choice import ENGINES, engine_backend, engine_of, refuse_for_engine
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import BackendName, EnvLike, ObservationMode, OnEnd, OnFault, StartMethod
from envfleet.core.plan import Plan
from envfleet.core.supervisor import Policy
from envfleet.envs.registry import native_version
from envfleet.errors import BadArgument, MissingExtra, SpacesDiffer
from envfleet.faults.failure import Loss, init_fault
from envfleet.multiagent.agent_env import joint_columns
from envfleet.multiagent.pettingzoo import as_agent_env, keep_state
from envfleet.slots import compiled_core
from envfleet.slots.factories import Recipe, factories_for
from envfleet.slots.layout import Layout, leaves_of, same_rows
from envfleet.util.loading import load_attribute

#: Backends by name, imported when used: `remote` is above the core, which does not know OpenEnv.
BACKENDS = {
    "serial": "envfleet.backends.serial:SerialBackend",
    "thread": "envfleet.backends.thread:ThreadBackend",
    "aio": "envfleet.backends.aio:AioBackend",
    "pipe": "envfleet.backends.pipe:PipeBackend",
    "shm": "envfleet.backends.shm:ShmBackend",
    "native": "envfleet.backends.native_backend:NativeBackend",
    "ray": "envfleet.backends.ray_backend:RayBackend",
    "remote": "envfleet.remote.remote_backend:RemoteBackend",
}
_SESSIONS = "envfleet.remote.remote_backend:remote_factory"
_SCHEMES = ("http://", "https://", "ws://", "wss://")


def make(
    env: EnvLike,
    num_envs: int | None = None,
    *,
    backend: BackendName | Backend = "auto",
    num_workers: int | None = None,
    start_method: StartMethod | None = None,
    isolate: bool | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    on_end: OnEnd | None = None,
    observation_mode: ObservationMode = "same",
    columns: Mapping[str, gym.Space[Any]] | None = None,
    on_fault: OnFault | None = None,
    max_restarts: int = 3,
    init_timeout_s: float = 120.0,
    reset_timeout_s: float = 60.0,
    step_timeout_s: float = 60.0,
    blas_threads: int | None = 1,
    with_state: bool = False,
    debug: bool | None = None,
    resources: Mapping[str, Any] | None = None,
    ray_address: str | None = None,
    placement: Any = None,
    transport: RayTransport | None = None,
    ports: tuple[int, int] | None = None,
    spawn_timeout_s: float | None = None,
    **unknown: Never,
) -> Fleet:
    """A fleet of environments.

    Args:
        env: a Gymnasium id, a short name of ours, an EnvSpec, a callable that builds an env (Gymnasium's, or a PettingZoo
            ParallelEnv or AECEnv), a list of callables with the same spaces, a PettingZoo env to be copied, or the
            address (or addresses) of OpenEnv servers; every slot is then a session. "gymnax:…", "envpool:…" and
            environments in the style of gymnax are run by a batch engine (docs/engines.md).
        num_envs: how many slots (1 if not given; with a list, its length).
        backend: "serial", "thread", "aio", "pipe", "shm", or "auto" to let a short probe choose; "remote" is chosen by
            server addresses, "jax" and "envpool" by the environment; "vector" is Gymnasium's own vectorised version of
            an id; or an object of a backend class of your own.
        num_workers: how many processes or threads step (default: the CPUs this process may use; for thread and aio a
            thread per slot up to 64).
        start_method: "forkserver" (default), "spawn" or "fork", for pipe and shm.
        isolate: False lets the parent step envs itself, a share of the slots of "shm" or what `auto` chooses: faster on
            few cores, but an env that crashes its process then ends the trainer. True forbids it. None: `auto` does so
            only with code it knows (docs/core.md), "shm" isolates.
        env_kwargs: for `gymnasium.make`, with an id or EnvSpec.
        wrappers: callables put around each env, innermost first.
        on_end: "reset" starts the next episode in the same step; "wait" leaves the env at its end until it is sent again.
            None: "reset", but "wait" with a batch engine that can only wait.
        observation_mode: "same" asks for equal observation spaces; "different" allows other bounds in each environment, with
            the same shapes and dtypes.
        columns: values of `info` to be stored as columns, name -> space.
        on_fault: "raise" an error (the default), or "restart" the env and mark its row (the default with servers).
        max_restarts: restarts of a slot without a completed episode in between, before it is quarantined.
        init_timeout_s: how long a constructor may take.
        reset_timeout_s: how long a reset may take.
        step_timeout_s: how long a step (or a call, or a render) may take.
        blas_threads: threads of BLAS and OpenMP in each worker process; None does not change them.
        with_state: for PettingZoo environments, keep `env.state()` too: the columns `state` and, at ends, `final_state`.
        debug: overwrite stale zero-copy views and check actions; default: the environment variable ENVFLEET_DEBUG.
        resources: for "ray", what each worker needs: num_cpus (1), num_gpus, memory, and custom resources by name.
        ray_address: for "ray", the cluster, where `ray.init` was not called: "auto" or "HOST:PORT".
        placement: for "ray", where workers go: "SPREAD" (over machines, the default), "DEFAULT", or a placement group.
        transport: for "ray", "stream" (a connection of its own to each worker, the default), or "call" where only Ray's ports are open.
        ports: for "ray", the first and last port that workers may listen on (any free port).
        spawn_timeout_s: for "ray", how long a worker may wait for a place (30); then its slots are quarantined until there is one.

    Example:
        >>> import envfleet as ef
        >>> with ef.make("CartPole-v1", num_envs=2, backend="serial") as fleet:
        ...     fleet.reset(seed=1).obs.shape
        (2, 4)
    """
    if unknown:
        refuse_unknown("make", unknown, inspect.signature(make).parameters.keys() - {"unknown"})
    _check("on_end", on_end or "reset", ("reset", "wait"))
    _check("observation_mode", observation_mode, ("same", "different"))
    on_fault = on_fault or ("restart" if is_remote(env) else "raise")
    _check("on_fault", on_fault, ("raise", "restart"))
    _check_numbers(num_workers, {"init": init_timeout_s, "reset": reset_timeout_s, "step": step_timeout_s}, columns)
    if is_remote(env):
        env, env_kwargs, backend = _sessions(env, env_kwargs, backend, reset_timeout_s, step_timeout_s)
    elif backend == "remote":
        raise BadArgument("backend 'remote' needs addresses of servers as its first argument, e.g. 'http://host:8000'")
    if backend == "native":
        env, env_kwargs = native_version(env, env_kwargs)
    _check_agents(env)
    wrappers = (*wrappers, keep_state) if with_state else wrappers
    factories, spec = factories_for(env, num_envs, env_kwargs, wrappers)
    recipe = Recipe(
        factories,
        on_end or "reset",
        dict(columns or {}),
        init_timeout_s,
        reset_timeout_s,
        step_timeout_s,
        blas_threads,
        spec,
        keep_obs=on_fault == "restart",
        bounds_differ=observation_mode == "different",
    )
    asked = {"resources": resources, "ray_address": ray_address, "placement": placement, "transport": transport}
    asked |= {"ports": ports, "spawn_timeout_s": spawn_timeout_s}
    ray_options = _ray_options(backend, {name: value for name, value in asked.items() if value is not None})
    engine = engine_of(factories, backend)
    if engine is not None:
        refuse_for_engine(engine, backend, wrappers=wrappers, start_method=start_method, isolate=isolate, with_state=with_state)
        chosen, reason = engine_backend(engine, num_workers, any_end=on_end is None), f"the engine of {engine!r}"
    else:
        chosen, reason = _backend(ray_options or backend, num_workers, start_method, isolate, recipe, on_fault)
    return _start(chosen, recipe, Policy(on_fault, max_restarts), reason, _debug(debug))


def is_remote(env: Any) -> bool:
    """Whether `make` was given server addresses: one, a list of them, or a mapping with `env_url`.

    Example:
        >>> is_remote("http://127.0.0.1:8000"), is_remote("CartPole-v1")
        (True, False)
    """
    if isinstance(env, Mapping):
        return "env_url" in env
    if isinstance(env, str):
        return env.startswith(_SCHEMES)
    return isinstance(env, (list, tuple)) and bool(env) and all(isinstance(url, str) and is_remote(url) for url in env)


def _check_numbers(
    num_workers: int | None, timeouts_s: Mapping[str, float], columns: Mapping[str, gym.Space[Any]] | None
) -> None:
    if num_workers is not None and (isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1):
        raise BadArgument(f"num_workers={num_workers!r}: give a whole number from 1 up")
    for name, value in timeouts_s.items():
        if not value > 0:
            raise BadArgument(f"{name}_timeout_s={value!r}: give seconds above 0")
    for name, space in (columns or {}).items():
        if len(leaves := leaves_of(space)) != 1 or not leaves[0].is_column:
            raise BadArgument(f"column {name!r}: {space} has no single fixed-shape array")


def _check_agents(env: Any) -> None:
    """Refuse a PettingZoo env whose agents or spaces cannot be laid out. Nothing is known yet about any other env."""
    if not callable(env):
        try:
            as_agent_env(env)
        except TypeError as unfit:
            raise BadArgument(str(unfit)) from unfit


def _sessions(
    env: Any, env_kwargs: Mapping[str, Any] | None, backend: str | Backend, reset_timeout_s: float, step_timeout_s: float
) -> tuple[Any, None, Backend]:
    """Addresses of servers: a factory of sessions and the backend that holds them."""
    if backend not in ("auto", "remote"):
        raise BadArgument(f"addresses of servers only go with backend 'remote', not {backend!r}")
    waits = {"capacity_timeout_s": reset_timeout_s, "down_timeout_s": reset_timeout_s, "message_timeout_s": step_timeout_s}
    sessions = load_attribute(_SESSIONS, "remote")(env, {**waits, **(env_kwargs or {})})
    return sessions, None, load_attribute(BACKENDS["remote"], "backend")()


def _start(backend: Backend, recipe: Recipe, policy: Policy, reason: str, debug: bool) -> Fleet:
    try:
        built = backend.start(recipe)
        layout, about = _agree(built, recipe, policy)
        reason += "" if backend.seeds_per_slot else "; one seed for all slots"
        compiled_core.warn_if_absent()
        if compiled_core.load() is None:
            reason += "; without the compiled core (`envfleet doctor` says why)"
        plan = Plan(backend.name, backend.num_workers, recipe.num_slots, backend.start_method, reason, backend.notes)
        fleet = Fleet(backend, layout, about, policy, plan, debug)
    except BaseException:
        backend.close(2.0)
        raise
    for slot, what in built.items():
        if not isinstance(what, dict):  # under "restart": built again when first reset
            fleet._supervisor.lost[slot] = fleet._supervisor.troubled = True
            fleet._supervisor.faults.append(init_fault(slot, what, int(backend.worker_of[slot])))
    return fleet


def _agree(built: Mapping[int, Any], recipe: Recipe, policy: Policy) -> tuple[Layout, dict[str, Any]]:
    """The layout all envs agree on; the first failure is raised unless faults are to be restarted."""
    good = {slot: about for slot, about in sorted(built.items()) if isinstance(about, dict)}
    bad = {slot: what for slot, what in sorted(built.items()) if not isinstance(what, dict)}
    if bad and (policy.on_fault == "raise" or not good):
        # The slot that a lost worker was in explains more than the other slots of that worker.
        culprits = [slot for slot, what in bad.items() if not (isinstance(what, Loss) and what.slot not in (slot, -1))]
        slot = (culprits or list(bad))[0]
        error = init_fault(slot, bad[slot]).error()
        for other in [other for other in bad if other != slot][:3]:
            error.add_note(f"also: {init_fault(other, bad[other])}")
        raise error
    first = next(iter(good))
    owners: dict[Any, int] = {}
    for slot, about in good.items():
        if owners.setdefault(about.get("identity", slot), slot) != slot:
            raise BadArgument(
                f"slots {owners[about['identity']]} and {slot} got the same environment object, so each would step the other's "
                "episode: the callable must build a new environment at every call (lambda: MyEnv(), not lambda: env)"
            )
        for name in ("agents", "observation_space", "action_space"):
            if not _agrees(name, about.get(name), good[first].get(name), recipe):
                raise SpacesDiffer(
                    f"slot {slot} has {name} {about.get(name)}, but slot {first} has {good[first].get(name)}: "
                    "all environments of one fleet need equal spaces and, where there are many, the same agents",
                    name,
                )
    about = {**good[first], "observation_spaces": [good.get(slot, good[first])["observation_space"] for slot in sorted(built)]}
    columns = {**about["columns"], **recipe.columns}
    agents = tuple(about.get("agents", ()))
    if agents:
        columns = {**joint_columns(columns, len(agents)), **about["agent_columns"]}
    return Layout(about["observation_space"], about["action_space"], columns, agents, about.get("groups", ())), about


def _agrees(name: str, one: Any, other: Any, recipe: Recipe) -> bool:
    return one is other or bool(one == other) or (recipe.bounds_differ and name == "observation_space" and same_rows(one, other))


def _ray_options(backend: str | Backend, given: dict[str, Any]) -> RayOptions | None:
    """The options of backend "ray", checked; those of others are refused."""
    if backend == "ray":
        return RayOptions(**given)
    if given:
        raise BadArgument(f"{', '.join(given)} can be given only with backend='ray', not {backend!r}")
    return None


def _backend(
    backend: str | Backend | RayOptions,
    num_workers: int | None,
    start_method: str | None,
    isolate: bool | None,
    recipe: Recipe,
    on_fault: str,
) -> tuple[Backend, str]:
    if isinstance(backend, RayOptions):
        if start_method is not None or isolate is False:
            raise BadArgument("start_method and isolate=False do not go with backend 'ray': its workers are actors of their own")
        ray_backend: Backend = load_attribute(BACKENDS["ray"], "backend")(num_workers, backend)
        return ray_backend, "asked for"
    if isinstance(backend, Backend):
        return backend, "sessions with servers" if backend.name == "remote" else "given"
    _check("backend", backend, ("auto", *BACKENDS, *ENGINES))
    reason, threads, mover = "asked for", False, None
    if backend == "auto":
        choice = decide(recipe, num_workers, isolate, on_fault)
        backend, num_workers, isolate, threads = choice.backend, choice.num_workers, choice.isolate, choice.threads
        reason = f"auto: {choice.reason}"
        mover = Mover(choice.moves_below) if choice.moves_below else None
        start_method = start_method if backend in ("pipe", "shm") else None
    if start_method is not None and backend not in ("pipe", "shm"):
        raise BadArgument(f"start_method only goes with backend 'pipe' or 'shm', not {backend!r}")
    if backend == "serial" and num_workers not in (None, 1):
        raise BadArgument(f"backend 'serial' has one worker, the caller: num_workers={num_workers} is not possible")
    if backend in ("pipe", "shm") and not hasattr(os, "fork"):
        raise MissingExtra(backend, why="This system has no fork; use backend='thread' or 'serial'.")
    kind = load_attribute(BACKENDS[backend], "backend")
    if backend == "serial":
        return kind(), reason
    if backend == "pipe":
        return kind(num_workers, start_method, threads), reason
    if backend == "shm":
        return kind(num_workers, start_method, isolate=isolate is not False, mover=mover), reason
    return kind(num_workers), reason


def _check(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise BadArgument(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def _debug(debug: bool | None) -> bool:
    return os.environ.get("ENVFLEET_DEBUG", "0") not in ("", "0") if debug is None else debug
