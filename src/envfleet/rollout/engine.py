"""What `episodes` and `segment` share: asking the policy, sending, receiving in the order the mode says."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envfleet.core.batch import Batch
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument, FleetError
from envfleet.rollout.policy_protocol import Answer, Ask, RandomPolicy, read_answer
from envfleet.rollout.rollout_errors import AgentFailed, RolloutFailed
from envfleet.rollout.timing import Clock
from envfleet.util.trees import Tree, tree_map

Ints = npt.NDArray[np.int64]
Mode = Literal["sync", "async", "overlap"]


class Engine:
    """One policy driving one fleet.

    sync: all slots are sent, all are received. overlap: two halves take turns, the policy thinks about one
    while the other steps. async: whatever is ready, at least `at_least` slots, is answered at once.
    """

    def __init__(
        self, fleet: Fleet, policy: Any, mode: Mode, at_least: int | None, seed: int, warmup_steps: int, clock: Clock
    ) -> None:
        if mode not in ("sync", "async", "overlap"):
            raise BadArgument(f"mode={mode!r}: choose 'sync', 'async' or 'overlap'")
        self.fleet, self.policy, self.mode, self.seed, self.clock = fleet, policy, mode, seed, clock
        self.at_least = max(1, fleet.num_envs // 4) if at_least is None else at_least
        self.random = RandomPolicy(fleet.single_action_space)
        self._warmup = -(-warmup_steps // fleet.num_envs)  # steps each slot begins with
        self._acted = np.zeros(fleet.num_envs, dtype=np.int64)  # [slot]
        self._groups: deque[Ints] = deque()
        self.out = np.zeros(fleet.num_envs, dtype=np.bool_)  # [slot] sent, not yet received
        self._to_step: Tree = None  # sync: actions of all slots, to be stepped when they are received

    def halves(self, slots: Ints) -> list[Ints]:
        """Which slots are sent together at the beginning."""
        if self.mode != "overlap" or len(slots) < 2:
            return [slots]
        middle = (len(slots) + 1) // 2
        return [slots[:middle], slots[middle:]]

    @property
    def waiting(self) -> bool:
        """Whether anything is out."""
        return bool(self.out.any())

    def ask(self, ask: Ask) -> tuple[Answer, npt.NDArray[np.int64]]:
        """The policy's checked answer, and the version that gave each row."""
        begin = time.perf_counter()
        version = np.full(len(ask), int(getattr(self.policy, "version", 0)), dtype=np.int64)
        space = self.fleet.single_action_space
        warming = self._acted[ask.slots] < self._warmup
        if warming.all():
            answer = read_answer(self.random.act(ask), ask, space)
            version[:] = self.random.version
        else:
            answer = read_answer(self._call(ask), ask, space)
            if warming.any():
                answer = Answer(_mix(answer.actions, self.random.act(ask), warming), answer.extras)
                version[warming] = self.random.version
        self._acted[ask.slots] += 1
        self.clock.policy_s += time.perf_counter() - begin
        return answer, version

    def _call(self, ask: Ask) -> Any:
        act = getattr(self.policy, "act", None)
        try:
            return act(ask) if callable(act) else self.policy(ask.obs)
        except RolloutFailed:
            raise
        except Exception as error:
            where = f"slots {ask.slots[:8].tolist()}{'…' if len(ask) > 8 else ''}"
            message = f"the policy raised {type(error).__name__}: {error}"
            raise AgentFailed(message, env_name=where, phase="agent", step=int(ask.step[0])) from error

    def send(self, slots: Ints, actions: Tree) -> None:
        """Send; remembered as one group."""
        clock = self.clock
        begin = time.perf_counter()
        clock.steps[slots] += 1
        if self.mode == "sync" and len(slots) == self.fleet.num_envs:
            # Nothing happens between sending all and receiving all: the fleet's `step` does both the short way.
            self._to_step = actions
        else:
            self.fleet.send(actions, slots)
        self.out[slots] = True
        self._groups.append(slots)
        clock.send_s += time.perf_counter() - begin

    def receive(self) -> Batch:
        """The next rows, in the order the mode says."""
        clock = self.clock
        begin = time.perf_counter()
        try:
            if self._to_step is not None:
                actions, self._to_step = self._to_step, None
                self._groups.clear()
                batch = self.fleet.step(actions)
            elif self.mode == "async":
                batch = self.fleet.recv(at_least=min(self.at_least, int(self.out.sum())))
                self._groups.clear()
            else:
                batch = self.fleet.recv(self._groups.popleft())
        finally:
            waited_s = time.perf_counter() - begin
            clock.wait_s += waited_s
        clock.received(batch, waited_s)
        self.out[batch.slots] = False
        return batch

    def step(self, actions: Tree) -> Batch:
        """Send all slots and receive all of them, as views; for a caller that handles them together."""
        clock = self.clock
        begin = time.perf_counter()
        clock.steps += 1
        try:
            batch = self.fleet.step(actions, copy=False)
        finally:
            waited_s = time.perf_counter() - begin
            clock.wait_s += waited_s
        clock.received(batch, waited_s)
        return batch

    def drain(self) -> None:
        """Take back what is still out, so that the fleet can be used again; what it brings belongs to nobody."""
        self._groups.clear()
        if self._to_step is not None:  # never sent
            self._to_step = None
            self.out[:] = False
        out = np.flatnonzero(self.out)
        self.out[:] = False
        for slot in out.tolist():
            try:
                self.fleet.recv([slot])
            except FleetError:  # its fault was somebody's who has left; the fleet has it in `faults`
                pass

    def reason(self, slot: int) -> tuple[str, Any]:
        """What the newest fault of a slot was, in two words, and the record."""
        for fault in reversed(self.fleet.faults):
            if fault.slot == slot:
                return f"{fault.kind} in {fault.phase}", fault
        return "failed", None


def _mix(actions: Tree, random: Tree, warming: npt.NDArray[np.bool_]) -> Tree:
    def choose(ours: Any, theirs: Any) -> Any:
        mixed = ours.copy()
        mixed[warming] = np.asarray(theirs)[warming]
        return mixed

    return tree_map(choose, actions, random)
