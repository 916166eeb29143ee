"""PPO in one file, as CleanRL writes it, over an envfleet vector environment.

Everything is here and in order: collect, estimate advantages, update. The only line that differs from a
script over `gymnasium.vector` is the one that makes the environments; `SameStep` gives the last observation of
an ended episode in the step it ended, so that truncation is bootstrapped rightly.

    python examples/cleanrl_style_ppo.py
"""

import numpy as np
import torch
from torch import nn

import envfleet as ef

NUM_ENVS, NUM_STEPS, UPDATES, EPOCHS, MINIBATCHES = 4, 64, 8, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5


def layer(size, out, gain=2**0.5):
    linear = nn.Linear(size, out)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    envs = ef.make_vec("CartPole-v1", num_envs=NUM_ENVS, autoreset_mode="SameStep", backend="serial")
    size, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    actor = nn.Sequential(layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, num_actions, 0.01))
    critic = nn.Sequential(layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
    parameters = [*actor.parameters(), *critic.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)
    obs, _ = envs.reset(seed=1)
    episode_return, finished = np.zeros(NUM_ENVS), []

    for update in range(UPDATES):
        observations = np.zeros((NUM_STEPS, NUM_ENVS, size), np.float32)  # [step, env]
        actions, log_probs, rewards, values, following, ends = np.zeros((6, NUM_STEPS, NUM_ENVS), np.float32)
        for t in range(NUM_STEPS):
            observations[t] = obs
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=actor(torch.from_numpy(obs)))
                action = policy.sample()
                values[t] = critic(torch.from_numpy(obs)).numpy()[:, 0]
            actions[t], log_probs[t] = action, policy.log_prob(action)
            obs, rewards[t], terminated, truncated, infos = envs.step(action.numpy())
            ends[t] = ended = terminated | truncated
            last = obs.copy()
            for index in np.flatnonzero(ended):
                last[index] = infos["final_obs"][index]
            with torch.no_grad():
                following[t] = critic(torch.from_numpy(last)).numpy()[:, 0] * ~terminated
            episode_return += rewards[t]
            finished += episode_return[ended].tolist()
            episode_return[ended] = 0

        advantage, running = np.zeros_like(rewards), np.zeros(NUM_ENVS, np.float32)
        for t in reversed(range(NUM_STEPS)):
            delta = rewards[t] + GAMMA * following[t] - values[t]
            advantage[t] = running = delta + GAMMA * LAMBDA * (1 - ends[t]) * running

        rows = [torch.from_numpy(x.reshape(-1, *x.shape[2:])) for x in (observations, actions, log_probs, advantage)]
        target = torch.from_numpy((advantage + values).ravel())
        for _ in range(EPOCHS):
            for index in torch.randperm(NUM_STEPS * NUM_ENVS).chunk(MINIBATCHES):
                o, a, old, adv = (x[index] for x in rows)
                policy = torch.distributions.Categorical(logits=actor(o))
                ratio = (policy.log_prob(a) - old).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                gain = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
                error = (critic(o)[:, 0] - target[index]).square().mean()
                loss = -gain + VALUE * 0.5 * error - ENTROPY * policy.entropy().mean()
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimiser.step()
        recent = np.mean(finished[-20:]) if finished else float("nan")
        print(f"update {update + 1}: return {recent:.1f} over the last {min(len(finished), 20)} episodes")
    envs.close()


if __name__ == "__main__":
    main()
