"""Drives one fleet: every operation goes to the fleet and to the model, and what comes back is compared."""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

from envfleet.errors import BadArgument, FaultError, FleetError, RecvTimeout

from . import inside
from .alarm import INTERRUPTS, Alarm, Interrupter
from .mischief import CODES, DIES, LATER, RIGHT, STEP_TIMEOUT_S, outcome_of
from .slots import _FOREVER, Op, SlotModel, Wrong, rows_of
from .world import encode

#: No call may take longer: a deadline, the end of a stuck worker, building anew with its pauses, on a busy machine. Of the
#: slots of one worker several may each have planted a constructor that hangs (10 s), one after another.
PATIENCE_S = 60.0
#: Beyond its own `timeout_s` a recv may need so long to end a stuck worker.
MARGIN_S = 15.0


@dataclasses.dataclass
class Tally:
    """What was seen in one scenario."""

    rows: int = 0
    fault_rows: int = 0
    calls: int = 0
    faults: int = 0
    kills: int = 0
    stops: int = 0
    mischiefs: int = 0
    interrupts: int = 0
    worst_recv_s: float = 0.0
    worst_close_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


def told(ops: dict[int, Op]) -> str:
    """Actions in words."""
    return " ".join(f"{slot}:{CODES[op.code].name if op.code else op.payload}" for slot, op in ops.items())


