"""An environment of your own, many copies in worker processes, PPO of Stable-Baselines3, one W&B run, one video.

python examples/custom_env_main.py
"""

import functools
import os

import gymnasium as gym
import torch
import wandb
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

import envfleet as ef
from envfleet.envs.gridworld import GridWorldEnvMultiAgent  # put your own environment here

CONFIG = {
    "num_envs": 8,
    "num_workers": 2,
    "total_steps": 8_192,
    "env": {"size": 5, "num_agents": 2, "num_obstacles": 3},
    "ppo": {"n_steps": 64, "batch_size": 256, "n_epochs": 6, "learning_rate": 2e-3, "gamma": 0.95, "ent_coef": 0.005},
}


def make_env(index, config):
    """Environment number `index`, built in its worker. Only number 0 draws pictures and writes videos."""
    env = GridWorldEnvMultiAgent(**config["env"], render_mode="rgb_array")  # SB3 wants one mode for all; it costs nothing
    env = ef.FlattenMultiAgentWrapper(env)  # two agents as one; leave it out for a Gymnasium environment
    if index == 0:
        env = gym.wrappers.RecordVideo(
            env, "videos", lambda episode: episode % 20 == 0, name_prefix=f"env-{index}", disable_logger=True
        )
    return env


class ToWandb(BaseCallback):
    """Log the success rate of the last 100 episodes after every rollout."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        success = self.model.ep_success_buffer
        wandb.log({"success": sum(success) / max(1, len(success))}, step=self.num_timesteps)


def main(config):
    # Here and nowhere else: this function runs in one process, so there is one run, however many workers there are.
    run = wandb.init(project="envfleet-example", config=config, dir=".", mode=os.environ.get("WANDB_MODE", "offline"))
    envs = ef.adapters.sb3.SubprocVecEnv(
        [functools.partial(make_env, index, config) for index in range(config["num_envs"])], num_workers=config["num_workers"]
    )
    torch.set_num_threads(1)  # a small network is slower on two threads, and the workers want the cores
    model = PPO("MlpPolicy", envs, seed=0, device="cpu", **config["ppo"])
    model.learn(config["total_steps"], callback=ToWandb())
    print(f"{model.num_timesteps} steps, success {sum(model.ep_success_buffer)} of the last 100 episodes")
    envs.close()  # ends the workers; the last video is written here
    run.finish()


# Why the guard? A worker that is started afresh ("spawn", "forkserver") by multiprocessing imports this file to find
# make_env. Without the guard it would run main() too: a second W&B run, a second training, and so on without end.
# envfleet's workers never import your script, so with them the guard is not needed; keep it for SB3's own SubprocVecEnv,
# for tests that import this file, and for every library that starts processes.
if __name__ == "__main__":
    main(CONFIG)
