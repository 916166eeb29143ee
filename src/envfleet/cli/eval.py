"""`envfleet eval`: play episodes with a trained agent and report the returns."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from envfleet.cli.options import add_shared
from envfleet.errors import BadArgument
from envfleet.util.loading import load_attribute

HELP = "evaluate a trained agent"
DESCRIPTION = "Plays episodes with the agent of a run folder, on one environment with its own seeds."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, or a checkpoint file")
    add_shared(parser, "num_episodes", default=100, help="episodes to play")
    add_shared(parser, "seed", help="seed of the evaluation (default: the run's)")
    parser.add_argument("--checkpoint", choices=("final", "best"), default="final", help="which checkpoint")
    parser.add_argument("--sample", action="store_true", help="sample actions instead of the most likely ones")
    parser.add_argument(
        "--opponent",
        metavar="WHO",
        help="many agents: who plays against the policies, random or module:function (default: they play all agents)",
    )
    parser.add_argument("--video", action="store_true", help="write the first episode as mp4 into the run folder")
    add_shared(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    from envfleet.train.agent import load_agent
    from envfleet.train.evaluate import TeamEvaluation

    agent = load_agent(args.run_folder, which=args.checkpoint)
    frames: list[Any] | None = [] if args.video else None
    opponents = _opponent(args.opponent, agent) if args.opponent else None
    evaluation = agent.evaluate(args.num_episodes, args.seed, not args.sample, frames, opponents)
    video = _write_video(Path(args.run_folder), frames, agent.fps) if frames else None
    if args.json:
        about = {"env": agent.config.env_name, "update": agent.update, "video": video}
        print(json.dumps({**evaluation.to_dict(), **about}))
        return 0
    spread = f"± {evaluation.std_return:.2f} (from {evaluation.min_return:.2f} to {evaluation.max_return:.2f})"
    print(f"{agent.config.env_name}, update {agent.update}, {evaluation.num_episodes} episodes")
    print(f"return {evaluation.mean_return:.2f} {spread}, length {evaluation.mean_length:.1f}")
    if inner := evaluation.mean_inner_returns:
        which = f"{agent.config.num_eval_tasks} held-out tasks" if agent.config.num_eval_tasks else "tasks of the family"
        print(f"{which}, return by inner episode: {'  '.join(f'{mean:.2f}' for mean in inner)}")
    for name, mean in getattr(evaluation, "mean_agent_returns", {}).items():
        print(f"return/{name} {mean:.2f}")
    if isinstance(evaluation, TeamEvaluation) and args.opponent:
        print(f"against {args.opponent}: {evaluation.wins} won, {evaluation.draws} drawn, {evaluation.losses} lost")
    if video:
        print(f"video: {video}")
    return 0


def _opponent(given: str, agent: Any) -> Any:
    if not agent.agents:
        raise BadArgument(f"--opponent {given}: this run has one agent and no opponents")
    return load_attribute(given, "--opponent") if ":" in given else given


def _write_video(folder: Path, frames: list[Any], fps: int) -> str:
    from envfleet.train.video import write_video

    place = folder if folder.is_dir() else folder.parent
    return str(write_video(place / "videos" / "eval.mp4", frames, fps))
