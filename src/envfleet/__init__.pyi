# The public names: read by type checkers, and by envfleet.util.lazy_names at run time.

from envfleet import adapters as adapters
from envfleet import envs as envs
from envfleet import errors as errors
from envfleet import remote as remote
from envfleet import rollout as rollout
from envfleet import tasks as tasks
from envfleet import testing as testing
from envfleet import train as train
from envfleet.adapters.agents import AgentsAsBatch as AgentsAsBatch
from envfleet.adapters.agents import AsyncPettingZooVecEnv as AsyncPettingZooVecEnv
from envfleet.adapters.classic import ParallelEnv as ParallelEnv
from envfleet.adapters.classic import ParallelEnvSharedMemory as ParallelEnvSharedMemory
from envfleet.adapters.classic import VectorizedCAGE2Envs as VectorizedCAGE2Envs
from envfleet.adapters.classic import VectorizedEnvs as VectorizedEnvs
from envfleet.adapters.flatten import FlattenMultiAgentWrapper as FlattenMultiAgentWrapper
from envfleet.adapters.gymnasium import FleetVectorEnv as FleetVectorEnv
from envfleet.adapters.gymnasium import make_vec as make_vec
from envfleet.adapters.meta_envs import ParallelEnvManager as ParallelEnvManager
from envfleet.adapters.meta_envs import make_env as make_env
from envfleet.adapters.meta_envs import make_parallel_env as make_parallel_env
from envfleet.adapters.rl2_inputs import RL2Inputs as RL2Inputs
from envfleet.core.batch import Batch as Batch
from envfleet.core.construct import make as make
from envfleet.core.fleet import Fleet as Fleet
from envfleet.core.joining import join as join
from envfleet.core.plan import Plan as Plan
from envfleet.core.slot_table import KEEP as KEEP
from envfleet.envs.varibad import VariBadWrapper as VariBadWrapper
from envfleet.errors import AgentFailed as AgentFailed
from envfleet.errors import BadArgument as BadArgument
from envfleet.errors import BadMessage as BadMessage
from envfleet.errors import BadRequest as BadRequest
from envfleet.errors import CapacityReached as CapacityReached
from envfleet.errors import CheckpointDamaged as CheckpointDamaged
from envfleet.errors import CheckpointError as CheckpointError
from envfleet.errors import CheckpointMissing as CheckpointMissing
from envfleet.errors import ClientBusy as ClientBusy
from envfleet.errors import ClientFailed as ClientFailed
from envfleet.errors import ConnectFailed as ConnectFailed
from envfleet.errors import DamagedWarning as DamagedWarning
from envfleet.errors import DatasetDamaged as DatasetDamaged
from envfleet.errors import DatasetError as DatasetError
from envfleet.errors import DeviceMissing as DeviceMissing
from envfleet.errors import EnvError as EnvError
from envfleet.errors import EnvFailed as EnvFailed
from envfleet.errors import EnvTimeout as EnvTimeout
from envfleet.errors import FaultError as FaultError
from envfleet.errors import FileDamaged as FileDamaged
from envfleet.errors import FleetClosed as FleetClosed
from envfleet.errors import FleetError as FleetError
from envfleet.errors import FolderBusy as FolderBusy
from envfleet.errors import KeeperLost as KeeperLost
from envfleet.errors import LedgerWarning as LedgerWarning
from envfleet.errors import MessageTimeout as MessageTimeout
from envfleet.errors import MessageTooBig as MessageTooBig
from envfleet.errors import MissingExtra as MissingExtra
from envfleet.errors import NotPicklable as NotPicklable
from envfleet.errors import ProtocolBroken as ProtocolBroken
from envfleet.errors import RecvTimeout as RecvTimeout
from envfleet.errors import RemoteError as RemoteError
from envfleet.errors import ResetNeeded as ResetNeeded
from envfleet.errors import RolloutError as RolloutError
from envfleet.errors import RolloutFailed as RolloutFailed
from envfleet.errors import RolloutsFailed as RolloutsFailed
from envfleet.errors import RolloutTimeout as RolloutTimeout
from envfleet.errors import RunExists as RunExists
from envfleet.errors import ServerError as ServerError
from envfleet.errors import SessionInterrupted as SessionInterrupted
from envfleet.errors import SessionLost as SessionLost
from envfleet.errors import SessionRefused as SessionRefused
from envfleet.errors import SlotBusy as SlotBusy
from envfleet.errors import SpacesDiffer as SpacesDiffer
from envfleet.errors import TrainingStopped as TrainingStopped
from envfleet.errors import Unauthorized as Unauthorized
from envfleet.errors import UncheckedWarning as UncheckedWarning
from envfleet.errors import WorkerLost as WorkerLost
from envfleet.errors import WriteFailed as WriteFailed
from envfleet.faults.failure import Fault as Fault
from envfleet.multiagent.groups import AgentGroup as AgentGroup
from envfleet.remote.client import AsyncEnvClient as AsyncEnvClient
from envfleet.remote.server import serve as serve
from envfleet.remote.sync_client import HttpEnvClient as HttpEnvClient
from envfleet.remote.wrapper import OpenEnvGymnasiumWrapper as OpenEnvGymnasiumWrapper
from envfleet.rollout.collector import Collector as Collector
from envfleet.rollout.episodes.episode import Rollout as Rollout
from envfleet.rollout.episodes.episode import Rollouts as Rollouts
from envfleet.rollout.executors.executor import AsyncParallelExecutor as AsyncParallelExecutor
from envfleet.rollout.executors.executor import ParallelEnvironmentExecutor as ParallelEnvironmentExecutor
from envfleet.rollout.executors.parallel_collector import ParallelRolloutCollector as ParallelRolloutCollector
from envfleet.rollout.executors.process_executor import ProcessParallelExecutor as ProcessParallelExecutor
from envfleet.rollout.executors.shared_policies import BatchedPolicy as BatchedPolicy
from envfleet.rollout.executors.shared_policies import ThreadSafeAgent as ThreadSafeAgent
from envfleet.rollout.ledger import Ledger as Ledger
from envfleet.rollout.segments.segment import Segment as Segment
from envfleet.rollout.stats import Stats as Stats
from envfleet.slots.layout import Layout as Layout
from envfleet.slots.slab import Slab as Slab
from envfleet.train.config import PPOConfig as PPOConfig
from envfleet.train.meta_learner import AGENT_ARCHS as AGENT_ARCHS
from envfleet.train.meta_learner import Learner as Learner
from envfleet.train.trainer import PPOTrainer as PPOTrainer
from envfleet.util.seeding import episode_seed as episode_seed

