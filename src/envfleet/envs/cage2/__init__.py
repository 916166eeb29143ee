"""CAGE Challenge 2: a network to defend, in plain Python and in C++."""

from envfleet.envs.cage2.env import Cage2Env as Cage2Env
from envfleet.envs.cage2.native_cage2 import NativeCage2Env as NativeCage2Env
from envfleet.envs.cage2.red_agents import B_lineAgent as B_lineAgent
from envfleet.envs.cage2.red_agents import RedMeanderAgent as RedMeanderAgent
from envfleet.envs.cage2.red_agents import SleepAgent as SleepAgent
from envfleet.envs.cage2.scenario import ACTION_MEANINGS as ACTION_MEANINGS
from envfleet.envs.cage2.scenario import HOST_NAMES as HOST_NAMES
from envfleet.envs.cage2.true_state import STATE as STATE
from envfleet.envs.cage2.true_state import TRUE_STATE as TRUE_STATE
from envfleet.envs.cage2.true_state import true_states as true_states
