"""RLlib: two EnvRunner actors, each with half of the envs, drawing random actions themselves (no policy)."""

import sys

from serve import plain, serve


def runners(env_name, slots):
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()
        .environment(env_name)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=slots // 2, rollout_fragment_length=16)
    )
    remote = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
    actors = [remote.remote(config=config, worker_index=i + 1) for i in range(2)]

    def run(seconds):
        import time

        end, steps = time.perf_counter() + seconds, 0
        chunk = max(slots // 2 * 4, 32)
        pending = {actor.sample.remote(num_timesteps=chunk, random_actions=True): actor for actor in actors}
        while pending:
            done, _ = ray.wait(list(pending))
            actor = pending.pop(done[0])
            steps += sum(len(episode) for episode in ray.get(done[0]))
            if time.perf_counter() < end:
                pending[actor.sample.remote(num_timesteps=chunk, random_actions=True)] = actor
        return steps

    return run


if __name__ == "__main__":
    mode, env_name, slots = sys.argv[1], sys.argv[2], int(sys.argv[3])
    serve((plain if mode == "plain" else runners)(env_name, slots))
