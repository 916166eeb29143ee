"""What is measured: the limit, the plain loop, and our fleets in the ways they can be driven.

A contestant is built once, runs slices, and is closed. All get the same actions, drawn before the clock runs. What is
in flight when a slice ends is received after the clock has stopped and does not count.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any

import gymnasium as gym
import numpy as np

import envfleet as ef
from bench.envs import factories, sampled_actions
from envfleet.util.machine import usable_cpus

now = time.perf_counter


class Contestant:
    """`run(seconds)` gives (steps, seconds)."""

    def __init__(self, env: str, slots: int) -> None:
        self.env, self.slots = env, slots

    def run(self, seconds: float) -> tuple[int, float]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of processes and memory."""


# -- the limit --------------------------------------------------------------------------------------------------


def loop(envs: list[Any], actions: Any, seconds: float, store: Any = None, patient: bool = True) -> tuple[int, float]:
    """The plain loop over envs. With `store`, observations are copied into its rows, as any vectoriser must.

    `patient`: few cheap envs make several turns between two looks at the clock.
    """
    turns = max(1, 64 // len(envs)) if patient else 1
    rows = [list(batch) for batch in actions]  # NumPy scalars and arrays, as vectorisers hand them to envs
    steps = turn = 0
    start = now()
    end = start + seconds
    while now() < end:
        for _ in range(turns):
            batch = rows[turn % len(rows)]
            turn += 1
            for i, env in enumerate(envs):
                obs, _, terminated, truncated, _ = env.step(batch[i])
                if terminated or truncated:
                    obs, _ = env.reset()
                if store is not None:
                    store[i] = obs
            steps += len(envs)
    return steps, now() - start


class Plain(Contestant):
    """One process, one loop over `gym.make` envs."""

    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._envs = [factory() for factory in factories(env, slots)]
        self._actions = sampled_actions(env, slots)
        for i, one in enumerate(self._envs):
            one.reset(seed=i)

    def run(self, seconds: float) -> tuple[int, float]:
        return loop(self._envs, self._actions, seconds)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def meeting_loop(envs: list[Any], actions: Any, seconds: float, words: Any, me: int, processes: int) -> tuple[int, float]:
    """The plain loop, and after every turn all processes wait for the last, spinning on shared words.

    Word 0 names the turn at which all stop (process 0 says when); word 8·(i+1) counts the turns process i has made.
    """
    rows = [list(batch) for batch in actions]
    turn = first = words[8 * (me + 1)]
    others = [8 * (i + 1) for i in range(processes) if i != me]
    start = now()
    end = start + seconds
    while True:
        for env, action in zip(envs, rows[turn % len(rows)]):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        turn += 1
        if me == 0 and now() >= end:
            words[0] = turn  # before the count below, so that whoever has seen the count has seen this
        words[8 * (me + 1)] = turn
        for other in others:
            while words[other] < turn:
                pass
        if words[0] == turn:
            return (turn - first) * len(envs), now() - start


def _limit_worker(
    pipe: Any, env: str, first: int, count: int, slots: int, store: bool, meeting: tuple[Any, int, int] | None
) -> None:
    envs = [factory() for factory in factories(env, slots)[first : first + count]]
    actions = sampled_actions(env, count)
    space = envs[0].observation_space
    rows = np.zeros((count, *space.shape), space.dtype) if store else None
    for i, one in enumerate(envs):
        one.reset(seed=first + i)
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        if meeting is not None:
            pipe.send(meeting_loop(envs, actions, seconds, *meeting))
        else:
            pipe.send(loop(envs, actions, seconds, rows, patient=not env.startswith("uneven")))


class Limit(Contestant):
    """One process per core, each looping over its own share of the envs; nothing is communicated in a slice."""

    store = False
    meeting = False
    worker = staticmethod(_limit_worker)

    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        count = min(usable_cpus(), slots)
        edges = np.linspace(0, slots, count + 1).astype(int).tolist()
        context = multiprocessing.get_context("spawn")  # a fresh interpreter, as our workers have
        self._pipes, self._processes = [], []
        # Held here: what nobody holds is handed out again, to peers that use such arrays too.
        words = self._words = context.RawArray("q", 8 * (count + 1))
        for i, (first, last) in enumerate(itertools.pairwise(edges)):
            mine, theirs = context.Pipe()
            meeting = (words, i, count) if self.meeting else None
            args = (theirs, env, first, last - first, slots, self.store, meeting)
            process = context.Process(target=self.worker, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, seconds: float) -> tuple[int, float]:
        for pipe in self._pipes:
            pipe.send(seconds)
        answers = [pipe.recv() for pipe in self._pipes]
        # The sum of the rates: a process that finishes its last turn late does not make the limit lower.
        rate = sum(steps / took for steps, took in answers)
        steps = sum(steps for steps, _ in answers)
        return steps, steps / rate

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes):
            pipe.send(None)
            process.join(5)
            pipe.close()


class LimitMeeting(Limit):
    """The same, and the processes meet after every turn: what a step of all slots together cannot get around.

    Where cores differ in speed from one moment to the next, this alone costs: the slower one is waited for.
    """

    meeting = True


class LimitStoring(Limit):
    """The same, and each observation is copied into a row: what any vectoriser has to do at least."""

    store = True


# -- ours -------------------------------------------------------------------------------------------------------


