"""A fleet as a `gymnasium.vector.VectorEnv`: the same observations, rewards, flags and infos, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from envfleet.adapters.fleet_view import SingleAgentView
from envfleet.adapters.peer_errors import CallPending, NoCallPending, VectorEnvClosed, as_env_raised, for_gymnasium
from envfleet.core.batch import Batch, decoded
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import EnvLike, FleetOptions, ObservationMode, OnEnd, StartMethod, VectorOptions
from envfleet.errors import BadArgument, EnvFailed, FleetError, NotABatch, RecvTimeout, ResetNeeded, SpacesDiffer
from envfleet.slots.layout import same_rows

EnvFns = Sequence[Callable[[], Any]]
ObsMode = ObservationMode | tuple[gym.Space[Any], gym.Space[Any]]
AutoresetName = Literal["NextStep", "SameStep", "Disabled", "NEXT_STEP", "SAME_STEP", "DISABLED"]


def parse_autoreset_mode(mode: Any) -> AutoresetMode:
    """Gymnasium's enum from its value, its name, or itself.

    Example:
        >>> parse_autoreset_mode("NextStep"), parse_autoreset_mode("SAME_STEP")
        (<AutoresetMode.NEXT_STEP: 'NextStep'>, <AutoresetMode.SAME_STEP: 'SameStep'>)
    """
    for known in AutoresetMode:
        if mode in (known, known.value, known.name):
            return known
    raise BadArgument(f"autoreset_mode={mode!r}: choose one of {', '.join(repr(m.value) for m in AutoresetMode)}")


class FleetVectorEnv(SingleAgentView, VectorEnv[Any, Any, Any]):
    """The vector environment that `make_vec` returns; `fleet` is the fleet below it.

    It has the methods of Gymnasium's `AsyncVectorEnv` on every backend, and `envs` of `SyncVectorEnv` on "serial". Its errors
    are ours and Gymnasium's at once (`envfleet.adapters.peer_errors`).

    Example:
        >>> envs = make_vec("CartPole-v1", num_envs=2, backend="serial")
        >>> obs, infos = envs.reset(seed=0)
        >>> envs.step_async([0, 1])
        >>> envs.step_wait()[1].tolist()
        [1.0, 1.0]
        >>> envs.close()
    """

    _state = AsyncState.DEFAULT  # which result is to be fetched
    _called: tuple[Any, ...] = ()  # what `call_async` has for `call_wait`

    def __init__(self, fleet: Fleet, mode: AutoresetMode, copy: bool = True, spaces: tuple[Any, Any] | None = None) -> None:
        super().__init__(fleet)
        if spaces is not None:
            self.observation_space, self.single_observation_space = spaces
        self.copy = copy
        self.autoreset_mode = mode
        self.metadata = {**fleet.metadata, "autoreset_mode": mode}
        self.render_mode = fleet.render_mode
        self.spec = fleet.spec
        self._ended = np.zeros(self.num_envs, bool)

    # VectorEnv's own np_random belongs to the vector; Gymnasium's Sync and Async show the sub-environments' instead.
    @property
    def np_random_seed(self) -> Any:
        """The seeds of the environments' generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # read-only here: the generators live in the workers
    def np_random(self) -> Any:
        """The environments' generators."""
        return self.get_attr("np_random")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all, or the environments of `options["reset_mask"]`."""
        self._refuse_pending("reset_async")
        with self._peer_errors():
            self._drop_leftovers()
            return self._reset_result(self.fleet.reset(**self._reset_arguments(seed, options)))

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset; `reset_wait` gives the result."""
        self._refuse_pending("reset_async")
        with self._peer_errors():
            self._drop_leftovers()
            self.fleet.send_reset(**self._reset_arguments(seed, options))
        self._state = AsyncState.WAITING_RESET

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the result of `reset_async`."""
        return self._reset_result(self._wait(AsyncState.WAITING_RESET, timeout))

    def _drop_leftovers(self) -> bool:
        found = super()._drop_leftovers()
        if found:  # a row that was dropped may have been a last one
            self._ended = self.fleet.slab.ended(np.arange(self.num_envs))
        return found

    def _reset_arguments(self, seed: Any, options: dict[str, Any] | None) -> dict[str, Any]:
        slots = None
        if options is not None and "reset_mask" in options:
            slots = np.flatnonzero(_checked_mask(options.pop("reset_mask"), self.num_envs))
        if seed is not None and not isinstance(seed, (int, np.integer)):
            if len(seed) != self.num_envs:
                raise BadArgument(f"{len(seed)} seeds for num_envs={self.num_envs}: give one for each, None where it may be any")
            seed = list(seed) if slots is None else [seed[slot] for slot in slots]
        return {"seed": seed, "slots": slots, "options": options}

    def _reset_result(self, batch: Batch) -> tuple[Any, dict[str, Any]]:
        self._ended[batch.slots] = False
        infos: dict[str, Any] = {}
        for slot, info in zip(batch.slots.tolist(), batch.info):
            if info:
                infos = self._add_info(infos, info, slot)
        return self._observations(), infos

    def _actions(self, actions: Any) -> Any:
        if isinstance(actions, (int, float, np.generic)):
            raise NotABatch(f"got one action, {actions!r}; step needs {self.num_envs}, one for each environment")
        if self.autoreset_mode == AutoresetMode.DISABLED and self._ended.any():
            raise ResetNeeded(np.flatnonzero(self._ended).tolist(), "reset them by options={'reset_mask': …} first")
        return actions

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments."""
        if self._state is not AsyncState.DEFAULT:
            self._refuse_pending("step_async")
        try:
            return self._result(self.fleet.step(self._actions(actions), copy=False))
        except FleetError as error:
            raise for_gymnasium(error) from error.__cause__

    def _peer_error(self, error: FleetError) -> FleetError:
        return for_gymnasium(error)

    def step_async(self, actions: Any) -> None:
        """Send the actions; `step_wait` gives the result."""
        self._refuse_pending("step_async")
        with self._peer_errors():
            self.fleet.send(self._actions(actions))
        self._state = AsyncState.WAITING_STEP

    def step_wait(
        self, timeout_s: float | None = None, *, timeout: float | None = None
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for the result of `step_async`. `timeout` is Gymnasium's name for `timeout_s`."""
        return self._result(self._wait(AsyncState.WAITING_STEP, timeout_s if timeout is None else timeout))

    def _refuse_pending(self, name: str) -> None:
        if self._state is not AsyncState.DEFAULT and not self.closed:
            pending = self._state.value
            out = np.flatnonzero(self.fleet.is_out).tolist()
            raise CallPending(f"Calling `{name}` while waiting for a pending call to `{pending}` to complete.", pending, out)

    def _wait(self, wanted: AsyncState, timeout_s: float | None) -> Batch:
        state = self._state
        interrupted = state is AsyncState.DEFAULT and wanted is AsyncState.WAITING_STEP and self.fleet.is_out.any()
        if not (state is wanted or interrupted or self.closed):
            raise NoCallPending(f"Calling `{wanted.value}_wait` without any prior call to `{wanted.value}_async`.", wanted.value)
        self._state = AsyncState.DEFAULT
        with self._peer_errors():
            try:
                if wanted is AsyncState.WAITING_STEP:
                    return self._recv_step(timeout_s, copy=False)
                return self.fleet.recv(timeout_s=timeout_s, copy=False)
            except RecvTimeout:
                self._state = state  # nothing is lost: it can be fetched later
                raise

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        same_step = self.autoreset_mode == AutoresetMode.SAME_STEP
        terminated, truncated = batch.terminated.copy(), batch.truncated.copy()
        self._ended = terminated | truncated
        infos: dict[str, Any] = {}
        if same_step and self._ended.any():
            ended, final_info = self._ended.tolist(), batch.final_info
            for slot, info in enumerate(batch.info):
                if ended[slot]:
                    final = {"final_obs": self._final_obs(slot), "final_info": final_info[slot]}
                    infos = self._add_info(infos, final, slot)
                infos = self._add_info(infos, info, slot)
        elif batch._info:
            for slot in sorted(batch._info):
                infos = self._add_info(infos, decoded(batch._info, slot), slot)
        return self._observations(), batch.reward.copy(), terminated, truncated, infos

    def _observations(self) -> Any:
        return self.fleet.slab.tree("obs", slice(None), self.copy)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute."""
        self._refuse_pending("call_async")
        return super().call(name, *args, **kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a method of every environment; `call_wait` gives the results. The call is complete when this returns."""
        self._called = self.call(name, *args, **kwargs)
        self._state = AsyncState.WAITING_CALL

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`."""
        if self.closed:
            raise VectorEnvClosed("the vector environment")
        if self._state is not AsyncState.WAITING_CALL:
            raise NoCallPending("Calling `call_wait` without any prior call to `call_async`.", "call")
        self._state = AsyncState.DEFAULT
        return self._called

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment (a list or tuple: one value each)."""
        self._refuse_pending("set_attr")
        super().set_attr(name, values)

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End everything. `timeout` is how long environments may take to close; `terminate` does not wait for them."""
        if self._state is not AsyncState.DEFAULT:
            gym.logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
        if hasattr(self, "fleet"):  # it has none if its constructor failed
            self.fleet.close(0.0 if terminate else 4.0 if timeout is None else timeout)

    close = VectorEnv.close  # which calls close_extras once


def _checked_mask(mask: Any, num_envs: int) -> np.ndarray[Any, Any]:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask


class SyncVectorEnv(FleetVectorEnv):
    """Drop-in for Gymnasium's class of this name: environments in this process, one after the other.

    `options` are those of `envfleet.make`.

    Example:
        >>> import gymnasium as gym
        >>> envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
        >>> envs.reset(seed=0)[0].shape, len(envs.envs)
        ((2, 4), 2)
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: EnvFns,
        copy: bool = True,
        observation_mode: ObsMode = "same",
        autoreset_mode: AutoresetMode | AutoresetName = "NextStep",
        **options: Unpack[FleetOptions],
    ) -> None:
        self.env_fns, self.observation_mode = env_fns, observation_mode
        options.setdefault("backend", "serial")
        fleet, mode, spaces = _fleet(list(env_fns), None, autoreset_mode, observation_mode, {**options}, type(self).__name__)
        super().__init__(fleet, mode, copy, spaces)


class AsyncVectorEnv(FleetVectorEnv):
    """Drop-in for Gymnasium's class of this name: environments in worker processes, one each.

    `shared_memory=False` sends observations through sockets. `context` is a start method; the default is "forkserver".
    `max_concurrency` workers share the environments; `num_workers` is our name for it. `daemon` changes nothing: workers may
    start processes and always end with the caller. `worker` is refused. `options` are those of `envfleet.make`.

    Example:
        >>> import gymnasium as gym
        >>> envs = AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, shared_memory=False)
        >>> envs.reset_async(seed=0)
        >>> envs.reset_wait(timeout=60)[0].shape
        (2, 4)
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: EnvFns,
        shared_memory: bool = True,
        copy: bool = True,
        context: StartMethod | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: ObsMode = "same",
        autoreset_mode: AutoresetMode | AutoresetName = "NextStep",
        max_concurrency: int | None = None,
        **options: Unpack[FleetOptions],
    ) -> None:
        self.env_fns, self.observation_mode = env_fns, observation_mode
        self.shared_memory, self.context, self.daemon, self.worker = shared_memory, context, daemon, worker
        self.max_concurrency = max_concurrency
        most = len(env_fns) if max_concurrency is None else max_concurrency
        theirs = {"shared_memory": shared_memory, "context": context, "worker": worker, "max_concurrency": most}
        fleet, mode, spaces = _fleet(
            list(env_fns), None, autoreset_mode, observation_mode, {**options, **theirs}, type(self).__name__
        )
        super().__init__(fleet, mode, copy, spaces)


def _fleet(
    env: Any, num_envs: int | None, autoreset_mode: Any, observation_mode: Any, options: Mapping[str, Any], name: str
) -> tuple[Fleet, AutoresetMode, Any]:
    """What a view needs: the fleet, its mode, and the observation spaces where the caller gave them."""
    mode = parse_autoreset_mode(autoreset_mode)
    if "on_end" in options:
        raise BadArgument(f"{name} decides on_end by autoreset_mode; leave it out")
    spaces = observation_mode if isinstance(observation_mode, tuple) and len(observation_mode) == 2 else None
    if spaces is None and observation_mode not in ("same", "different"):
        raise BadArgument(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation space, "
            f"actual got {observation_mode}"
        )
    on_end: OnEnd = "reset" if mode == AutoresetMode.SAME_STEP else "wait"
    bounds: ObservationMode = "same" if observation_mode == "same" else "different"
    try:
        fleet = make(env, num_envs, on_end=on_end, observation_mode=bounds, **_our_options(options))
    except SpacesDiffer as why:
        if why.what != "observation_space":
            raise
        raise SpacesDiffer(
            f"{name}(..., observation_mode={bounds!r}) however the sub-environments observation spaces are not equivalent. "
            f"{why}. If this is intentional, use `observation_mode='different'` instead."
        ) from None
    except EnvFailed as error:
        raise as_env_raised(error) from error.__cause__
    if spaces is not None and not same_rows(spaces[1], fleet.single_observation_space):
        fleet.close()
        raise SpacesDiffer(f"observation_mode: {spaces[1]} has not the shape and dtype of {fleet.single_observation_space}")
    return fleet, mode, spaces


def _our_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `make` from Gymnasium's for `AsyncVectorEnv`, where they are used."""
    ours = dict(options)
    if ours.pop("worker", None) is not None:
        raise BadArgument("worker= is not possible here: put what it does into a wrapper of the environment")
    ours.pop("daemon", None)
    shared, context, most = (ours.pop(name, None) for name in ("shared_memory", "context", "max_concurrency"))
    if shared is not None:
        ours.setdefault("backend", "shm" if shared else "pipe")
    if context is not None:
        ours.setdefault("start_method", context)
    if most is not None and ours.get("num_workers") is None:
        if not isinstance(most, (int, np.integer)) or isinstance(most, bool) or most < 1:
            raise BadArgument(f"max_concurrency={most!r}: give a whole number from 1 up, or None")
        ours["num_workers"] = int(most)
    return ours


def make_vec(
    env: EnvLike,
    num_envs: int | None = None,
    *,
    autoreset_mode: AutoresetMode | AutoresetName = "NextStep",
    copy: bool = True,
    observation_mode: ObsMode = "same",
    **options: Unpack[VectorOptions],
) -> FleetVectorEnv:
    """A `gymnasium.vector.VectorEnv` over a fleet: a drop-in for `SyncVectorEnv` and `AsyncVectorEnv`.

    `autoreset_mode` is "NextStep", "SameStep" or "Disabled" (or Gymnasium's enum); `observation_mode` is "same", "different" or
    the observation spaces (of the batch, of one environment). All other options are `make`'s; those of `AsyncVectorEnv`
    (`shared_memory`, `context` …) are understood too.

    Example:
        >>> import envfleet as ef
        >>> envs = ef.make_vec("CartPole-v1", num_envs=3, backend="serial")
        >>> obs, infos = envs.reset(seed=42)
        >>> envs.step(envs.action_space.sample())[0].shape
        (3, 4)
        >>> envs.close()
    """
    fleet, mode, spaces = _fleet(env, num_envs, autoreset_mode, observation_mode, {**options}, "make_vec")
    return FleetVectorEnv(fleet, mode, copy, spaces)
