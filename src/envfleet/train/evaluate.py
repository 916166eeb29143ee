"""Evaluation: a frozen policy on one environment of its own, episodes with seeds of their own, every one counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.network_policy import Normaliser, Policy
from envfleet.slots.factories import resolve
from envfleet.util.seeding import episode_seed, stream

MASK = "action_mask"


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found. `returns` and `lengths` have one entry per episode, in the order of their seeds.

    Example:
        >>> Evaluation.of([1.0, 3.0], [10, 20]).mean_return
        2.0
    """

    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    mean_length: float
    num_episodes: int
    returns: list[float]
    lengths: list[int]

    @classmethod
    def of(cls, returns: list[float], lengths: list[int]) -> Evaluation:
        """Summarise episodes."""
        r = np.array(returns)
        return cls(
            float(r.mean()),
            float(r.std()),
            float(r.min()),
            float(r.max()),
            float(np.mean(lengths)),
            len(returns),
            returns,
            lengths,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


class Evaluator:
    """One environment in this process, kept between evaluations. Episode i has the same seed in every evaluation."""

    def __init__(self, env: Any, env_kwargs: dict[str, Any], seed: int, columns: dict[str, Any] | None = None) -> None:
        import envfleet as ef

        self.seed = seed
        self._fleet = ef.make(resolve(env, env_kwargs), 1, backend="serial", columns=columns or None, on_end="wait")

    def run(
        self,
        net: ActorCritic,
        normaliser: Normaliser | None,
        episodes: int,
        deterministic: bool = True,
        frames: list[Any] | None = None,
    ) -> Evaluation:
        """Play `episodes` episodes; with `frames`, pictures of the first one are appended to it."""
        # Its own generator: an evaluation during training must not change what training draws.
        rng = None if deterministic else stream(self.seed, "eval-policy")
        policy = Policy(net, 1, rng, normaliser)
        returns, lengths = [], []
        fresh, running = np.array([True]), np.array([False])
        for episode in range(episodes):
            batch = self._fleet.reset(seed=[episode_seed(self.seed, "eval", 0, episode)])
            is_first, filming = fresh, frames is not None and episode == 0
            while True:
                if filming and frames is not None:
                    frames.append(self._fleet.render(0))
                mask = getattr(batch, MASK).astype(bool) if MASK in self._fleet.layout.columns else None
                action, _ = policy.choose(batch.obs, None, is_first, mask)
                is_first = running
                batch = self._fleet.step(action)
                if batch.ended[0]:
                    break
            returns.append(float(batch.ep_return[0]))
            lengths.append(int(batch.length[0]))
        return Evaluation.of(returns, lengths)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the environment."""
        return self._fleet.metadata

    def close(self) -> None:
        """Close the environment."""
        self._fleet.close()


def evaluation_report(path: str | Path, evaluation: Evaluation) -> None:
    """Write an evaluation as JSON."""
    import json

    Path(path).write_text(json.dumps(evaluation.to_dict(), indent=1))
