"""What all views of a fleet share: stepping through `fleet.step`, the environments' interface, close."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from envfleet.adapters.peer_errors import as_env_raised
from envfleet.core.batch import Batch
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument, FleetError
from envfleet.slots.layout import gather, scalar_reader


class FleetView:
    """A fleet in the shapes of another library. A view converts actions (`_actions`) and batches (`_result`)."""

    fleet: Fleet
    num_envs: int
    closed = False
    copy: bool = True  # False: `step` returns views that are valid until the next step

    def _actions(self, actions: Any) -> Any:
        """The caller's actions in the form that a fleet accepts."""
        return actions

    def _result(self, batch: Batch) -> Any:
        """What `step` returns for a batch of all slots."""
        raise NotImplementedError

    def _peer_error(self, error: FleetError) -> FleetError:
        """An error of the fleet as the other library's users catch it."""
        return as_env_raised(error)

    @contextlib.contextmanager
    def _peer_errors(self) -> Iterator[None]:
        try:
            yield
        except FleetError as error:
            raise self._peer_error(error) from error.__cause__

    def step(self, actions: Any) -> Any:
        """Step all environments."""
        try:
            return self._result(self.fleet.step(self._actions(actions), copy=self.copy))
        except FleetError as error:
            raise self._peer_error(error) from error.__cause__

    def step_async(self, actions: Any) -> None:
        """Send the actions; `step_wait` gives the result."""
        self.fleet.send(self._actions(actions))

    def step_wait(self, timeout_s: float | None = None, *, timeout: float | None = None) -> Any:
        """Wait for the result of `step_async`. `timeout` is Gymnasium's name for `timeout_s`."""
        with self._peer_errors():
            return self._result(self._recv_step(timeout_s if timeout is None else timeout, self.copy))

    def _drop_leftovers(self) -> bool:
        """Before a reset: drop what an interrupted call has left, so that a reset always works. Whether there was something."""
        found = not self.closed and bool(self.fleet.is_out.any())
        if found:
            self.fleet.drop()
        return found

    def _recv_step(self, timeout_s: float | None, copy: bool) -> Batch:
        """The rows of a step of all slots. After an interrupt or a fault what is out may be a reset, or only some slots."""
        out = self.fleet.is_out
        missing = np.flatnonzero(~out | self.fleet.is_resetting).tolist()
        if missing and out.any() and not self.closed:
            raise FleetError(f"slots {missing} have no result of a step: they failed, or a call was interrupted; reset() first")
        return self.fleet.recv(timeout_s=timeout_s, copy=copy)

    @property
    def envs(self) -> list[Any]:
        """The environments themselves, on the backend that has them in the caller's thread ("serial")."""
        if self.fleet.plan.backend != "serial":
            raise AttributeError(f"`envs` needs backend='serial', not {self.fleet.plan.backend!r}: use get_attr, set_attr, call")
        return list(self.fleet.call("__apply__", _itself))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute."""
        with self._peer_errors():
            return self.fleet.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment (a list or tuple: one value each)."""
        with self._peer_errors():
            self.fleet.set_attr(name, values)

    def render(self) -> Any:
        """One frame per environment."""
        with self._peer_errors():
            return self.fleet.render_all()

    def close(self, **kwargs: Any) -> None:
        """End everything. Idempotent."""
        self.closed = True
        self.fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __len__(self) -> int:
        return self.num_envs


class SingleAgentView(FleetView):
    """A view of environments with one agent each: the fleet's spaces, and the last observations of ended episodes."""

    def __init__(self, fleet: Fleet) -> None:
        refuse_agents(fleet)
        self.fleet = fleet
        self.num_envs = fleet.num_envs
        self.single_observation_space = fleet.single_observation_space
        self.single_action_space = fleet.single_action_space
        self.observation_space = fleet.observation_space
        self.action_space = fleet.action_space

    def _final_obs(self, slot: int) -> Any:
        """The last observation of a slot's ended episode, as its env gave it."""
        slab = self.fleet.slab
        values = [
            slab.mail["final_obs"][i][slot] if array is None else scalar_reader(leaf)(array[slot, 0])
            for i, (array, leaf) in enumerate(zip(slab.leaf_arrays("final_obs"), slab.obs_leaves))
        ]
        return gather(self.fleet.single_observation_space, values)


def _itself(env: Any) -> Any:
    return env


def refuse_agents(fleet: Fleet) -> None:
    """A view with one agent per environment refuses a fleet of many agents, and closes it."""
    if fleet.agents:
        fleet.close()
        raise BadArgument(
            "these environments have many agents, for which this view has no place: use "
            "envfleet.AsyncPettingZooVecEnv, or envfleet.AgentsAsBatch(envfleet.make(…))"
        )
