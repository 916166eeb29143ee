# The public names: read by type checkers, and by envfleet.util.lazy_names at run time.

from envfleet.errors import CheckpointDamaged as CheckpointDamaged
from envfleet.errors import CheckpointError as CheckpointError
from envfleet.errors import DeviceMissing as DeviceMissing
from envfleet.errors import FolderBusy as FolderBusy
from envfleet.errors import RunExists as RunExists
from envfleet.errors import TrainingStopped as TrainingStopped
from envfleet.train.advantage import gae as gae
from envfleet.train.agent import Agent as Agent
from envfleet.train.agent import TeamAgent as TeamAgent
from envfleet.train.agent import load_agent as load_agent
from envfleet.train.config import PPOConfig as PPOConfig
from envfleet.train.evaluate import Evaluation as Evaluation
from envfleet.train.evaluate import TeamEvaluation as TeamEvaluation
from envfleet.train.meta_learner import AGENT_ARCHS as AGENT_ARCHS
from envfleet.train.meta_learner import Learner as Learner
from envfleet.train.trainer import PPOTrainer as PPOTrainer
from envfleet.train.trainer import TrainResult as TrainResult
from envfleet.train.trainer import UpdateResult as UpdateResult
from envfleet.train.update import PolicyLearner as PolicyLearner
