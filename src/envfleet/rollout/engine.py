"""What `episodes` and `segment` share: calling the policy, sending, receiving in the order of the mode.

The collector's time is measured here and nowhere else: every call ends one phase and begins another.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envfleet.core.batch import Batch
from envfleet.core.fleet import Fleet
from envfleet.errors import AgentFailed, BadArgument, FleetError, RecvTimeout, RolloutError, RolloutFailed
from envfleet.rollout.policy_protocol import Answer, Ask, RandomPolicy, checked_policy, read_answer
from envfleet.rollout.timing import Clock
from envfleet.util.trees import Tree, tree_map

Ints = npt.NDArray[np.int64]
Mode = Literal["sync", "async", "overlap"]

#: How long slots that are out may take, at least, when a collection is left.
DRAIN_S = 1.0


class Engine:
    """One policy driving one fleet.

    sync: all slots are sent, all are received. overlap: two halves alternate, the policy computes actions for one
    while the other steps. async: slots that are ready, at least `at_least`, get their actions at once.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Any,
        mode: Mode,
        at_least: int | None,
        seed: int,
        warmup_steps: int,
        clock: Clock,
        part_of: tuple[int, int] | None = None,  # the slots are those from the first number on, of a run with so many
    ) -> None:
        if mode not in ("sync", "async", "overlap"):
            raise BadArgument(f"mode={mode!r}: choose 'sync', 'async' or 'overlap'")
        self.fleet, self.mode, self.seed, self.clock = fleet, mode, seed, clock
        self.first_slot, self.total = (0, fleet.num_envs) if part_of is None else part_of
        self._is_part = part_of is not None
        self.at_least = -(-fleet.num_envs // 4) if at_least is None else at_least
        self.random = RandomPolicy(fleet.single_action_space)
        self._warmup = -(-warmup_steps // fleet.num_envs)  # steps each slot begins with
        self._acted = np.zeros(fleet.num_envs, dtype=np.int64)  # [slot]
        self._groups: deque[Ints] = deque()
        self.out = np.zeros(fleet.num_envs, dtype=np.bool_)  # [slot] sent, not yet received
        self._first: tuple[Any, Answer] | None = None  # a policy and its first answer: see `_check_extras`
        self._tells_reward = False
        self.use(self.random if policy is None else policy)
        self.last_reward = np.zeros(fleet.num_envs)  # [slot] where the policy is told it
        self._to_step: Tree = None  # sync: actions of all slots that `receive` will step

    def use(self, policy: Any) -> None:
        """Ask this policy from now on."""
        self.policy = checked_policy(policy)
        self._tells_reward |= bool(getattr(policy, "needs_reward", False))

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

    def ask(
        self, *, obs: Tree, slots: Ints, episode: Ints, step: Ints, task: list[Any], columns: dict[str, Any]
    ) -> tuple[Answer, Any]:
        """The policy's answer for these slots, and the version that gave it: of each row, or one for all."""
        clock = self.clock
        clock.book_s += clock.lap()
        reward = self.last_reward[slots] if self._tells_reward else None
        ask = Ask(obs, slots + self.first_slot, episode, step, task, columns, self.seed, reward)
        version: Any = getattr(self.policy, "version", 0)
        if self._warmup or not getattr(self.policy, "answers_fit", False):
            answer, version = self._ask_checked(ask, version)
        else:
            answer = self._call(ask)
        clock.policy_s += clock.lap()
        return answer, version

    def _ask_checked(self, ask: Ask, policy_version: Any) -> tuple[Answer, Ints]:
        version = np.full(len(ask), int(policy_version), dtype=np.int64)
        space = self.fleet.single_action_space
        slots = ask.slots - self.first_slot
        warming = self._acted[slots] < self._warmup
        if warming.all():
            answer = read_answer(self.random.act(ask), ask, space)
            version[:] = self.random.version
        else:
            answer = read_answer(self._call(ask), ask, space)
            self._check_extras(ask, answer)
            if warming.any():
                answer = Answer(_mix(answer.actions, self.random.act(ask), warming), answer.extras)
                version[warming] = self.random.version
        if warming.any() and self._tells_reward and hasattr(self.policy, "last_action"):
            self.policy.last_action[ask.slots] = answer.actions  # what was done, not what it would have done
        self._acted[slots] += 1
        return answer, version

    def _check_extras(self, ask: Ask, answer: Answer) -> None:
        """Extras are columns: each answer has those of the first one, with a dtype that fits into theirs."""
        if self._first is None or self._first[0] is not self.policy:
            self._first = (self.policy, answer)
        first, extras = self._first[1].extras, answer.extras
        if len(extras) != len(first) or not all(_fits(values, first.get(name)) for name, values in extras.items()):
            before = {name: values.dtype for name, values in first.items()}
            now = {name: values.dtype for name, values in extras.items()}
            message = f"the policy's extras were {before} in its first answer and are {now} now; they must stay the same"
            raise AgentFailed(message, env_name=f"slots {ask.slots[:8].tolist()}", phase="agent", step=int(ask.step[0]))

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

    def post(self, slots: Ints, actions: Tree) -> None:
        """Take the actions of a group of slots. They are sent now, or stepped by the next `receive`."""
        clock = self.clock
        clock.book_s += clock.lap()
        if self.mode == "sync" and len(slots) == self.fleet.num_envs:
            # Nothing happens between sending all and receiving all: the fleet's `step` does both, and faster.
            self._to_step = actions
        else:
            clock.steps[slots] += 1
            self.fleet.send(actions, slots)
        self.out[slots] = True
        self._groups.append(slots)
        clock.send_s += clock.lap()

    def receive(self) -> Batch:
        """The next rows, in the order the mode says."""
        if self._to_step is not None:
            actions, self._to_step = self._to_step, None
            self._groups.clear()
            batch = self.step(actions, copy=True)
            self.out[:] = False
            return batch
        clock = self.clock
        clock.book_s += clock.lap()
        try:
            if self.mode == "async":
                batch = self.fleet.recv(at_least=min(self.at_least, int(self.out.sum())))
                self._groups.clear()
            else:
                batch = self.fleet.recv(self._groups.popleft())
        finally:
            waited_s = clock.lap()
            clock.wait_s += waited_s
        self.out[batch.slots] = False
        clock.received(batch, waited_s)
        if self._tells_reward:
            self.last_reward[batch.slots] = batch.reward
        return batch

    def step(self, actions: Tree, copy: bool = False) -> Batch:
        """Send all slots and receive all of them. Without `copy` the batch is valid until the next step."""
        clock = self.clock
        clock.book_s += clock.lap()
        clock.steps += 1
        try:
            batch = self.fleet.step(actions, copy=copy)
        except BaseException:
            self.out[:] = True  # some may be: `drain` finds out
            raise
        finally:
            waited_s = clock.lap()
            clock.wait_s += waited_s
        clock.received(batch, waited_s)
        if self._tells_reward:
            self.last_reward[:] = batch.reward
        return batch

    def drain(self) -> None:
        """Receive what is still out, so that the fleet can be used again. The rows are dropped.

        A slot that takes much longer than any step so far is abandoned: it may never come back. The fleet is asked what is out: an interrupt may
        fall between a send and the line that notes it, or into a reset.
        """
        self._groups.clear()
        self._to_step = None
        self.out[:] = False
        out = np.flatnonzero(self.fleet.is_out)
        deadline = time.monotonic() + max(DRAIN_S, 3.0 * self.clock.longest_s)
        for slot in out.tolist():
            try:
                self.fleet.recv([slot], timeout_s=max(0.0, deadline - time.monotonic()))
            except RecvTimeout:
                self.fleet.abandon([slot])
            except FleetError:  # its fault, which the fleet has in `faults`
                pass

    def reason(self, slot: int) -> tuple[str, Any]:
        """What the newest fault of a slot was, in two words, and the record."""
        for fault in reversed(self.fleet.faults):
            if fault.slot == slot:
                return f"{fault.kind} in {fault.phase}", fault
        return "failed", None

    def check_slots_left(self, slot: int) -> None:
        """Raise if every slot has failed too often; `slot` is the last one that did. Of a part, the others may go on."""
        if not self._is_part and len(self.fleet.quarantined) == self.fleet.num_envs:
            fault = self.reason(slot)[1]
            message = (
                "every slot is quarantined, so nothing can be collected any more (on_fault='raise' stops at the first fault)"
            )
            raise RolloutError(f"{message}; the last one: {fault}") from fault.error()


def _mix(actions: Tree, random: Tree, warming: npt.NDArray[np.bool_]) -> Tree:
    def choose(ours: Any, theirs: Any) -> Any:
        mixed = ours.copy()
        mixed[warming] = np.asarray(theirs)[warming]
        return mixed

    return tree_map(choose, actions, random)


def _fits(values: Any, first: Any) -> bool:
    return first is not None and values.shape[1:] == first.shape[1:] and np.can_cast(values.dtype, first.dtype, "same_kind")
