"""Many agents: agent-steps per second of our fleets, the limit of this machine, SuperSuit and AgileRL, in one run.

    python bench/agents.py                     all cases with the targets, met or missed (some 4 minutes, quiet machine)
    python bench/agents.py --only spread-64    one case
    python bench/agents.py --quick             everything once, to see that it runs; no figure of it is worth anything

Contestants take turns in short slices, and a ratio is the median over slices of the same round. An agent-step is one action of
one agent that the environment took. The limit is one process per core that loops over its own environments and tells nobody.
AgileRL runs in a venv of its own (`python -m bench.peers.install agilerl`) and is left out where that is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402
from pettingzoo import ParallelEnv  # noqa: E402

import envfleet as ef  # noqa: E402
from bench.contestants import Contestant, Limit, now  # noqa: E402
from bench.peers import remote  # noqa: E402
from bench.targets import Row  # noqa: E402
from envfleet.measure import MAX_FOREIGN, Slice, estimate, ratio, short, take_turns  # noqa: E402
from envfleet.supervise.machine import usable_cpus  # noqa: E402

warnings.filterwarnings("ignore", category=DeprecationWarning)
AGENTS = 2  # in every case


class TwoAgents(ParallelEnv):  # type: ignore[misc]
    """Two agents without work: the same result objects every time. What is measured is the vectoriser alone."""

    metadata = {"name": "two_agents"}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["a_0", "a_1"]
        self.agents = list(self.possible_agents)
        self._seen, self._acts = spaces.Box(0.0, 1.0, (4,), np.float32), spaces.Discrete(2)
        self._obs = {agent: np.ones(4, np.float32) for agent in self.agents}
        no = dict.fromkeys(self.agents, False)
        self._infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self._result = (self._obs, dict.fromkeys(self.agents, 1.0), no, dict(no), self._infos)

    def observation_space(self, agent: str) -> Any:
        return self._seen

    def action_space(self, agent: str) -> Any:
        return self._acts

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self._obs, self._infos

    def step(self, actions: Any) -> Any:
        return self._result


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=AGENTS)


MAKERS: dict[str, Callable[[], Any]] = {"twoagents": TwoAgents, "spread": spread}


def drawn_actions(env: str, slots: int, batches: int = 32) -> np.ndarray[Any, Any]:
    """Actions drawn before the clock runs: [batch, slot, agent]."""
    one = MAKERS[env]()
    return np.random.default_rng(0).integers(one.action_space(one.possible_agents[0]).n, size=(batches, slots, AGENTS))


# -- the limit -----------------------------------------------------------------------------------------------------


def limit_worker(pipe: Any, env: str, first: int, count: int, slots: int, *_unused: Any) -> None:
    envs = [MAKERS[env]() for _ in range(count)]
    for i, one in enumerate(envs):
        one.reset(seed=first + i)
    names = envs[0].possible_agents
    rows = [[dict(zip(names, acts)) for acts in batch.tolist()] for batch in drawn_actions(env, count)]
    turns = max(1, 64 // count)  # cheap envs make several turns between two looks at the clock
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        steps = turn = 0
        start = now()
        while now() - start < seconds:
            for _ in range(turns):
                for one, actions in zip(envs, rows[turn % len(rows)]):
                    one.step(actions)
                    if not one.agents:
                        one.reset()
                turn += 1
            steps += turns * count * AGENTS
        pipe.send((steps, now() - start))


class AgentLimit(Limit):
    """One process per core over its own share of the envs."""

    worker = staticmethod(limit_worker)


# -- ours and the peers --------------------------------------------------------------------------------------------

CPUS = usable_cpus()
OURS = {
    "ours serial": {"backend": "serial"},
    "ours shm": {"backend": "shm", "num_workers": CPUS, "isolate": True},
    "ours shm-share": {"backend": "shm", "num_workers": CPUS, "isolate": False},
}


class Ours(Contestant):
    def __init__(self, env: str, slots: int, **options: Any) -> None:
        super().__init__(env, slots)
        self.fleet = ef.make([MAKERS[env]] * slots, **options)
        self.fleet.reset(seed=0)
        self._actions = drawn_actions(env, slots)
        self._turn = 0

    def run(self, seconds: float) -> tuple[int, float]:
        fleet, actions, before, start = self.fleet, self._actions, self._turn, now()
        while now() - start < seconds:
            fleet.step(actions[self._turn % len(actions)], copy=False)
            self._turn += 1
        return (self._turn - before) * self.slots * AGENTS, now() - start

    def close(self) -> None:
        self.fleet.close()


class SuperSuit(Contestant):
    """`pettingzoo_env_to_vec_env_v1` and `concat_vec_envs_v1`: agents are rows of the batch."""

    def __init__(self, env: str, slots: int, num_cpus: int) -> None:
        import supersuit

        super().__init__(env, slots)
        one = supersuit.pettingzoo_env_to_vec_env_v1(MAKERS[env]())
        self._vec = supersuit.concat_vec_envs_v1(one, slots, num_cpus=num_cpus)
        self._vec.reset(seed=0)
        self._actions = drawn_actions(env, slots).reshape(-1, slots * AGENTS)

    def run(self, seconds: float) -> tuple[int, float]:
        turn, start = 0, now()
        while now() - start < seconds:
            self._vec.step(self._actions[turn % len(self._actions)])
            turn += 1
        return turn * self.slots * AGENTS, now() - start

    def close(self) -> None:
        self._vec.close()


class AgileRL(remote.Remote):
    """Its script counts env steps."""

    def run(self, seconds: float) -> tuple[int, float]:
        steps, took = super().run(seconds)
        return steps * AGENTS, took


# -- a policy in the loop ------------------------------------------------------------------------------------------


class Policy:
    """A small MLP on one thread that draws legal moves."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch, layer = torch, torch.nn
        self._net = layer.Sequential(
            layer.Linear(84, 64), layer.Tanh(), layer.Linear(64, 64), layer.Tanh(), layer.Linear(64, 7)
        )
        self._rng = np.random.default_rng(0)

    def __call__(self, boards: Any, masks: Any) -> Any:
        """Columns [n] for boards [n, 6, 7, 2] and masks [n, 7]."""
        flat = boards.reshape(len(boards), 84).astype(np.float32)
        with self._torch.inference_mode():
            logits = self._net(self._torch.from_numpy(flat)).numpy()
        noise = self._rng.gumbel(size=logits.shape)
        return np.where(masks != 0, logits + noise, -np.inf).argmax(1)


