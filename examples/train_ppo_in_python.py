"""Train, look at every update, evaluate and load again: the trainer from Python.

python examples/train_ppo_in_python.py
"""

import tempfile

import numpy as np

from envfleet.train import PPOConfig, PPOTrainer, load_agent

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    config = PPOConfig(env="CartPole-v1", num_envs=8, total_steps=8_192, backend="serial", out=folder, tensorboard=False)
    with PPOTrainer(config) as trainer:
        for _ in range(4):
            result = trainer.train_episode_vectorized()
            print(f"{result.num_steps} steps, {result.num_episodes} episodes ended, {result.steps_per_s:,.0f} steps/s")
        total = trainer.train()
        print(f"return of the last {len(total.returns)} episodes: {total.mean_return:.1f}")
    agent = load_agent(folder)
    print("mean return of 10 evaluation episodes:", agent.evaluate(10).mean_return)
    action, _ = agent.policy().choose(np.zeros((1, 4), np.float32))
    print("action in the middle:", action[0])
