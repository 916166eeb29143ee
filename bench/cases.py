"""The cases, the issue's targets first: which env, how many slots, who takes part."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from bench import special, waiting
from bench.busy import busy
from bench.contestants import Contestant, Limit, LimitMeeting, LimitStoring, Plain, ours
from bench.peers import remote
from bench.peers.local import PEERS

IN_PROCESS = tuple(name for name, (_, _, many) in PEERS.items() if not many)
PROCESS_PER_ENV = tuple(name for name, (_, _, many) in PEERS.items() if many)
EVERY_PEER = IN_PROCESS + PROCESS_PER_ENV
_FEW_PEERS = ("gymnasium Sync", "SB3 Dummy")
_PLAIN: dict[str, type[Contestant]] = {
    "limit": Limit, "limit meeting": LimitMeeting, "limit storing": LimitStoring, "plain": Plain,
    "bare threads": waiting.Threads, "bare coroutines": waiting.Tasks, "bare queues": waiting.Queues,
}  # fmt: skip
_STEP = ("limit", "ours serial", "ours shm", "ours shm-share")


@dataclasses.dataclass(frozen=True)
class Case:
    """Contestants that take turns on one env, or (`measure`) something that is not a rate."""

    name: str
    env: str = ""
    slots: int = 0
    contestants: tuple[str, ...] = ()
    longer: float = 1.0  # slices are that much longer than asked for, where a batch takes long
    measure: Callable[[bool], dict[str, Any]] | None = None  # quick -> values
    needs_s: float = 0.0  # about how long `measure` takes

    def seconds(self, rounds: int, seconds: float) -> float:
        """About how long the case takes."""
        starting = sum(2.5 if name in PEERS or name in remote.PEERS else 0.8 for name in self.contestants)
        slices = sum(self.slice_s(name, seconds) + 0.02 for name in self.contestants)
        return self.needs_s + starting + (rounds + 1) * slices

    def slice_s(self, name: str, seconds: float) -> float:
        """Length of a contestant's slices: half for peers that are an order of magnitude away on this env."""
        far = name in PROCESS_PER_ENV and self.env in ("CartPole-v1", "image", "bigimage")
        return seconds * self.longer * (0.5 if far else 1.0)


def builder(name: str) -> Callable[[str, int], Contestant] | str:
    """How to build a contestant, or why it cannot take part."""
    if name in _PLAIN:
        return _PLAIN[name]
    if name.startswith("policy "):
        return special.with_policy(name.removeprefix("policy "))
    if name.startswith("ours "):
        return ours(name.removeprefix("ours "))  # type: ignore[no-any-return]
    if name in remote.PEERS:
        return remote.builder(name)
    cls, package, _ = PEERS[name]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return cls


def _grid(env: str, key: str, slots: int, *more: str, longer: float = 1.0) -> Case:
    return Case(f"{key}-{slots}", env, slots, _STEP + more, longer)


