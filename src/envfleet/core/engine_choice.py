"""Which batch engine a fleet asks for, and what does not go with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envfleet.backends.base import Backend
from envfleet.backends.engine_backend import EngineBackend
from envfleet.errors import BadArgument
from envfleet.slots.factories import EngineFactory, Factory, SpecFactory, WrappedFactory
from envfleet.util.loading import load_attribute

#: Engines by the name of their backend, imported when used.
ENGINES = {
    "jax": "envfleet.backends.jax_engine:JaxEngine",
    "envpool": "envfleet.backends.envpool_engine:EnvPoolEngine",
    "vector": "envfleet.backends.vector_engine:VectorEngine",
}


def engine_of(factories: Sequence[Factory], backend: str | Backend) -> EngineFactory | None:
    """What a batch engine is to run; None where slots have environments of their own."""
    bare = [factory.inner if isinstance(factory, WrappedFactory) else factory for factory in factories]
    first = bare[0]
    if not isinstance(first, EngineFactory):
        if backend == "vector" and isinstance(first, SpecFactory) and all(factory is first for factory in bare):
            return EngineFactory("vector", first.spec, {**first.kwargs})
        if isinstance(backend, str) and backend in ENGINES:
            what = {"jax": 'a name "gymnax:…", or an environment in its style', "envpool": 'a name "envpool:…"'}
            raise BadArgument(f"backend {backend!r} needs {what.get(backend, 'one Gymnasium id or EnvSpec')}, not {first!r}")
        if any(isinstance(factory, EngineFactory) for factory in bare):
            raise BadArgument("a batch engine runs all slots of a fleet: it cannot share them with other environments")
        return None
    if any(factory is not first for factory in bare):
        raise BadArgument(f"{first!r} runs all slots of a fleet with one engine: give it alone, with num_envs")
    return first


def refuse_for_engine(engine: EngineFactory, backend: str | Backend, **options: Any) -> None:
    """Refuse what an engine cannot do before it is built."""
    if isinstance(backend, Backend) or backend not in ("auto", engine.backend):
        raise BadArgument(f"{engine!r} is run by backend {engine.backend!r}, not {backend!r}: leave backend out")
    given = [name for name, value in options.items() if value]
    if given:
        raise BadArgument(
            f"{engine!r} is run by a batch engine, which has no workers and no env per slot: leave out {', '.join(given)}"
        )


def engine_backend(engine: EngineFactory, num_workers: int | None, any_end: bool) -> Backend:
    """The backend of an engine. `num_workers` is the number of threads, where an engine has its own."""
    kind = load_attribute(ENGINES[engine.backend], "backend")
    if num_workers is not None and not kind.has_threads:
        raise BadArgument(f"{engine!r}: num_workers={num_workers} is not possible, its engine has no threads to choose")
    built = kind(engine.target, engine.kwargs, num_workers) if kind.has_threads else kind(engine.target, engine.kwargs)
    return EngineBackend(built, any_end)
