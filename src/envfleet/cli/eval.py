"""`envfleet eval`: play episodes with a trained agent and report the returns."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument, FleetError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `eval` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        help="evaluate a trained agent",
        description="Play episodes with the agent of a run folder, on one environment with its own seeds.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, or a checkpoint file")
    parser.add_argument("--episodes", type=int, default=100, help="episodes to play (default: 100)")
    parser.add_argument("--seed", type=int, help="seed of the evaluation (default: the run's)")
    parser.add_argument(
        "--checkpoint", choices=("final", "best"), default="final", help="which checkpoint (default: final)"
    )
    parser.add_argument("--sample", action="store_true", help="draw actions instead of taking the most likely ones")
    parser.add_argument(
        "--opponent",
        metavar="WHO",
        help="many agents: who plays against the policies, random or module:function (default: they play all agents)",
    )
    parser.add_argument("--video", action="store_true", help="write the first episode as mp4 into the run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate; return the exit code."""
    from envfleet.train.agent import load_agent
    from envfleet.train.evaluate import TeamEvaluation

    try:
        if args.episodes < 1:
            raise BadArgument(f"--episodes {args.episodes}: at least 1 is needed")
        agent = load_agent(args.run_folder, which=args.checkpoint)
        frames: list[Any] | None = [] if args.video else None
        opponents = _opponent(args.opponent, agent) if args.opponent else None
        evaluation = agent.evaluate(args.episodes, args.seed, not args.sample, frames, opponents)
        video = _write_video(args.run_folder, frames, agent.fps) if frames else None
    except FleetError as error:
        print(f"envfleet eval: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    if args.json:
        print(
            json.dumps({**evaluation.to_dict(), "env": agent.config.env_name, "update": agent.update, "video": video})
        )
        return 0
    spread = f"± {evaluation.std_return:.2f} (from {evaluation.min_return:.2f} to {evaluation.max_return:.2f})"
    print(f"{agent.config.env_name}, update {agent.update}, {evaluation.num_episodes} episodes")
    print(f"return {evaluation.mean_return:.2f} {spread}, length {evaluation.mean_length:.1f}")
    for name, mean in getattr(evaluation, "mean_agent_returns", {}).items():
        print(f"return/{name} {mean:.2f}")
    if isinstance(evaluation, TeamEvaluation) and args.opponent:
        print(f"against {args.opponent}: {evaluation.wins} won, {evaluation.draws} drawn, {evaluation.losses} lost")
    if video:
        print(f"video: {video}")
    return 0


def _opponent(given: str, agent: Any) -> Any:
    if not agent.agents:
        raise BadArgument(f"--opponent {given}: the run in question has one agent and no opponents")
    module, colon, name = given.partition(":")
    if not colon:
        return given
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadArgument(f"--opponent {given}: {error}") from error


def _write_video(folder: str, frames: list[Any], fps: int) -> str:
    from envfleet.train.video import write_video

    path = Path(folder)
    place = path if path.is_dir() else path.parent
    return str(write_video(place / "videos" / "eval.mp4", frames, fps))
