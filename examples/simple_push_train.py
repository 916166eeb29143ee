"""Two kinds of agents that want opposite things, each with a policy of its own.

In simple_push a good agent tries to reach a landmark and an adversary tries to push it away; the two see and do
different things, so they form two groups. Needs `pip install "envfleet[train,multiagent]" mpe2`.
"""

from mpe2 import simple_push_v3

from envfleet.train import PPOConfig, PPOTrainer, load_agent


def main() -> None:
    config = PPOConfig(
        env=simple_push_v3.parallel_env,  # any callable that builds a PettingZoo environment, parallel or AEC
        num_envs=8,
        num_steps=50,
        total_steps=1200,  # a few hundred thousand for agents worth watching
        policies={"good": ["agent_0"], "bad": ["adversary_0"]},
        centralised_critic=True,  # critics see the whole scene, actors only their own part of it
        normalize_reward=True,
        seed=1,
        backend="serial",
        out="runs/simple_push",
        tensorboard=False,
    )
    with PPOTrainer(config) as trainer:
        while not trainer.finished:
            result = trainer.train_episode_vectorized()
            losses = {name: result.losses[f"value_loss/{name}"] for name in config.policies}
            print(f"{result.num_steps} steps, value losses {losses}")
        trainer.save()

    agents = load_agent("runs/simple_push", env=simple_push_v3.parallel_env)
    found = agents.evaluate(num_episodes=3)
    print("together:", found.mean_agent_returns)
    against = agents.evaluate(num_episodes=3, opponents={"adversary_0": "random"})
    print("the good one against a random adversary:", against.mean_agent_returns["agent_0"])


if __name__ == "__main__":
    main()
