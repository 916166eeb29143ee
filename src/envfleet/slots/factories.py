"""What to build: one factory per slot, and how factories are sent to workers.

Environments are pickled by value (cloudpickle) with registered specs, so a lambda, a class of `__main__` or a notebook
cell, and an id registered in the user's script all work in workers that never import the user's `__main__`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from envfleet.envs.registry import ENGINES, resolve_env
from envfleet.errors import BadArgument, NotPicklable
from envfleet.slots.env_contract import is_many_agents

Factory = Callable[[], Any]

_BACKEND_OF = {"gymnax": "jax", "envpool": "envpool"}


@dataclasses.dataclass(frozen=True)
class SpecFactory:
    """Builds a registered environment with `gymnasium.make`."""

    spec: EnvSpec
    kwargs: Mapping[str, Any]

    def __call__(self) -> gym.Env[Any, Any]:
        """Build one env."""
        return gym.make(self.spec, **self.kwargs)

    def __repr__(self) -> str:
        return self.spec.id


@dataclasses.dataclass(frozen=True)
class WrappedFactory:
    """Builds an env and puts wrappers around it."""

    inner: Factory
    wrappers: tuple[Callable[[Any], Any], ...]

    def __call__(self) -> Any:
        """Build one env."""
        env = self.inner()
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


@dataclasses.dataclass(frozen=True)
class CopyFactory:
    """Gives copies of an env that was passed by value."""

    name: str
    blob: bytes = dataclasses.field(repr=False)

    def __call__(self) -> Any:
        """Make one copy."""
        return pickle.loads(self.blob)  # pickled by this very fleet

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, eq=False)
class EngineFactory:
    """Names environments that a batch engine builds, all slots in one object: see `envfleet.backends.batch_engine`."""

    backend: str
    target: Any
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Refuse: there is no single environment."""
        raise BadArgument(f"{self!r} is run by a batch engine, which has no environment of its own for one slot: use make()")

    def __repr__(self) -> str:
        by_name = self.backend == "jax" and isinstance(self.target, str)
        return f"{'gymnax' if by_name else self.backend}:{env_name(self.target)}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything a backend needs to build and run the slots."""

    factories: tuple[Factory, ...]
    on_end: str = "reset"
    columns: Mapping[str, gym.Space[Any]] = dataclasses.field(default_factory=dict)
    init_timeout_s: float = 120.0
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    blas_threads: int | None = 1
    spec: EnvSpec | None = None
    keep_obs: bool = True  # whether fault rows, which hold the last observation, are needed
    bounds_differ: bool = False  # whether observation spaces may differ in what is not in a row

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self.factories)

    @property
    def name(self) -> str:
        """The name of the environment, for messages and caches."""
        return self.spec.id if self.spec else getattr(self.factories[0], "__qualname__", repr(self.factories[0]))

    def timeout_s(self, phase: str) -> float:
        """The deadline of a phase."""
        return {"init": self.init_timeout_s, "reset": self.reset_timeout_s}.get(phase, self.step_timeout_s)

    def pack(self) -> bytes:
        """The factories, the registered specs and the key of multiprocessing's managers as bytes, for other processes."""
        unique: list[Factory] = []
        index: dict[int, int] = {}
        for factory in self.factories:
            if id(factory) not in index:
                index[id(factory)] = len(unique)
                unique.append(factory)
        blobs = [pickled(factory, "the environment factory") for factory in unique]
        authkey = bytes(multiprocessing.current_process().authkey)
        return pickle.dumps(([index[id(f)] for f in self.factories], blobs, pack_registry(), authkey))


def unpack_factories(data: bytes) -> list[Factory]:
    """In a worker: register the parent's specs and give back one factory per slot."""
    index, blobs, registry, authkey = pickle.loads(data)
    if authkey:
        multiprocessing.current_process().authkey = authkey  # else an env with a manager's queue or lock is refused by it
    register_packed(registry)
    unique = [_load_factory(blob) for blob in blobs]
    return [unique[i] for i in index]


def _load_factory(blob: bytes) -> Factory:
    try:
        factory = pickle.loads(blob)
    except ModuleNotFoundError as missing:
        missing.add_note(
            f"A worker could not import {missing.name!r}. Put its folder on sys.path or PYTHONPATH, "
            "or define the environment in the script itself: then it is sent by value."
        )
        raise
    assert callable(factory)
    return factory  # type: ignore[no-any-return]


def resolve(env: Any, kwargs: Mapping[str, Any] | None = None) -> Factory:
    """A factory from what users pass; `kwargs` go to every environment that it builds.

    `env` is a short name ("tmaze"), a Gymnasium id or spec, "module:attribute", a class or another callable, or a
    PettingZoo environment, of which every slot gets a copy; or what a batch engine runs: "gymnax:…", "envpool:…", or an
    object or class in the style of gymnax.

    Example:
        >>> resolve("tmaze", {"length": 4})().length, resolve("CartPole-v1")
        (4, CartPole-v1)
    """
    kwargs = dict(kwargs or {})
    found = resolve_env(env) if isinstance(env, str) else env
    if isinstance(found, str) and found.partition(":")[0] in ENGINES:
        package, _, name = found.partition(":")
        return EngineFactory(_BACKEND_OF[package], name, kwargs)
    if callable(getattr(found, "reset_env", None)) and callable(getattr(found, "step_env", None)):
        return EngineFactory("jax", found, kwargs)
    if isinstance(found, (str, EnvSpec)):
        spec = gym.spec(found.rpartition(":")[2]) if isinstance(found, str) else found
        return SpecFactory(_portable(spec), kwargs)
    if is_many_agents(found) and not isinstance(found, type):
        return CopyFactory(type(found).__name__, pickled(found, "the environment"))
    if isinstance(found, gym.Env) or (hasattr(found, "step") and not isinstance(found, type)):
        raise BadArgument(
            f"got an environment object ({type(found).__name__}); every slot needs its own: "
            "pass a callable that builds one, e.g. lambda: MyEnv()"
        )
    if not callable(found):
        raise BadArgument(f"cannot make environments from {found!r}: pass an id, an EnvSpec, a callable or a list of them")
    return functools.partial(found, **kwargs) if kwargs else found