def connect_four() -> Any:
    from pettingzoo.classic.connect_four import connect_four as game

    return game.env()


def connect_four_raw() -> Any:
    """Without the wrappers that check every call and guard against illegal moves: masks are kept to anyway."""
    from pettingzoo.classic.connect_four import connect_four as game

    return game.raw_env()


GAMES: dict[str, Callable[[], Any]] = {"connect_four": connect_four, "connect_four_raw": connect_four_raw}


class PerEnv(Contestant):
    """One loop, one forward for every move of every game."""

    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._policy = Policy()
        self._turns = [self._moves(GAMES[env](), seed) for seed in range(slots)]

    def _moves(self, env: Any, seed: int) -> Iterator[None]:
        env.reset(seed=seed)
        while True:
            for _ in env.agent_iter():
                seen, _, terminated, truncated, _ = env.last()
                if terminated or truncated:
                    env.step(None)
                else:
                    env.step(int(self._policy(seen["observation"][None], seen["action_mask"][None])[0]))
                    yield
            env.reset()

    def run(self, seconds: float) -> tuple[int, float]:
        steps, start = 0, now()
        while now() - start < seconds:
            for game in self._turns:
                next(game)
            steps += self.slots
        return steps, now() - start


class Batched(Contestant):
    """A fleet: one forward for the moves of all games."""

    def __init__(self, env: str, slots: int, **options: Any) -> None:
        super().__init__(env, slots)
        self._policy = Policy()
        self.fleet = ef.make([GAMES[env]] * slots, **options)
        self._batch = self.fleet.reset(seed=0)

    def run(self, seconds: float) -> tuple[int, float]:
        fleet, rows, batch = self.fleet, np.arange(self.slots), self._batch
        actions = np.zeros((self.slots, AGENTS), np.int64)
        steps, start = 0, now()
        while now() - start < seconds:
            who = batch.active.argmax(1)
            actions[rows, who] = self._policy(batch.obs["observation"][rows, who], batch.action_mask[rows, who])
            batch = fleet.step(actions, copy=False)
            steps += self.slots
        self._batch = batch
        return steps, now() - start

    def close(self) -> None:
        self.fleet.close()


# -- the run -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    env: str
    slots: int
    contestants: tuple[str, ...]


RACE = ("limit", *OURS, "SuperSuit 0 cpus", "SuperSuit 2 cpus", "AgileRL async (2 agents)")
INFERENCE = ("per-env inference", *(f"batched, {name}" for name in OURS))
CASES = (
    Case("spread-64", "spread", 64, RACE),
    Case("spread-8", "spread", 8, RACE),
    Case("twoagents-64", "twoagents", 64, RACE),
    Case("twoagents-8", "twoagents", 8, RACE),
    Case("connect-four-64", "connect_four", 64, INFERENCE),
    Case("connect-four-raw-64", "connect_four_raw", 64, INFERENCE),
)


