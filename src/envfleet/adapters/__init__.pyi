# The public names: read by type checkers, and by envfleet.util.lazy_names at run time.

from envfleet.adapters import agents as agents
from envfleet.adapters import classic as classic
from envfleet.adapters import flatten as flatten
from envfleet.adapters import gymnasium as gymnasium
from envfleet.adapters import rllib as rllib
from envfleet.adapters import sb3 as sb3
from envfleet.adapters import tianshou as tianshou
from envfleet.adapters import torchrl as torchrl
