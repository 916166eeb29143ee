# What users get wrong. Every line marked so must be an error for mypy and for pyright, and no other line.
# Never run: test_types.py hands this file to the checkers.
import gymnasium as gym

import envfleet as ef
import envfleet.adapters.classic
import envfleet.adapters.torchrl
from envfleet.remote import AsyncEnvClient, ClientConfig, HttpEnvClient, Server, ServerConfig
from envfleet.rollout import Collector, DatasetWriter, Rollouts, Throttle, iter_rollouts
from envfleet.train import PPOConfig, PPOTrainer, gae, load_agent

# -- fleets
fleet = ef.make("CartPole-v1", num_envs=4)
ef.make("CartPole-v1", n_envs=4)  # wrong
ef.make("CartPole-v1", num_env=4)  # wrong
ef.make("CartPole-v1", num_envs="4")  # wrong
ef.make(4)  # wrong
ef.make(gym.make("CartPole-v1"))  # wrong: an environment, not a callable that builds one
ef.make([gym.make("CartPole-v1")])  # wrong
ef.make("CartPole-v1", backend="dask")  # wrong
ef.make("CartPole-v1", backend="scripted")  # wrong
ef.make("CartPole-v1", backend=3)  # wrong
ef.make("CartPole-v1", num_workers="auto")  # wrong
ef.make("CartPole-v1", start_method="thread")  # wrong
ef.make("CartPole-v1", on_end="stop")  # wrong
ef.make("CartPole-v1", on_fault="retry")  # wrong
ef.make("CartPole-v1", step_timeout=5)  # wrong
ef.make("CartPole-v1", step_timeout_s="5")  # wrong
ef.make("CartPole-v1", max_restarts=None)  # wrong
ef.make("CartPole-v1", wrappers=gym.wrappers.FlattenObservation)  # wrong: a list is needed
ef.make("CartPole-v1", columns=["won"])  # wrong
ef.make("CartPole-v1", env_kwargs="sab=True")  # wrong
ef.make("CartPole-v1", 4, "shm")  # wrong
batch = fleet.reset(seed=0)
fleet.reset(seed="0")  # wrong
fleet.reset(seeds=[1, 2])  # wrong
fleet.reset(0, options=[1])  # wrong
obs, info = fleet.reset()  # wrong
obs, reward, terminated, truncated, info = fleet.step([0, 0, 0, 0])  # wrong
obs, reward, done, info = fleet.step([0, 0, 0, 0])  # wrong
batch.rewards  # wrong
batch.observations  # wrong
batch.dones  # wrong
batch.infos  # wrong
batch["obs"]  # wrong
batch.reward = 0  # wrong
fleet.stepp([0])  # wrong
fleet.step()  # wrong
fleet.send([0], slot=[1])  # wrong
fleet.send([0], slots=1)  # wrong
fleet.recv(timeout=1.0)  # wrong
fleet.recv(at_least="2")  # wrong
fleet.assign([0], seed=[1])  # wrong
fleet.call(3)  # wrong
fleet.render("0")  # wrong
fleet.close(timeout=1)  # wrong
fleet.plan.workers  # wrong
fleet.faults[0].error.slott  # wrong
ef.Colector  # wrong
ef.errors.EnvFaild  # wrong
# -- vector environments and other views
envs = ef.make_vec("CartPole-v1", num_envs=4)
ef.make_vec("CartPole-v1", num_env=4)  # wrong
ef.make_vec("CartPole-v1", n_envs=4)  # wrong
ef.make_vec("CartPole-v1", num_envs=4.0)  # wrong
ef.make_vec("CartPole-v1", 4, autoreset_mode="next_step")  # wrong
ef.make_vec("CartPole-v1", 4, autoreset_mode=True)  # wrong
ef.make_vec("CartPole-v1", 4, backend="dask")  # wrong
ef.make_vec("CartPole-v1", 4, on_fault="retry")  # wrong
ef.make_vec("CartPole-v1", 4, copy="yes")  # wrong
ef.make_vec("CartPole-v1", 4, on_end="reset")  # wrong: autoreset_mode decides it
obs, reward, done, info = envs.step([0, 0, 0, 0])  # wrong: five values
envs.single_observation_spaces  # wrong
ef.ParallelEnv("CartPole-v1")  # wrong: a list of callables is needed
ef.ParallelEnv([lambda: gym.make("CartPole-v1")], backend="dask")  # wrong
ef.ParallelEnv([lambda: gym.make("CartPole-v1")], nworkers=2)  # wrong
ef.VectorizedEnvs("CartPole-v1", n_envs="3")  # wrong
ef.AsyncPettingZooVecEnv([lambda: None], dead_actions="drop")  # wrong
ef.AsyncPettingZooVecEnv([lambda: None], contxt="fork")  # wrong
ef.AgentsAsBatch("gridworld-parallel")  # wrong: a fleet is needed
envfleet.adapters.torchrl.FleetEnv("CartPole-v1", num_env=3)  # wrong
envfleet.adapters.classic.VectorizedEnv  # wrong
# -- rollouts
collector = Collector(fleet, random_actions=True)
Collector("CartPole-v1", random_actions=True)  # wrong: a fleet is needed
Collector(fleet, mode="parallel")  # wrong
Collector(fleet, random_action=True)  # wrong
Collector(fleet, seed="0")  # wrong
Collector(fleet, max_steps="100")  # wrong
collector.collect("10")  # wrong
collector.collect(n_episodes=10)  # wrong
collector.episodes(10, order="random")  # wrong
collector.segment()  # wrong
collector.segment(8).rewards  # wrong
collector.collect(3)[0].reward  # wrong
collector.collect(3).save("x", format="csv")  # wrong
collector.stats().mean_reward  # wrong
DatasetWriter()  # wrong
DatasetWriter("d", resum=True)  # wrong
DatasetWriter("d", run="CartPole-v1")  # wrong
DatasetWriter("d").add([1, 2])  # wrong
DatasetWriter("d").write(collector.collect(1)[0])  # wrong
iter_rollouts(3)  # wrong
Rollouts.load(3)  # wrong
Rollouts([1, 2])  # wrong
Throttle(max_rate="5")  # wrong
ef.ParallelEnvironmentExecutor(max_worker=4)  # wrong
ef.ParallelEnvironmentExecutor(num_workers="4")  # wrong
ef.ParallelEnvironmentExecutor(on_error="ignore")  # wrong
ef.AsyncParallelExecutor(rollout_timeout=3)  # wrong
ef.ProcessParallelExecutor(max_retries="3")  # wrong
ef.ParallelRolloutCollector("threads")  # wrong
ef.ParallelRolloutCollector(execution_mode="thread", on_error="ignore")  # wrong
ef.ParallelRolloutCollector().collect([], lambda obs, done: 0, max_step=10)  # wrong
ef.ParallelRolloutCollector().collect(3, lambda obs, done: 0)  # wrong
ef.ParallelRolloutCollector().collect([], lambda obs, done: 0, seed=[1])  # wrong
ef.BatchedPolicy(lambda obs: obs, max_size=3)  # wrong
ef.episode_seed("a", 0)  # wrong
# -- servers and clients
HttpEnvClient()  # wrong
HttpEnvClient(8000)  # wrong
HttpEnvClient("http://127.0.0.1:8000", timeout=3)  # wrong
HttpEnvClient("http://127.0.0.1:8000", token=3)  # wrong
HttpEnvClient("http://127.0.0.1:8000", repeats="never")  # wrong
HttpEnvClient("http://127.0.0.1:8000").step()  # wrong
HttpEnvClient("http://127.0.0.1:8000").reset().obs  # wrong
AsyncEnvClient("http://127.0.0.1:8000", message_timeout="3")  # wrong
ClientConfig(conect_timeout_s=3)  # wrong
Server("CartPole-v1", prt=8000)  # wrong
Server("CartPole-v1", port="8000")  # wrong
Server("CartPole-v1", backend="shm")  # wrong
ServerConfig(max_session=3)  # wrong
ef.serve("CartPole-v1", max_sessions="3")  # wrong
ef.serve("CartPole-v1", sessions=3)  # wrong
ef.OpenEnvGymnasiumWrapper(url="http://127.0.0.1:8000")  # wrong
ef.OpenEnvGymnasiumWrapper(3)  # wrong
# -- training
config = PPOConfig(env="CartPole-v1")
PPOConfig(lerning_rate=1e-3)  # wrong
PPOConfig(learning_rate="fast")  # wrong
PPOConfig(backend="dask")  # wrong
PPOConfig(lr_schedule="cosine")  # wrong
PPOConfig(num_envs=8.5)  # wrong
PPOConfig("CartPole-v1")  # wrong
config.lr  # wrong
config.gamma = 0.5  # wrong
PPOTrainer("CartPole-v1")  # wrong
PPOTrainer(config, task=[1])  # wrong
PPOTrainer(config).fit()  # wrong
PPOTrainer(config).train().rewards  # wrong
PPOTrainer(config).evaluate(episodes="3")  # wrong
load_agent(3)  # wrong
load_agent("run", which=3)  # wrong
gae(1, 2, 3)  # wrong
