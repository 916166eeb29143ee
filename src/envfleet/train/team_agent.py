"""Trained policies of many agents, read from a run folder: they can be evaluated, alone and against opponents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envfleet.train.config import PPOConfig
from envfleet.train.team_evaluate import TeamEvaluation, TeamEvaluator


@dataclass
class TeamAgent:
    """The policies of a run, as a checkpoint holds them."""

    config: PPOConfig
    players: dict[str, dict[str, Any]]  # policy → weights and statistics
    agents: tuple[str, ...]
    update: int
    env: Any
    elo: float | None = None
    fps: int = 30

    def evaluate(
        self,
        episodes: int = 100,
        seed: int | None = None,
        deterministic: bool = True,
        frames: list[Any] | None = None,
        opponents: Any = None,
    ) -> TeamEvaluation:
        """Play episodes on one environment of their own; for `opponents` see `TeamEvaluator.run`."""
        evaluator = TeamEvaluator(self.env, self.config, seed, render=frames is not None)
        try:
            self.fps = int(evaluator.metadata.get("render_fps", 30))
            return evaluator.run(self.players, episodes, deterministic, opponents, frames)
        finally:
            evaluator.close()


def team_agent(state: dict[str, Any], config: PPOConfig, env: Any) -> TeamAgent:
    """Return the policies of a checkpoint."""
    team = state["team"]
    pool = team["pool"]
    return TeamAgent(
        config,
        dict(team["policies"]),
        tuple(team["agents"]),
        int(state["update"]),
        env,
        elo=None if pool is None else float(pool["rating"]),
    )
