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
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.segments.segment import Bools, Floats, Ints, Segment
from envfleet.util.seeding import stream
from envfleet.util.trees import Tree


class Order(NamedTuple):
    """What the parent wants next."""

    number: int  # of the fragment, in the run
    num_steps: int
    policy: bytes | None  # None: the one the worker has
    begin: Ints | None  # [slot] episodes to begin with, or later ones; None: the running ones go on
    process: bytes  # the process whose last fragment the parent has,
    num_faults: int  # and how many of its faults

    def __repr__(self) -> str:  # in faults, where the bytes of a policy would hide everything else
        return f"<fragment {self.number} of {self.num_steps} steps>"


class Left(NamedTuple):
    """The slots as a fragment left them."""

    process: bytes  # another one if the worker was started again
    obs: Tree  # [slot, ...]
    running: Bools  # [slot] whether an episode goes on
    episode: Ints  # [slot]
    length: Ints  # [slot] of the running episode so far
    ep_return: Floats  # [slot] the same


@dataclasses.dataclass(frozen=True)
class Fragment:
    """What a worker gives back: a segment of its slots, and the state they are in after it."""

    left: Left
    segment: Segment
    ledger: Ledger  # of the worker, since it was started
    tasks: dict[int, Any]  # the values behind the ids in the segment
    faults: list[Fault]  # that the parent does not have; slots are the worker's
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
        self._process = os.urandom(8)

    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any], tuple[str, ...]]:
        """The spaces of one environment, and its agents."""
        return self.fleet.single_observation_space, self.fleet.single_action_space, self.fleet.agents

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Nothing: the environments go on from order to order."""
        return None, {}

    def step(self, action: Order) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Collect what was ordered."""
        found: Fragment | Raised
        try:
            found = self._collect(action)
        except KeyboardInterrupt:  # of the caller, where the worker is its own thread
            raise
        except BaseException as error:  # a policy that exits must not end the worker either
            found = Raised(Failure.of(error, "step"))
        return found, 0.0, False, True, {}

    def _collect(self, order: Order) -> Fragment:
        collector, fleet = self.collector, self.fleet
        if order.policy is not None:
            self._use(pickle.loads(order.policy), order.number)
        if order.begin is not None:
            collector.begin_at(order.begin)
        segment = collector.segment(order.num_steps)
        run = collector.running
        ids = [] if collector.tasks is None else np.unique(segment.task).tolist()
        known = order.num_faults if order.process == self._process else 0
        state = run.running.copy(), run.episode.copy(), run.step.copy(), run.ep_return.copy()
        return Fragment(
            Left(self._process, segment.bootstrap_obs, *state),
            segment,
            collector.ledger + Ledger(),
            {task: fleet.task_value(task) for task in ids if task >= 0},
            [dataclasses.replace(fault, failure=None) for fault in fleet.faults[known:]],
            len(fleet.quarantined),
        )

    def _use(self, policy: Any, number: int) -> None:
        """Act with this copy. It may take over from the one before, and must not draw what other workers draw."""
        before = self._policy if type(self._policy) is type(policy) else None  # of another kind: there is nothing to take over
        arrive = getattr(policy, "arrive", None)
        if callable(arrive):
            arrive(stream(self.collector.seed, "fragment", self.first, number), before)
        self._policy = self.collector.policy = policy

    def close(self) -> None:
        """Close the fleet."""
        self.fleet.close()