def build(name: str, case: Case) -> Contestant | str:
    """The contestant, or why it cannot take part."""
    env, slots = case.env, case.slots
    try:
        if name == "limit":
            return AgentLimit(env, slots)
        if name in OURS:
            return Ours(env, slots, **OURS[name])
        if name.startswith("SuperSuit"):
            return SuperSuit(env, slots, int(name.split()[1]))
        if name == "per-env inference":
            return PerEnv(env, slots)
        if name.startswith("batched, "):
            return Batched(env, slots, **OURS[name.removeprefix("batched, ")])
    except ModuleNotFoundError as missing:
        return f"{missing.name} is not installed"
    venv, script, mode = remote.PEERS[name]
    if isinstance(why := remote.builder(name), str):
        return why
    return AgileRL(remote.VENVS / venv / "bin" / "python", script, mode, env, slots)


def race(case: Case, rounds: int, seconds: float, max_foreign: float) -> dict[str, dict[int, Slice]]:
    """Slices by contestant and round."""
    open_now: dict[str, Contestant] = {}
    failed: list[str] = []
    try:
        for name in case.contestants:
            one = build(name, case)
            if isinstance(one, str):
                print(f"  {name}: left out, {one}", flush=True)
                continue
            open_now[name] = one
            one.run(min(0.2, seconds))  # warm up
        time.sleep(0.05)  # workers that spin have gone to sleep by now
        runs = {name: one.run for name, one in open_now.items()}
        slices, thrown = take_turns(
            runs, rounds, seconds, max_foreign, on_error=lambda name, error: failed.append(f"{name}: {error}")
        )
    finally:
        for one in open_now.values():
            one.close()
    foreign = estimate([one.foreign for each in slices.values() for one in each.values()]).median
    print(
        f"  {thrown} slices measured again; strangers used {foreign:.0%} of the CPUs in the rest", *failed, sep="\n  "
    )
    return {name: each for name, each in slices.items() if each}


def table(case: Case, slices: dict[str, dict[int, Slice]]) -> None:
    base = case.contestants[0]
    print(f"  {'':28s} agent-steps/s   of {base}")
    for name, each in slices.items():
        rate = estimate([one.rate for one in each.values()])
        print(f"  {name:28s} {short(rate.median):>12s}    {ratio(each, slices[base])}", flush=True)


def best(slices: dict[str, dict[int, Slice]], names: list[str]) -> str | None:
    found = [name for name in names if name in slices]
    return max(found, key=lambda name: estimate([one.rate for one in slices[name].values()]).median, default=None)


def targets(case: Case, slices: dict[str, dict[int, Slice]]) -> list[Row]:
    """What was to be reached; "ours" is the fastest of our ways, and the row says which."""
    if (ours := best(slices, [name for name in slices if "ours" in name])) is None:
        return []
    goals: list[tuple[str, float]] = []
    peers = [name for name in slices if name.startswith(("SuperSuit", "AgileRL"))]
    if case.env == "spread":
        goals = [("limit", 0.9 if case.slots == 64 else 0.75), *((peer, 1.0) for peer in peers)]
    elif case.env == "twoagents":
        goals = [(peer, 5.0) for peer in peers]
    elif case.env in GAMES:
        goals = [("per-env inference", 3.0)]
    return [
        Row(case.name, f"{ours} over {other}", goal, ratio(slices[ours], slices[other]))
        for other, goal in goals
        if other in slices
    ]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--pairs", type=int, default=11, help="rounds in which every contestant runs once")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a slice")
    parser.add_argument("--without", default="^$", metavar="REGEX", help="contestants to leave out")
    parser.add_argument("--quick", action="store_true", help="one short round on any machine")
    args = parser.parse_args(words)
    rounds, seconds, max_foreign = (1, 0.05, 1.0) if args.quick else (args.pairs, args.seconds, MAX_FOREIGN)
    rows: list[Row] = []
    for case in CASES:
        if re.search(args.only, case.name):
            print(f"{case.name}:", flush=True)
            kept = tuple(name for name in case.contestants if not re.search(args.without, name))
            case = dataclasses.replace(case, contestants=kept)
            slices = race(case, rounds, seconds, max_foreign)
            table(case, slices)
            rows += targets(case, slices)
    print("targets:")
    for row in rows:
        print(f"  {row.case:16s} {row.what:48s} at least {row.goal:<5g} {row.measured!s:22s} {row.met}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