__all__ = [
    "AGENT_ARCHS",
    "KEEP",
    "AgentGroup",
    "AgentsAsBatch",
    "AsyncEnvClient",
    "AsyncParallelExecutor",
    "AsyncPettingZooVecEnv",
    "Batch",
    "BatchedPolicy",
    "Collector",
    "Fault",
    "FlattenMultiAgentWrapper",
    "Fleet",
    "FleetError",
    "FleetVectorEnv",
    "HttpEnvClient",
    "Learner",
    "OpenEnvGymnasiumWrapper",
    "PPOConfig",
    "PPOTrainer",
    "ParallelEnv",
    "ParallelEnvManager",
    "ParallelEnvSharedMemory",
    "ParallelEnvironmentExecutor",
    "ParallelRolloutCollector",
    "Plan",
    "ProcessParallelExecutor",
    "RL2Inputs",
    "Rollout",
    "Rollouts",
    "Segment",
    "Stats",
    "ThreadSafeAgent",
    "VariBadWrapper",
    "VectorizedCAGE2Envs",
    "VectorizedEnvs",
    "adapters",
    "envs",
    "episode_seed",
    "errors",
    "join",
    "make",
    "make_env",
    "make_parallel_env",
    "make_vec",
    "remote",
    "rollout",
    "serve",
    "tasks",
    "testing",
    "train",
]

__version__: str
