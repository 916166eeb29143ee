"""Self-play: a pool of past policies that play against the present ones, drawn per episode and rated by Elo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.multiagent.policy_map import Assignment
from envfleet.networks.network_policy import Policy
from envfleet.networks.team import PAST
from envfleet.rollout.policy_protocol import Ask
from envfleet.rollout.segments.agent_segment import AgentSegment
from envfleet.util.seeding import stream

Ints = NDArray[np.int64]
START = 1000.0  # the rating before the first game
STEP = 16.0  # the most a rating moves by one game


def rate(ours: float, theirs: float, score: float) -> tuple[float, float]:
    """Both ratings after a game in which `ours` scored 1, 1/2 or 0; Elo expects 0.76 of a lead of 200 points.

    Example:
        >>> rate(1000.0, 1000.0, 1.0)
        (1008.0, 992.0)
    """
    expected = float(1.0 / (1.0 + 10.0 ** ((theirs - ours) / 400.0)))
    move = STEP * (score - expected)
    return ours + move, theirs - move


@dataclass
class Past:
    """The policies as they were after some update."""

    number: int
    update: int
    rating: float
    states: dict[str, dict[str, Any]]  # policy → weights and statistics
    games: int = 0
    players: dict[str, Policy] = field(default_factory=dict)  # built when first used


class Pool:
    """Past policies. An episode is played against one of them with probability `past`, by the policies alone otherwise.

    Against a past policy, one side is ours: one policy's agents where there are several policies, one agent where all share
    one. Which side, and which of the pool, is drawn from the run's seed and the number of the episode. Only our
    side's transitions are learned from.
    """

    def __init__(
        self,
        assigned: Sequence[Assignment],
        num_envs: int,
        *,
        size: int,
        past: float,
        seed: int,
        freeze: Callable[[], dict[str, dict[str, Any]]],
        build: Callable[[str, dict[str, Any], np.random.Generator], Policy],
    ) -> None:
        self.size, self.past, self.seed = size, past, seed
        self._freeze, self._build = freeze, build
        self.rng = stream(seed, "past actions")
        self.entries: list[Past] = []
        self.rating = START
        self.games = 0
        self.next_number = 0
        num_agents = sum(each.count for each in assigned)
        self.playing: Ints = np.full((num_envs, num_agents), -1, np.int64)  # the past policy that plays an agent
        sides = [each.indices for each in assigned]
        self.sides = sides if len(sides) > 1 else [np.array([agent]) for agent in range(num_agents)]

    def snapshot(self, update: int) -> None:
        """Add the policies as they are; the oldest that plays in no running episode is removed for it."""
        self.entries.append(Past(self.next_number, update, self.rating, self._freeze()))
        self.next_number += 1
        playing = set(np.unique(self.playing).tolist())
        for entry in self.entries[:-1]:
            if len(self.entries) > self.size and entry.number not in playing:
                self.entries.remove(entry)

    # -- called by a TeamPolicy ------------------------------------------------------------------------------------

    def assign(self, ask: Ask) -> Ints:
        """Return the past policy that plays each agent, [k, A] (-1: none); it is drawn where an episode begins."""
        for row in np.flatnonzero(ask.step == 0).tolist():
            self.playing[ask.slots[row]] = self._draw(int(ask.episode[row]))
        return self.playing[ask.slots].copy()

    def _draw(self, episode: int) -> Ints:
        rng = stream(self.seed, "opponents", episode)
        playing = np.full(self.playing.shape[1], -1, np.int64)
        if self.entries and rng.random() < self.past:
            playing[:] = self.entries[int(rng.integers(len(self.entries)))].number
            playing[self.sides[int(rng.integers(len(self.sides)))]] = -1
        return playing

    def player(self, number: int, policy: str) -> Policy:
        """Return the past policy `number` in the place of `policy`."""
        entry = next(entry for entry in self.entries if entry.number == number)
        if policy not in entry.players:
            entry.players[policy] = self._build(policy, entry.states[policy], self.rng)
        return entry.players[policy]

    # -- ratings ---------------------------------------------------------------------------------------------------

    def record(self, segment: AgentSegment) -> None:
        """Rate the games against the pool that ended in a segment: the side with the higher mean return won."""
        for (t, b), returns in zip(segment.end_index.tolist(), segment.end_returns):
            playing = segment.extras[PAST][t, b]
            if not segment.scored[t, b] or (playing < 0).all():
                continue
            number = int(playing.max())
            entry = next((entry for entry in self.entries if entry.number == number), None)
            if entry is None:
                continue
            ours, theirs = float(returns[playing < 0].mean()), float(returns[playing >= 0].mean())
            score = 0.5 if ours == theirs else float(ours > theirs)
            self.rating, entry.rating = rate(self.rating, entry.rating, score)
            self.games += 1
            entry.games += 1

    def metrics(self) -> dict[str, float]:
        """Return what is logged."""
        best = max((entry.rating for entry in self.entries), default=START)
        return {"elo": self.rating, "elo/pool_best": best, "elo/pool_size": float(len(self.entries))}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        numbers = {name: getattr(self, name) for name in ("rating", "games", "next_number")}
        return {
            **numbers,
            "seated": self.playing.copy(),
            "rng": self.rng.bit_generator.state,
            "entries": [
                {name: getattr(entry, name) for name in ("number", "update", "rating", "games", "states")}
                | {"memory": {name: player.state.copy() for name, player in entry.players.items()}}
                for entry in self.entries
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.rating, self.games = float(state["rating"]), int(state["games"])
        self.next_number, self.playing = int(state["next_number"]), np.array(state["seated"])
        self.rng.bit_generator.state = state["rng"]
        self.entries = []
        for stored in state["entries"]:
            entry = Past(**{name: value for name, value in stored.items() if name != "memory"})
            self.entries.append(entry)
            for name, rows in stored["memory"].items():
                self.player(entry.number, name).state = np.array(rows)