def cases(peers_everywhere: bool = False) -> list[Case]:
    """All cases in the order they are run."""
    few = EVERY_PEER if peers_everywhere else _FEW_PEERS
    many = EVERY_PEER if peers_everywhere else ()
    rllib, sample_factory, agilerl = (
        tuple(name for name in remote.PEERS if name.startswith(who)) for who in ("RLlib", "Sample Factory", "AgileRL")
    )
    cartpole, ant = "CartPole-v1", "Ant-v5"
    found = [
        _grid(cartpole, "cartpole", 64, "limit meeting", "plain", "ours auto", "ours shm-async", "ours shm-double", "ours thread",
              "ours aio", *EVERY_PEER, *rllib),
        _grid(cartpole, "cartpole", 256, "limit meeting", "plain", "ours auto", *few),
        _grid(cartpole, "cartpole", 8, "limit meeting", "plain", "ours auto", *few),
        _grid(ant, "ant", 64, "limit meeting", "ours auto", "ours shm-async", "ours shm-share-async", *EVERY_PEER,
              "RLlib two runners", longer=1.5),
        _grid(ant, "ant", 256, "limit meeting", "ours shm-async", "ours shm-share-async", *many, longer=3.0),
        _grid(ant, "ant", 8, "limit meeting", "ours shm-async", "ours shm-share-async", *few),
    ]  # fmt: skip
    found += [
        Case(f"policy-{n}", cartpole, n, tuple(f"policy {who}" for who in special.POLICY_CONTESTANTS)) for n in (64, 256, 8)
    ]
    found += [
        _grid("null", "null", 64, "plain", "ours auto", *IN_PROCESS),
        _grid("image", "image", 64, "limit storing", "ours auto", *EVERY_PEER),
        _grid("bigimage", "bigimage", 64, "limit storing", *EVERY_PEER),
        Case("unevencpu-64", "unevencpu", 64, ("limit", "ours shm-async", "ours shm-share-async", "ours shm",
             "Tianshou async"), 2.5),
        Case("unevensleep-64", "unevensleep", 64, ("ours thread-async", "ours aio-async", "ours thread", "ours auto",
             "bare threads", "bare coroutines", "bare queues", "ours serial", "Tianshou async", "gymnasium Async"), 2.5),
        *(Case(f"unevencpu-{n}", "unevencpu", n, ("limit", "ours shm-async", *many), 2.5) for n in (8, 256)),
        Case("parent", measure=special.parent_cost, needs_s=25),
        Case("memory", measure=special.memory, needs_s=25),
        Case("startup", measure=special.startup, needs_s=25),
        Case("statistics", measure=special.statistics, needs_s=40),
        Case("busy", measure=busy, needs_s=270),
        Case("copy-cartpole", cartpole, 64, ("ours serial", "ours serial-copy", "ours shm", "ours shm-copy"), 0.5),
        *(Case(f"vector-{key}", env, 64, ("ours serial-copy", "ours serial-vector", "ours shm-copy", "ours shm-vector"), 0.5)
          for key, env in (("cartpole", cartpole), ("null", "null"))),
        Case("copy-image", "image", 64, ("ours serial", "ours serial-copy", "ours shm", "ours shm-copy"), 0.5),
    ]  # fmt: skip
    # No target hangs on what follows: shorter slices.
    found += [_grid("null", "null", n, "plain", *few, longer=0.5) for n in (8, 256)]
    found += [_grid(key, key, n, "limit storing", *many, longer=0.5) for key in ("image", "bigimage") for n in (8, 256)]
    found += [Case(f"unevensleep-{n}", "unevensleep", n, ("ours thread-async", "ours aio-async", *many)) for n in (8, 256)]
    found += [Case(f"cartpole-{n}", cartpole, n, _STEP, 0.5) for n in (1024, 4096)]
    found += [Case("samplefactory-64", cartpole, 64, sample_factory, 0.5), Case("twoagents-64", "two agents", 64, agilerl, 0.5)]
    return found


def quick_cases() -> list[Case]:
    """A smoke run: one case of every kind, no peer but Gymnasium's own."""
    return [
        _grid("CartPole-v1", "cartpole", 8, "plain", "ours auto", "ours shm-async", "ours shm-double",
              "gymnasium Sync"),
        Case("policy-8", "CartPole-v1", 8, tuple(f"policy {who}" for who in special.POLICY_CONTESTANTS)),
        _grid("null", "null", 8, "plain", "gymnasium Sync"),
        Case("unevensleep-8", "unevensleep", 8, ("ours thread-async", "ours aio-async")),
        Case("parent", measure=special.parent_cost),
        Case("startup", measure=special.startup),
        Case("statistics", measure=special.statistics),
        Case("busy", measure=busy),
        Case("copy-cartpole", "CartPole-v1", 64, ("ours serial", "ours serial-copy")),
    ]  # fmt: skip
