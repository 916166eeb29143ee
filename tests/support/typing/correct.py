# What users get right: neither checker may find anything here. Never run: test_types.py hands this file to the checkers.
import functools

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

import envfleet as ef
from envfleet.adapters.torchrl import FleetEnv
from envfleet.envs.crowd import Crowd
from envfleet.remote import ClientConfig, HttpEnvClient, Server, StepResult
from envfleet.rollout import Collector, DatasetWriter, Rollout, Rollouts, Stats, iter_rollouts
from envfleet.train import PPOConfig, PPOTrainer, TrainResult, load_agent


class Own(gym.Env[np.ndarray, int]):
    def __init__(self, size: int = 3) -> None:
        self.size = size


def build() -> Own:
    return Own(4)


ef.make("CartPole-v1")
ef.make(Own, 2, backend="shm", num_workers=2, start_method="spawn", on_fault="restart")
ef.make(build, num_envs=2, backend="auto")
ef.make(lambda: Own(5), 3)
ef.make([build, lambda: Own(4)])
ef.make(functools.partial(Own, size=2), 2)
ef.make(gym.spec("CartPole-v1"), 2, env_kwargs={"sutton_barto_reward": True})
ef.make("http://127.0.0.1:8000", 4)
ef.make(["http://a:8000", "http://b:8000"], 4, env_kwargs={"token": "t"})
ef.make({"env_url": "http://127.0.0.1:8000"})
ef.make(Crowd(), 2, with_state=True)
ef.make(Own, 2, wrappers=[gym.wrappers.FlattenObservation], columns={"won": gym.spaces.Discrete(2)})
with ef.make("CartPole-v1", num_envs=4, on_end="wait", debug=True) as fleet:
    batch: ef.Batch = fleet.reset(seed=1)
    batch = fleet.reset(seed=[1, 2, None, 4], tasks=["a", "b", "c", "d"], slots=[0, 1, 2, 3], options={"low": 0})
    fleet.send(np.array([0, 1]), slots=batch.slots[:2])
    batch = fleet.recv(at_least=1, timeout_s=2.0, copy=False)
    total: float = float(batch.reward.sum()) + int(batch.length.max())
    ended: np.ndarray = batch.terminated | batch.truncated | batch.ended
    first: dict[str, object] = batch.info[0]
    fleet.assign([0, 1], tasks=[ef.KEEP, 3], seeds=[1, None])
    faults: list[ef.Fault] = fleet.faults
    print(fleet.plan.backend, fleet.observation_space, len(fleet), batch.columns["won"])

envs: VectorEnv = ef.make_vec("CartPole-v1", 4, autoreset_mode="SameStep", backend="thread", copy=False)
ef.make_vec([build, build], autoreset_mode=AutoresetMode.DISABLED)
obs, infos = envs.reset(seed=1)
obs, reward, terminated, truncated, infos = envs.step(envs.action_space.sample())
ef.ParallelEnv([build, build], "spawn", num_workers=1, max_restarts=2)
ef.VectorizedEnvs("CartPole-v1", n_envs=3)
ef.VectorizedEnvs(Own, 3, size=5)
ef.ParallelEnvSharedMemory(Own, n_envs=200, size=5, num_workers=2)
ef.AsyncPettingZooVecEnv([Crowd], dead_actions="refuse", backend="serial")
ef.AgentsAsBatch(ef.make(Crowd, 2))
FleetEnv("CartPole-v1", num_envs=3, backend="shm", device="cpu")


def policy(obs: np.ndarray) -> np.ndarray:
    return np.zeros(len(obs), int)


collector = Collector(fleet, policy, seed=3, mode="async", tasks=[1, 2])
rollouts: Rollouts = collector.collect(10)
collector.collect(num_steps=100, progress=True)
one: Rollout = rollouts[0]
stats: Stats = collector.stats()
print(one.episode_return, one.rewards, one.infos, stats.mean_return, collector.segment(8).reward.shape, collector.ledger.used)
with DatasetWriter("d", run={"seed": 1}, resume=True) as writer:
    for rollout in collector.episodes(100, order="finish", skip=writer.ids):
        writer.add(rollout)
rollouts.save("x")
rollouts.save("y", format="minari", env="CartPole-v1")
print(sum(len(each) for each in iter_rollouts("d")))
with ef.ParallelEnvironmentExecutor(4, on_error="retry", max_retries=2, max_rate=5.0) as executor:
    executor.collect_rollouts([HttpEnvClient("http://127.0.0.1:8000")], lambda obs, done: 0, max_steps=20, seeds=[1])
ef.ParallelRolloutCollector("async", num_workers=8, rollout_timeout_s=3).collect([], policy, env_names=["a"], tasks=[1])
ef.ProcessParallelExecutor(max_workers=2)

client = HttpEnvClient(["http://a:8000", "http://b:8000"], token="t", message_timeout_s=5, compression=True)
result: StepResult = client.reset(seed=1, difficulty="hard")
result = client.step({"message": "hi"}, timeout_s=3)
print(result.observation, result.reward, result.done, client.stats.steps, ClientConfig(binary=False))
with Server("echo", port=0, max_sessions=3, backend="thread", token="t").start() as server:
    print(server.url)
gym_env: gym.Env = ef.OpenEnvGymnasiumWrapper("http://127.0.0.1:8000")

config = PPOConfig(env=Own, num_envs=8, backend="shm", learning_rate=1e-3, hidden=(64, 64), env_kwargs={"size": 4})
trainer = PPOTrainer(config)
trained: TrainResult = trainer.train()
print(trained.mean_return, config.num_updates, trainer.evaluate(10).mean_return, load_agent("run", env="CartPole-v1").policy(3))