class Ours(Contestant):
    """A fleet driven by `step(actions, copy=…)`."""

    copy = False

    def __init__(self, env: str, slots: int, **options: Any) -> None:
        super().__init__(env, slots)
        target = env if env[0].isupper() else factories(env, slots)
        self.fleet = ef.make(target, slots, **options)
        self.plan = str(self.fleet.plan)
        self._actions = list(sampled_actions(env, slots))
        self._turn = 0
        self.fleet.reset(seed=0)

    def run(self, seconds: float) -> tuple[int, float]:
        step, actions, copy = self.fleet.step, self._actions, self.copy
        count, turn = len(actions), self._turn
        start = now()
        end = start + seconds
        while now() < end:
            step(actions[turn % count], copy=copy)
            turn += 1
        took = now() - start
        steps, self._turn = (turn - self._turn) * self.slots, turn
        return steps, took

    def close(self) -> None:
        self.fleet.close()


class OursCopying(Ours):
    """The same with `copy=True`."""

    copy = True


class OursVector(Ours):
    """`make_vec(…).step`, Gymnasium's interface to the same fleet; it hands out copies."""

    def __init__(self, env: str, slots: int, **options: Any) -> None:
        super().__init__(env, slots, on_end="wait", **options)  # as Gymnasium's default, NextStep
        self.vector = ef.FleetVectorEnv(self.fleet, gym.vector.AutoresetMode.NEXT_STEP)

    def run(self, seconds: float) -> tuple[int, float]:
        step, actions = self.vector.step, self._actions
        count, turn = len(actions), self._turn
        start = now()
        end = start + seconds
        while now() < end:
            step(actions[turn % count])
            turn += 1
        took = now() - start
        steps, self._turn = (turn - self._turn) * self.slots, turn
        return steps, took


class OursAsync(Ours):
    """`recv(at_least=k)`, then an action for exactly the slots that came."""

    def __init__(self, env: str, slots: int, at_least: int | None = None, **options: Any) -> None:
        super().__init__(env, slots, **options)
        self._at_least = at_least or max(2, slots // 8)

    def run(self, seconds: float) -> tuple[int, float]:
        return step_apart(self.fleet, self._actions, self._at_least, seconds)


def step_apart(fleet: Any, actions: Any, at_least: int, seconds: float) -> tuple[int, float]:
    """Receive at least so many slots, send those again; rows received and the time that took. Nothing is out afterwards."""
    steps = turn = 0
    start = now()
    fleet.send(actions[0])
    while True:
        slots = fleet.recv(at_least=at_least, copy=False).slots
        took = now() - start
        steps += len(slots)
        if took >= seconds:
            break
        turn += 1
        fleet.send(actions[turn % len(actions)][slots], slots)
    if len(slots) < fleet.num_envs:
        fleet.recv()  # these are not counted
    return steps, took


class OursDoubleBuffered(Ours):
    """Two halves in turn: while one is looked at, the other steps."""

    def run(self, seconds: float) -> tuple[int, float]:
        fleet, actions = self.fleet, self._actions
        # Alternate slots, so that each half has slots of every worker.
        halves = [np.arange(0, self.slots, 2), np.arange(1, self.slots, 2)]
        first, second = [np.ascontiguousarray(np.stack(actions)[:, half]) for half in halves]
        steps = turn = 0
        start = now()
        end = start + seconds
        fleet.send(first[0], halves[0])
        fleet.send(second[0], halves[1])
        while now() < end:
            turn += 1
            for half, mine in ((halves[0], first), (halves[1], second)):
                steps += len(fleet.recv(half, copy=False).slots)
                fleet.send(mine[turn % len(mine)], half)
        took = now() - start
        fleet.recv()
        return steps, took


def ours(kind: str) -> Any:
    """The contestant of a name such as "shm-share": (env, slots) -> Contestant."""
    cpus = usable_cpus()
    isolated = {"backend": "shm", "num_workers": cpus, "isolate": True}
    shared = {"backend": "shm", "num_workers": cpus, "isolate": False}
    kinds: dict[str, tuple[type[Ours], dict[str, Any]]] = {
        "serial": (Ours, {"backend": "serial"}),
        "shm": (Ours, isolated),
        "shm-share": (Ours, shared),
        "shm-copy": (OursCopying, isolated),
        "serial-copy": (OursCopying, {"backend": "serial"}),
        "serial-vector": (OursVector, {"backend": "serial"}),
        "shm-vector": (OursVector, isolated),
        "shm-async": (OursAsync, isolated),
        "shm-share-async": (OursAsync, shared),
        "shm-double": (OursDoubleBuffered, isolated),
        "thread": (Ours, {"backend": "thread"}),
        "thread-async": (OursAsync, {"backend": "thread", "at_least": 1}),
        "aio": (Ours, {"backend": "aio"}),
        "aio-async": (OursAsync, {"backend": "aio", "at_least": 1}),
        "auto": (Ours, {"backend": "auto"}),
        "auto-async": (OursAsync, {"backend": "auto"}),
    }
    cls, options = kinds[kind]

    def build(env: str, slots: int) -> Contestant:
        env = "unevenawait" if kind.startswith("aio") and env == "unevensleep" else env
        given = dict(options)
        if kind.startswith(("thread", "aio")):
            given["num_workers"] = slots
        if kind.startswith("auto") and not env[0].isupper():
            given["isolate"] = False  # the bench's own envs are not on `auto`'s list, but we know what they do
        return cls(env, slots, **given)

    return build
