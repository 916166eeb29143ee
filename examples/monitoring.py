"""Monitoring: every batch of rollouts to TensorBoard and Weights & Biases.

`mode="offline"` keeps W&B on this machine; leave it out to send the run to your project.
"""

import gymnasium as gym
import wandb
from torch.utils.tensorboard import SummaryWriter

from envfleet.rollout import ParallelRolloutCollector

run = wandb.init(project="envfleet-example", mode="offline", dir=".")
board = SummaryWriter("runs/example")
clients = [gym.make("CartPole-v1") for _ in range(4)] + [gym.make("CartPole-v1", sutton_barto_reward=True)]
names = ["plain"] * 4 + ["sutton-barto"]
with ParallelRolloutCollector("thread", num_workers=5) as collector:
    step = 0
    for batch in range(5):
        seeds = [10 * batch + i for i in range(5)]
        rollouts, stats = collector.collect_with_stats(
            clients, lambda obs, done: int(obs[3] > 0), max_steps=200, env_names=names, seeds=seeds
        )
        step += stats.total_steps
        numbers = {
            "return/mean": stats.mean_return,
            "return/std": stats.std_return,
            "length/mean": stats.mean_length,
            "speed/steps_per_s": stats.steps_per_s,
            "speed/step_p99_ms": 1e3 * stats.latency_s["p99"],
            "failures": stats.num_failed,
            **{f"return/{name}": value for name, value in stats.env_breakdown.items()},
        }
        for name, value in numbers.items():
            board.add_scalar(name, value, step)
        run.log(numbers, step=step)
        print(f"{step} steps, mean return {stats.mean_return:.1f}")
board.close()
run.finish()