class Pilot:
    """One fleet and the model of its slots."""

    def __init__(self, fleet: Any, rng: random.Random, shape: str, local_slots: set[int], tally: Tally) -> None:
        self.fleet, self.rng, self.shape, self.tally = fleet, rng, shape, tally
        on_end = fleet.on_end
        self.slots = [SlotModel(i, shape, on_end, i in local_slots) for i in range(fleet.num_envs)]
        self.raises = fleet._supervisor.policy.on_fault == "raise"
        self.worker_of = inside.worker_of(fleet)
        self.interrupter: Interrupter | None = None
        self.log: collections.deque[str] = collections.deque(maxlen=14)  # the last things done, for who must find out
        self._seed = rng.randrange(10**6)

    # -- calls ---------------------------------------------------------------------------------------------------

    def guard(self, what: str, function: Callable[[], Any], interrupt: bool = False, words: str = "") -> Any:
        """Call the fleet: anything but a documented error is a problem, and so is a call that takes too long."""
        started = time.monotonic()
        self.log.append(f"{what}{' (interrupt)' if interrupt else ''} {words}")
        struck = self.interrupter.count if self.interrupter is not None else 0
        try:
            if interrupt and self.interrupter is not None:
                return self.interrupter.call(function, 0.006)
            return function()
        except (*INTERRUPTS, FleetError) as error:
            self.log.append(f"  -> {type(error).__name__} {error!s:.60}")
            if isinstance(error, BadArgument) and self.interrupter is not None and self.interrupter.count > struck:
                raise Alarm from error  # taken for an object that cannot be pickled: a wrong word, but no wrong row
            raise
        except BaseException as error:
            raise Wrong(f"{what} raised {type(error).__name__}: {error!s:.300}") from error
        finally:
            spent_s = time.monotonic() - started
            if self.interrupter is not None and self.interrupter.count > struck:
                self._struck()
            if what in ("recv", "step", "reset"):
                self.tally.worst_recv_s = max(self.tally.worst_recv_s, spent_s)
            if spent_s > PATIENCE_S + MARGIN_S:
                self.tally.problems.append(f"late: {what} took {spent_s:.1f} s")

    def _struck(self) -> None:
        """An interrupt happened; where envs run in this thread it may have hit one of them, which is then a fault."""
        for model in self.slots:
            model.murky = True

    def idle(self) -> list[int]:
        """Slots that are the caller's."""
        return [model.slot for model in self.slots if model.out is None]

    def out(self) -> list[int]:
        """Slots that are out."""
        return [model.slot for model in self.slots if model.out is not None]

    def live(self, slots: list[int]) -> list[int]:
        """Those that can be stepped: begun, and their state known."""
        return [slot for slot in slots if self.slots[slot].seen or self.slots[slot].dead]

    # -- operations ----------------------------------------------------------------------------------------------

    def send(self, slots: list[int], codes: list[int], interrupt: bool = False, whole: bool = False) -> None:
        """Send actions; with `whole`, by `step` of all."""
        drawn = [(self.rng.randrange(256), self.rng.choice(codes) if codes else 0) for _ in slots]
        ops = {slot: Op("step", payload, code) for slot, (payload, code) in zip(slots, drawn)}
        self.send_ops(self._tamed(ops), interrupt, whole)

    def send_ops(self, ops: dict[int, Op], interrupt: bool = False, whole: bool = False) -> None:
        """Send what is told, slot by slot."""
        slots = list(ops)
        actions = [encode(op.payload, op.code, self.shape) for op in ops.values()]
        self.tally.mischiefs += sum(op.code > 0 for op in ops.values())
        if whole:
            self._step(actions, ops, interrupt)
            return
        try:
            self.guard("send", lambda: self.fleet.send(actions, slots), interrupt, told(ops))
        except INTERRUPTS:
            self._after_interrupted_send(ops)
        except FaultError as error:
            self._refused(error)
        else:
            self._sent(ops)

    def _tamed(self, ops: dict[int, Op]) -> dict[int, Op]:
        """One worker does not hang or die for two reasons at once: only the first may."""
        deadly: set[int] = set()
        for slot, op in ops.items():
            outcome = outcome_of(op.code, self.slots[slot].local, self.shape)
            if outcome in (DIES, LATER, "dies or right"):
                if self.worker_of[slot] in deadly:
                    ops[slot] = dataclasses.replace(op, code=0)
                deadly.add(self.worker_of[slot])
        return ops

    def _sent(self, ops: dict[int, Op]) -> None:
        for slot, op in ops.items():
            self.slots[slot].sent(op)
            model = self.slots[slot]
            outcome = outcome_of(op.code, model.local, self.shape) if op.code else RIGHT
            if outcome in (DIES, LATER, "dies or right"):
                rows = 3 if outcome == DIES else _FOREVER
                self.excuse_worker(self.worker_of[slot], rows, CODES[op.code].name)

    def excuse_worker(self, worker: int, rows: int, why: str) -> None:
        """All slots of a worker may be faults soon."""
        for model in self.slots:
            if self.worker_of[model.slot] == worker:
                model.excuse_for(rows + (model.out is not None), why)

    def _refused(self, error: FaultError) -> None:
        """on_fault="raise": a fault came up. Take what is there, then reset everything."""
        if not self.raises:
            raise Wrong(f"a FaultError although on_fault is 'restart': {error!s:.300}") from error
        self.check_error(error)
        self.recover()

    def check_error(self, error: FaultError) -> None:
        """A fault that is raised names its slot, is on record, and had a reason."""
        self.tally.faults += 1
        fault = error.fault
        model = self.slots[fault.slot]
        if not any(fault is known for known in self.fleet.faults):
            raise Wrong(f"the fault raised is not in fleet.faults: {error!s:.200}")
        if not (model.excuse or model.murky or model.dead or inside.is_lost(self.fleet, fault.slot)):
            raise Wrong(f"a fault nobody caused: {error!s:.400}")

    def _step(self, actions: list[Any], ops: dict[int, Op], interrupt: bool) -> None:
        try:
            batch = self.guard("step", lambda: self.fleet.step(actions), interrupt, told(ops))
        except INTERRUPTS:
            self._after_interrupted_send(ops, taken=True)
            return
        except FaultError as error:
            self._sent(ops)
            self._refused(error)
            return
        self._sent(ops)
        self.check(batch)

    def _after_interrupted_send(self, ops: dict[int, Op], taken: bool = False) -> None:
        """Each slot is untouched, or out, or lost; `taken`: or its row was received, and nobody saw it."""
        out = inside.out_slots(self.fleet)
        was_out = [slot for slot in ops if slot in out]
        self._sent({slot: ops[slot] for slot in was_out})
        for slot, op in ops.items():
            model = self.slots[slot]
            if slot not in was_out:
                untouched = list(model.seen)
                if taken:
                    model.sent(op)
                    model.swallowed()
                    model.seen = model.seen and [*untouched, *model.seen]
                elif model.late:
                    model.sent(op)
                    model.out = None
            model.murky = True

    def recv(self, slots: list[int] | None, at_least: int | None, timeout_s: float | None, interrupt: bool = False) -> None:
        """Receive and check."""
        limit_s = PATIENCE_S if timeout_s is None and self.rng.random() < 0.5 else timeout_s
        started = time.monotonic()
        before = self.out()
        words = f"{slots} at_least={at_least} timeout_s={limit_s}"
        try:
            batch = self.guard("recv", lambda: self.fleet.recv(slots, at_least, limit_s), interrupt, words)
        except INTERRUPTS:
            self._after_interrupted_recv(before)
            return
        except RecvTimeout as error:
            spent_s = time.monotonic() - started
            if timeout_s is None or spent_s > timeout_s + MARGIN_S:
                raise Wrong(f"hang: after {spent_s:.1f} s (deadlines {STEP_TIMEOUT_S} s): {error}") from error
            return
        except FaultError as error:
            self._refused(error)
            return
        self.check(batch)

    def _after_interrupted_recv(self, before: list[int]) -> None:
        out = inside.out_slots(self.fleet)
        for slot in before:
            if slot not in out:
                self.slots[slot].swallowed()
            self.slots[slot].murky = True

    def check(self, batch: Any) -> None:
        """Every row of a batch against the model."""
        for slot, row in rows_of(batch, self.fleet.task_value):
            kind = self.slots[slot].take(row, self.fleet.faults)
            if inside.is_lost(self.fleet, slot):
                self.slots[slot].lost_again()
            self.log.append(f"  {slot}: {kind}") if kind != "ready" else None
            self.tally.rows += kind in ("ready", "reset")
            self.tally.fault_rows += kind == "fault"

    def reset(self, slots: list[int], seeded: bool, interrupt: bool = False, by_send: bool = False, mischief: int = 0) -> None:
        """Reset slots that are the caller's, with new seeds or none."""
        seeds = [self.new_seed() for _ in slots] if seeded else None
        options = {"mischief": mischief} if mischief else None
        call = self.fleet.send_reset if by_send else self.fleet.reset
        ops = {slot: Op("reset") for slot in slots}
        try:
            batch = self.guard("reset", lambda: call(seed=seeds, slots=slots, options=options), interrupt, f"{slots} {seeds}")
        except INTERRUPTS:
            self._assigned(slots, seeds, None, sure=False)
            self._after_interrupted_send(ops, taken=not by_send)
            for slot in slots:  # the reset may have happened: only another one makes it certain
                if self.slots[slot].out is None:
                    self.slots[slot].seen = []
            return
        except FaultError as error:
            self._assigned(slots, seeds, None)
            self._sent(ops)
            self._refused(error)
            return
        self._assigned(slots, seeds, None)
        self._sent(ops)
        if mischief:
            for slot in slots:
                self.excuse_worker(self.worker_of[slot], 1, "mischief in reset")
        if batch is not None:
            self.check(batch)

    def _assigned(self, slots: list[int], seeds: Any, tasks: Any, sure: bool = True) -> None:
        for i, slot in enumerate(slots):
            self.slots[slot].assign(seeds[i] if seeds else None, tasks[i] if tasks else None, sure)

    def assign(self, interrupt: bool) -> None:
        """Tasks and seeds for some slots' next episodes, out or not."""
        slots = self.rng.sample(range(len(self.slots)), self.rng.randint(1, len(self.slots)))
        tasks = [self.rng.randrange(50) for _ in slots] if self.rng.random() < 0.7 else None
        seeds = [self.new_seed() for _ in slots] if tasks is None or self.rng.random() < 0.3 else None
        try:
            self.guard("assign", lambda: self.fleet.assign(slots, tasks, seeds), interrupt, f"{slots} {tasks} {seeds}")
        except INTERRUPTS:
            self._assigned(slots, seeds, tasks, sure=False)
            for slot in slots:
                self.slots[slot].murky = True
            return
        self._assigned(slots, seeds, tasks)

    def new_seed(self) -> int:
        """A seed never used before."""
        self._seed += 1
        return self._seed

    def ask(self, interrupt: bool, code: int = 0) -> None:
        """A call to some slots; with a code, one that misbehaves in one of them."""
        able = [slot for slot in self.live(self.idle()) if not self.slots[slot].dead]
        if not able:
            return
        slots = self.rng.sample(able, self.rng.randint(1, len(able)))
        self.tally.calls += 1
        question = self.rng.randrange(10**9)
        try:
            if code:
                self._ask_badly(slots[0], code)
            answers = self.guard("call", lambda: self.fleet.call("ask", question, slots=slots), interrupt)
        except INTERRUPTS:
            for slot in slots:
                self.slots[slot].murky = True
            return
        except FaultError as error:
            self.check_error(error)
            return
        for slot, answer in zip(slots, answers):
            digests = [seen.state.digest for seen in self.slots[slot].seen]
            unknown = self.slots[slot].murky or not digests  # interrupted: who knows whether the env has stepped
            if (answer[0], answer[2]) != (slot, question) or not (unknown or answer[1] in digests):
                raise Wrong(f"call to slot {slot} answered {answer}; asked {question}, wanted {digests}")

    def _ask_badly(self, slot: int, code: int) -> None:
        model = self.slots[slot]
        outcome = outcome_of(code, model.local, "plain")
        rows = _FOREVER if outcome in (LATER, DIES, "dies or right") else 1
        if outcome in (LATER, DIES, "dies or right"):
            self.excuse_worker(self.worker_of[slot], rows, f"call: {CODES[code].name}")
        model.excuse_for(rows, f"call: {CODES[code].name}")
        self.tally.mischiefs += 1
        try:
            self.guard("call", lambda: self.fleet.call("ask_badly", code, slots=[slot]), words=f"{slot} {CODES[code].name}")
        except FaultError as error:
            if error.fault.slot != slot:
                raise Wrong(f"the call was to slot {slot}, the fault names {error.fault.slot}") from error
            self.check_error(error)
        if outcome not in (DIES, LATER, "dies or right"):
            model.excuse, model.known_faults = 0, sum(f.slot == slot for f in self.fleet.faults)
            if inside.is_lost(self.fleet, slot):
                model.lost_again()
            model.murky = True

    def attributes(self) -> None:
        """set_attr and get_attr give back what was set."""
        able = [slot for slot in self.live(self.idle()) if not self.slots[slot].dead]
        if not able:
            return
        values = [self.rng.randrange(10**6) for _ in able]
        try:
            self.guard("set_attr", lambda: self.fleet.set_attr("tag", values, slots=able))
            got = self.guard("get_attr", lambda: self.fleet.get_attr("tag", slots=able))
        except FaultError as error:
            self.check_error(error)
            return
        if list(got) != values:
            raise Wrong(f"get_attr gave {got}, set were {values}")

    def ready(self, interrupt: bool) -> None:
        """`ready` names only slots that are out."""
        before = self.out()
        try:
            done = self.guard("ready", lambda: self.fleet.ready().tolist(), interrupt)
        except INTERRUPTS:
            self._after_interrupted_recv(before)
            return
        if not set(done) <= set(self.out()):
            raise Wrong(f"ready() names {done}, out are {self.out()}")

    def abandon(self, interrupt: bool) -> None:
        """Give some slots up, out or not: they are the caller's at once, and slots that share their workers are faults."""
        slots = sorted(self.rng.sample(range(len(self.slots)), self.rng.randint(1, len(self.slots))))
        out = [slot for slot in slots if self.slots[slot].out is not None]
        for slot in out:
            self.excuse_worker(self.worker_of[slot], 1, "abandoned")
        try:
            self.guard("abandon", lambda: self.fleet.abandon(slots), interrupt, f"{slots}")
        except INTERRUPTS:
            self.fleet.ready()  # completes what was interrupted, or finds that it had not begun
        left = inside.out_slots(self.fleet)
        for slot in out:
            if slot not in left:
                self.slots[slot].swallowed()  # complete and dropped, or given up
                self.slots[slot].seen = []
            elif not interrupt:
                raise Wrong(f"slot {slot} was abandoned and is still out")
        for slot in set(slots) - set(out):
            if slot in left:
                raise Wrong(f"slot {slot} was idle and is out after it was abandoned")

    # -- getting out of trouble ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Receive everything that is out."""
        for _ in range(4 * len(self.slots) + 4):
            if not inside.out_slots(self.fleet):
                break
            try:
                self.check(self.guard("recv", lambda: self.fleet.recv(timeout_s=PATIENCE_S)))
            except RecvTimeout as error:
                raise Wrong(f"hang: after {PATIENCE_S} s (deadlines {STEP_TIMEOUT_S} s): {error}") from error
            except FaultError as error:
                if not self.raises:
                    raise Wrong(f"a FaultError although on_fault is 'restart': {error!s:.300}") from error
                self.check_error(error)
        else:
            raise Wrong("recv of everything never ends")
        for model in self.slots:
            if model.out is not None:  # raised as a fault, or noted as one in another's error
                model.out, model.seen = None, []

    def recover(self) -> None:
        """The documented way out: receive what is out, then reset, which rebuilds what was lost."""
        self.drain()
        for _ in range(6):
            slots = [model.slot for model in self.slots if not model.dead]
            seeds = [self.new_seed() for _ in slots]
            try:
                batch = self.guard("reset", lambda s=slots, v=seeds: self.fleet.reset(v, slots=s), words=f"{slots} {seeds}")
            except FaultError as error:
                self.check_error(error)
                batch = None
            self._assigned(slots, seeds, None)
            for slot in slots:
                self.slots[slot].seen = []
                self.slots[slot].murky = True
                self.slots[slot].sent(Op("reset"))
            if batch is not None:
                self.check(batch)
                return
            self.drain()
        raise Wrong("six resets in a row failed")
