"""What a worker does for a `FragmentCollector`: an environment whose step collects a fragment.

So a worker that collects fragments is an ordinary worker with one slot: deadlines, losses, restarts and places on other machines are the fleet's.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from envfleet.core.construct import make
from envfleet.faults.failure import Failure, Fault
from envfleet.rollout.collector import Collector
from envfleet.rollout.segments.segment import Floats, Ints, Segment
from envfleet.util.seeding import stream


class Order(NamedTuple):
    """What the parent wants next."""

    number: int  # of the fragment, in the run
    num_steps: int
    policy: bytes | None  # None: the one the worker has
    begin: Ints | None  # [slot] episodes to begin with; None: the running ones go on


@dataclasses.dataclass(frozen=True)
class Fragment:
    """What a worker gives back: a segment of its slots, and the state they are in after it."""

    process: bytes  # another one if the worker was started again
    segment: Segment
    episode: Ints  # [slot]
    length: Ints  # [slot] of the running episode so far
    ep_return: Floats  # [slot] the same
    ledger: dict[str, Any]  # of the worker, since it was started
    tasks: dict[int, Any]  # the values behind the ids in the segment
    faults: list[Fault]
    num_quarantined: int  # slots that failed too often


class Raised(NamedTuple):
    """What a worker gives back where something raised. The core reads a bare `Failure` as one of its own."""

    failure: Failure


class AnyObject(gym.Space[Any]):
    """A space of any object: it travels beside the rows."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Any:
        """Nothing in particular."""
        return None

    def contains(self, x: Any) -> bool:
        """Whether it is an object."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyObject)


class FragmentEnv(gym.Env[Any, Any]):
    """A fleet and a collector for the slots `first`, `first` + 1, … of a run with `total` of them.

    Every step is an episode: its action is an `Order`, its last observation the `Fragment`, or what was `Raised`.
    An error must not end the worker: the parent raises it, and the worker would fail again.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # Gymnasium's own attribute
    observation_space = AnyObject()
    action_space = AnyObject()

    def __init__(self, env: Any, part: tuple[int, int, int], fleet: Mapping[str, Any], collector: Mapping[str, Any]) -> None:
        self.first, count, total = part
        self.fleet = make(env, None if isinstance(env, list) else count, **fleet)
        self.collector = Collector(self.fleet, random_actions=True, timing=False, part_of=(self.first, total), **collector)
        self._policy: Any = None
        self._num_faults = 0
        self._process = os.urandom(8)

    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """The spaces of one environment."""
        return self.fleet.single_observation_space, self.fleet.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Nothing: the environments go on from order to order."""
        return None, {}

    def step(self, action: Order) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Collect what was ordered."""
        found: Fragment | Raised
        try:
            found = self._collect(action)
        except Exception as error:
            found = Raised(Failure.of(error, "step"))
        return found, 0.0, False, True, {}

    def _collect(self, order: Order) -> Fragment:
        collector, fleet = self.collector, self.fleet
        if order.policy is not None:
            self._use(pickle.loads(order.policy), order.number)
        if order.begin is not None:
            collector.begin_at(order.begin)
        segment = collector.segment(order.num_steps)
        running = collector.running
        ids = [] if collector.tasks is None else np.unique(segment.task).tolist()
        faults = fleet.faults[self._num_faults :]
        self._num_faults += len(faults)
        return Fragment(
            self._process,
            segment,
            running.episode.copy(),
            running.step.copy(),
            running.ep_return.copy(),
            collector.ledger.state(),
            {task: fleet.task_value(task) for task in ids if task >= 0},
            [dataclasses.replace(fault, slot=self.first + fault.slot, failure=None) for fault in faults],
            len(fleet.quarantined),
        )

    def _use(self, policy: Any, number: int) -> None:
        """Act with this copy. It may take over from the one before, and must not draw what other workers draw."""
        before, self._policy = self._policy, policy
        arrive = getattr(policy, "arrive", None)
        if callable(arrive):
            arrive(stream(self.collector.seed, "fragment", self.first, number), before)
        if policy is not None:
            self.collector.policy = policy

    def close(self) -> None:
        """Close the fleet."""
        self.fleet.close()
