"""A PyTorch loop of your own (REINFORCE) over rollouts from a batched policy.

`BatchedPolicy` gathers the observations of all running episodes, so the network is called once for many environments.
"""

import gymnasium as gym
import numpy as np
import torch

from envfleet.rollout import BatchedPolicy, ParallelEnvironmentExecutor

torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
clients = [gym.make("CartPole-v1") for _ in range(16)]


@torch.no_grad()
def policy(obs):
    return torch.distributions.Categorical(logits=net(torch.as_tensor(obs))).sample()


means = []
with ParallelEnvironmentExecutor(num_workers=16) as executor:
    for update in range(12):
        batched = BatchedPolicy(policy, max_batch=16)
        seeds = [16 * update + i for i in range(16)]
        rollouts = executor.collect_rollouts(clients, batched, max_steps=200, seeds=seeds)
        data = rollouts.to_tensors()  # [B, T(+1), ...], padded; `mask` is False there
        to_go = data["rewards"].flip(1).cumsum(1).flip(1) * data["mask"]
        advantage = (to_go - to_go[data["mask"]].mean()) / to_go[data["mask"]].std()
        chosen = torch.distributions.Categorical(logits=net(data["observations"][:, :-1]))
        loss = -(chosen.log_prob(data["actions"]) * advantage * data["mask"]).sum() / data["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append(float(np.mean([rollout.episode_return for rollout in rollouts])))
        print(f"update {update:2}: mean return {means[-1]:6.1f}, {batched.mean_batch:4.1f} observations a network call")
assert np.mean(means[-3:]) > np.mean(means[:3])
