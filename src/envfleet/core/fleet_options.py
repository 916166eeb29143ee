"""The types of what `make` and the views over it take, so that type checkers find a wrong name or value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from envfleet.backends.base import Backend
from envfleet.backends.ray_options import RayTransport

BackendName = Literal["auto", "serial", "thread", "aio", "pipe", "shm", "native", "ray", "remote", "jax", "envpool", "vector"]
StartMethod = Literal["forkserver", "spawn", "fork"]
ObservationMode = Literal["same", "different"]
OnEnd = Literal["reset", "wait"]
OnFault = Literal["raise", "restart"]


class ManyAgents(Protocol):
    """An environment of PettingZoo."""

    possible_agents: Any


EnvLike = str | EnvSpec | Callable[..., Any] | Sequence[Callable[..., Any] | str] | Mapping[str, Any] | ManyAgents


class EnvOptions(TypedDict, total=False):
    """Options of `make` that every view passes on."""

    isolate: bool | None
    env_kwargs: Mapping[str, Any] | None
    wrappers: Sequence[Callable[[Any], Any]]
    columns: Mapping[str, gym.Space[Any]] | None
    on_fault: OnFault | None
    max_restarts: int
    init_timeout_s: float
    reset_timeout_s: float
    step_timeout_s: float
    blas_threads: int | None
    with_state: bool
    debug: bool | None


class FleetOptions(EnvOptions, total=False):
    """The same with where environments run. `on_end` and `observation_mode` are not among them: a view decides."""

    backend: BackendName | Backend
    num_workers: int | None
    start_method: StartMethod | None
    resources: Mapping[str, Any] | None
    ray_address: str | None
    placement: Any
    transport: RayTransport | None
    ports: tuple[int, int] | None
    spawn_timeout_s: float | None


class VectorOptions(FleetOptions, total=False):
    """The same with the options of Gymnasium's `AsyncVectorEnv`."""

    shared_memory: bool
    context: StartMethod | None
    daemon: bool
    worker: None
    max_concurrency: int | None
