"""How many environment steps each curriculum takes to solve 80 % of the tasks of a family, evaluated over all of them.

python -m bench.curricula --seeds 1 2 3
python -m bench.curricula --env unlock-continuous --curricula uniform alp_gmm
"""

from __future__ import annotations

import argparse

from envfleet.tasks.task_space import TaskBox, TaskList, TaskSpace
from envfleet.train import PPOConfig, PPOTrainer


def steps_to(goal: float, num_episodes: int = 30, every: int = 8, **settings: object) -> int | None:
    """Train until the mean return over all tasks, in turn, is at least `goal`; the steps it took, None if it did not get there."""
    with PPOTrainer(PPOConfig(backend="serial", **settings)) as trainer:
        trainer.eval_tasks = every_task(trainer.tasks.curriculum.space)
        while not trainer.finished:
            trainer.train_episode_vectorized()
            due = trainer.counters.update % every == 0
            if due and trainer.evaluate(num_episodes, deterministic=False).mean_return >= goal:
                return trainer.counters.num_steps
    return None


def every_task(space: TaskSpace, count: int = 10) -> list[object]:
    """All tasks of a list; of a box with one number, so many that are evenly spread."""
    if isinstance(space, TaskList):
        return list(space.values)
    assert isinstance(space, TaskBox) and space.vector_size == 1
    low, high = float(space.low), float(space.high)
    return [low + (high - low) * (i + 0.5) / count for i in range(count)]


def main() -> None:
    """Print a row per run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="unlock")
    parser.add_argument("--curricula", nargs="+", default=["uniform", "learning_progress", "sfl"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--goal", type=float, default=0.8)
    args = parser.parse_args()
    print(f"| curriculum | seed | steps to {args.goal:.0%} |\n|---|---|---|")
    for curriculum in args.curricula:
        for seed in args.seeds:
            steps = steps_to(args.goal, env=args.env, curriculum=curriculum, seed=seed)
            print(f"| {curriculum} | {seed} | {f'{steps:,}' if steps else 'not reached'} |", flush=True)


if __name__ == "__main__":
    main()
