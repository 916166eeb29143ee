"""Who takes part in `bench/agents.py`: the envs, our fleets, the limit, SuperSuit, AgileRL, and a policy for connect_four."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

import envfleet as ef
from bench.contestants import Contestant, Limit, now, step_apart
from bench.peers import remote
from envfleet.util.machine import usable_cpus

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
    # No barrier: a core that is slower for a while holds up its own slots only.
    "ours shm-async": {"backend": "shm", "num_workers": CPUS, "isolate": True, "share": 0.5},
    "ours shm-share-async": {"backend": "shm", "num_workers": CPUS, "isolate": False, "share": 0.5},
}


class Ours(Contestant):
    """`step`; or, with a `share`, `send` and `recv` of at least that share of the slots."""

    def __init__(self, env: str, slots: int, share: float = 0.0, **options: Any) -> None:
        super().__init__(env, slots)
        self._at_least = max(1, int(slots * share)) if share else 0
        self.fleet = ef.make([MAKERS[env]] * slots, **options)
        self.fleet.reset(seed=0)
        self._actions = drawn_actions(env, slots)
        self._turn = 0

    def run(self, seconds: float) -> tuple[int, float]:
        if self._at_least:
            steps, took = step_apart(self.fleet, self._actions, self._at_least, seconds)
            return steps * AGENTS, took
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
        self._net = layer.Sequential(layer.Linear(84, 64), layer.Tanh(), layer.Linear(64, 64), layer.Tanh(), layer.Linear(64, 7))
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

    def __init__(self, env: str, slots: int, share: float = 0.0, **options: Any) -> None:
        super().__init__(env, slots)
        self._at_least = max(1, int(slots * share)) if share else 0
        self._policy = Policy()
        self.fleet = ef.make([GAMES[env]] * slots, **options)
        self._batch = self.fleet.reset(seed=0)

    def _actions(self, batch: ef.Batch) -> np.ndarray[Any, Any]:
        rows, who = np.arange(len(batch)), batch.active.argmax(1)
        actions = np.zeros((len(batch), AGENTS), np.int64)
        actions[rows, who] = self._policy(batch.obs["observation"][rows, who], batch.action_mask[rows, who])
        return actions

    def run(self, seconds: float) -> tuple[int, float]:
        fleet, batch, steps, start = self.fleet, self._batch, 0, now()
        while (took := now() - start) < seconds:
            if self._at_least:
                fleet.send(self._actions(batch), batch.slots)
                batch = fleet.recv(at_least=self._at_least, copy=False)
            else:
                batch = fleet.step(self._actions(batch), copy=False)
            steps += len(batch)
        if self._at_least:
            # What is still out is not counted; all slots are there again for the next slice.
            fleet.send(self._actions(batch), batch.slots)
            batch = fleet.recv(copy=False)
        self._batch = batch
        return steps, took

    def close(self) -> None:
        self.fleet.close()