def env_name(env: Any) -> str:
    """A name for what users pass, for servers, logs and reports.

    Example:
        >>> env_name("my.module:Maze"), env_name(resolve("tmaze", {"length": 4})), env_name(resolve("CartPole-v1"))
        ('Maze', 'TMaze', 'CartPole-v1')
    """
    if isinstance(env, functools.partial):
        return env_name(env.func)
    if isinstance(env, str):
        return env.rpartition(":")[2]
    if isinstance(env, SpecFactory):
        return env.spec.id
    return str(getattr(env, "__name__", None) or getattr(env, "id", None) or type(env).__name__)


def factories_for(
    env: Any, num_envs: int | None, env_kwargs: Mapping[str, Any] | None, wrappers: Sequence[Callable[[Any], Any]]
) -> tuple[tuple[Factory, ...], EnvSpec | None]:
    """One factory per slot from what users pass to `make`: what `resolve` takes, or a list of callables, one per slot."""
    if env_kwargs and not isinstance(env, (str, EnvSpec)):
        raise BadArgument("env_kwargs only go with an id or an EnvSpec; put them into your callable instead")
    if isinstance(env, (list, tuple)):
        bad = [i for i, item in enumerate(env) if not callable(item)]
        if not env or bad:
            raise BadArgument(
                "a list of environments must hold callables, each returning a new environment; "
                + (f"items {bad[:5]} are not callable" if bad else "it is empty")
            )
        if num_envs not in (None, len(env)):
            raise BadArgument(f"num_envs={num_envs}, but the list has {len(env)} callables: leave num_envs out")
        made: list[Factory] = list(env)
    else:
        count = 1 if num_envs is None else num_envs
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadArgument(f"num_envs={num_envs!r}: give a whole number from 1 up")
        made = [resolve(env, env_kwargs)] * count
    first = made[0]
    spec = first.spec if isinstance(first, SpecFactory) and all(factory is first for factory in made) else None
    # Slots that share a factory keep sharing it: it is sent to a worker once.
    around = {id(factory): WrappedFactory(factory, tuple(wrappers)) if wrappers else factory for factory in made}
    return tuple(around[id(factory)] for factory in made), spec


def _portable(spec: EnvSpec) -> EnvSpec:
    entry = spec.entry_point
    if isinstance(entry, str) and entry.startswith("__main__:"):
        spec = copy.copy(spec)
        spec.entry_point = gym.envs.registration.load_env_creator(entry)  # type: ignore[assignment]
    return spec


def pack_registry() -> list[bytes]:
    """Every spec that a fresh `import gymnasium` would not bring, for envs that call gymnasium.make themselves."""
    blobs = []
    for spec in gym.envs.registration.registry.values():
        entry = spec.entry_point
        if isinstance(entry, str) and entry.startswith("gymnasium."):
            continue
        try:
            blobs.append(cloudpickle.dumps(_portable(spec)))
        except Exception:
            continue  # not used by this fleet, or pickling its factory gives the clear error
    return blobs


def register_packed(blobs: Sequence[bytes]) -> None:
    """In another process: register the specs of `pack_registry` that are not known here."""
    for blob in blobs:
        try:
            spec = pickle.loads(blob)
        except (ImportError, AttributeError):
            continue  # an id this worker cannot resolve matters only if it is used, and then gymnasium says so
        gym.envs.registration.registry.setdefault(spec.id, spec)


def pickled(value: Any, what: str, hint: str = "Create it inside the callable, or use backend='thread' or 'serial'.") -> bytes:
    """`value` as bytes, or an error that names the part that cannot be pickled.

    Example:
        >>> import threading
        >>> lock = threading.Lock()
        >>> pickled(lambda: lock, "the environment factory")
        Traceback (most recent call last):
        ...
        envfleet.errors.NotPicklable: the environment factory <lambda> cannot be sent to a worker: ...
    """
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception as error:
        name = getattr(value, "__qualname__", None) or repr(value)
        culprit = _culprit(value) or "one of its parts"
        raise NotPicklable(f"{what} {name} cannot be sent to a worker: {culprit} cannot be pickled ({error}). {hint}") from error


def _culprit(value: Any, path: str = "", depth: int = 0) -> str | None:
    """The name of the innermost captured object that cannot be pickled."""
    if depth > 4:
        return None
    for name, part in _parts(value):
        try:
            cloudpickle.dumps(part)
        except Exception:
            here = f"{path}.{name}" if path else name
            return _culprit(part, here, depth + 1) or f"{here!r} (a {type(part).__module__}.{type(part).__qualname__})"
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    if inspect.ismethod(value):
        return [("self", value.__self__)]
    if inspect.isfunction(value):
        try:
            captured = inspect.getclosurevars(value)
        except ValueError:  # a closure that is not filled yet: there is nothing to look into
            return []
        parts = {**captured.globals, **captured.nonlocals}
        for i, default in enumerate(value.__defaults__ or ()):
            parts[f"default {i}"] = default
        return list(parts.items())
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
        return [("func", value.func), *((f"argument {i}", item) for i, item in enumerate(value.args))] + list(
            getattr(value, "keywords", {}).items()
        )
    return list(vars(value).items()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
