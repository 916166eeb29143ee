"""A progress bar for terminals; nothing at all elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from envfleet.rollout.episodes.episode import Rollout


def with_progress(stream: Iterator[Rollout], num_episodes: int | None, num_steps: int | None) -> Iterator[Rollout]:
    """Pass rollouts on and draw a bar with their count, steps and mean return; it disappears at the end."""
    if not sys.stderr.isatty():
        return stream
    try:
        import rich.progress  # noqa: F401
    except ImportError:  # a bar is no reason to fail
        return stream
    return _draw(stream, num_episodes, num_steps)


def _draw(stream: Iterator[Rollout], num_episodes: int | None, num_steps: int | None) -> Iterator[Rollout]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeRemainingColumn())
    by_steps = num_episodes is None
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps" if by_steps else "episodes", total=num_steps if by_steps else num_episodes)
        returns = count = 0.0
        try:
            for rollout in stream:
                count += 1
                returns += rollout.episode_return
                unit = "steps" if by_steps else "episodes"
                bar.update(
                    task, advance=len(rollout) if by_steps else 1, description=f"{unit}, mean return {returns / count:.4g}"
                )
                yield rollout
        finally:
            stream.close()  # type: ignore[attr-defined]
