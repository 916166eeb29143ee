"""Settings that are known to solve known environments; `preset="auto"` picks by the environment's name."""

from __future__ import annotations

from typing import Any

from envfleet.envs.registry import has_native_version
from envfleet.errors import BadArgument
from envfleet.native.library import is_built

# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "cartpole": {"num_steps": 32, "num_epochs": 10, "num_minibatches": 2, "learning_rate": 1e-3, "clip_schedule": "linear",
                 "gamma": 0.98, "gae_lambda": 0.8},
    "cartpole-memory": {"num_steps": 64, "num_epochs": 10, "num_minibatches": 2, "learning_rate": 2e-3, "clip_schedule": "linear",
                        "gamma": 0.98, "gae_lambda": 0.9, "arch": "memory", "normalize_obs": True},
    "acrobot": {"num_steps": 128, "num_epochs": 4, "learning_rate": 1e-3, "gae_lambda": 0.94, "entropy": 0.01, "normalize_obs": True},
    "lunarlander": {"num_steps": 512, "num_epochs": 8, "num_minibatches": 32, "learning_rate": 5e-4,
                    "gamma": 0.995, "gae_lambda": 0.98, "entropy": 0.01},
    "mountaincar": {"num_steps": 16, "gae_lambda": 0.98, "normalize_obs": True, "normalize_reward": True},
    "pendulum": {"num_steps": 256, "num_epochs": 10, "num_minibatches": 8, "learning_rate": 1e-3, "gamma": 0.9},
    # What PPO papers agree on for continuous control: long rollouts, normalised inputs, no entropy bonus.
    "mujoco": {"num_steps": 256, "num_epochs": 10, "num_minibatches": 32, "learning_rate": 3e-4,
               "normalize_obs": True, "normalize_reward": True},
    "atari": {"clip": 0.1, "clip_schedule": "linear", "entropy": 0.01},
    # The cue pays ten steps later: a long lambda.
    "tmaze": {"num_steps": 66, "num_epochs": 4, "num_minibatches": 2, "learning_rate": 1.5e-3, "gamma": 0.98, "gae_lambda": 0.98,
              "entropy": 0.05, "entropy_final": 0.0},
    # Whole outer episodes of 4 x 15 steps; the exploration of the first pays in the others.
    "gridnavi": {"env_type": "meta", "episodes_per_task": 4, "num_envs": 128, "num_steps": 60, "num_epochs": 4, "num_minibatches": 4,
                 "learning_rate": 2e-3, "gamma": 0.97, "gae_lambda": 0.95, "entropy": 0.02, "total_steps": 1_000_000,
                 "previous_step": True, "normalize_reward": True},
    # Advantages as they are: where nothing succeeds there is nothing to standardise.
    "unlock": {"env_type": "meta", "success_return": 0.5, "num_envs": 16, "num_steps": 32, "learning_rate": 3e-3,
               "lr_schedule": "constant", "gamma": 1.0, "entropy": 0.01, "normalize_advantage": False, "hidden": (256,),
               "total_steps": 600_000},
    "pointrobot": {"env_type": "meta", "episodes_per_task": 3, "num_envs": 64, "num_steps": 60, "num_epochs": 4, "num_minibatches": 4,
                   "learning_rate": 2e-3, "gamma": 0.97, "total_steps": 3_000_000, "previous_step": True, "normalize_reward": True},
    "halfcheetahtasks": {"env_type": "meta", "episodes_per_task": 2, "num_envs": 16, "num_steps": 400, "num_epochs": 6,
                         "num_minibatches": 4, "learning_rate": 1e-3, "gamma": 0.98, "total_steps": 600_000, "previous_step": True,
                         "normalize_obs": True, "normalize_reward": True, "state_size": 128},
    # Small actions at first: large ones cost more than any direction pays.
    "antdir": {"env_type": "meta", "episodes_per_task": 2, "num_envs": 16, "num_steps": 400, "num_epochs": 6, "num_minibatches": 4,
               "learning_rate": 1e-3, "gamma": 0.98, "total_steps": 1_000_000, "previous_step": True, "normalize_obs": True,
               "normalize_reward": True, "state_size": 128, "log_std_init": -1.0},
    "tictactoe": {"num_steps": 64, "num_epochs": 8, "num_minibatches": 8, "learning_rate": 2e-3, "gamma": 1.0, "gae_lambda": 0.8,
                  "entropy": 0.1, "entropy_final": 0.01, "hidden": (128, 128), "activation": "relu"},
    "gridworld": {"num_steps": 128, "learning_rate": 1e-3, "entropy": 0.01, "gamma": 0.95},
    "spread": {"num_steps": 100, "num_epochs": 8, "learning_rate": 1e-3, "entropy": 0.01, "gamma": 0.95, "normalize_reward": True},
    # Whole episodes of 100 steps; rewards from 0 to -14 are scaled.
    "cage2": {"num_envs": 64, "num_steps": 100, "num_epochs": 4, "num_minibatches": 4, "learning_rate": 2e-3, "entropy": 0.01,
              "entropy_final": 0.0, "normalize_reward": True, "total_steps": 3_000_000, "backend": "native"},
    "catch": {"num_steps": 64, "learning_rate": 2.5e-3, "entropy": 0.01, "gamma": 0.95},
}
# fmt: on

#: What a name contains → its preset; the first that fits.
_BY_NAME = {
    "cartpole-novel": "cartpole-memory",
    **{name: name for name in ("cartpole", "acrobot", "lunarlander", "mountaincar", "pendulum")},
    **{name: name for name in ("tmaze", "catch", "tictactoe", "gridworld")},
    "cage2": "cage2",
    "gridnavi": "gridnavi",
    "unlock": "unlock",
    "pointrobot": "pointrobot",
    **dict.fromkeys(("antdir", "antgoal", "antforwardbackward"), "antdir"),
    **dict.fromkeys(("halfcheetahvel", "halfcheetahdir"), "halfcheetahtasks"),
    **dict.fromkeys(("simple-spread", "simple_spread"), "spread"),
    **dict.fromkeys(("noframeskip", "ale/"), "atari"),
    **dict.fromkeys(("halfcheetah", "hopper", "walker2d", "ant-", "humanoid", "swimmer", "reacher"), "mujoco"),
}


def preset_for(env: Any, preset: str = "auto") -> dict[str, Any]:
    """Return the settings of a preset, or of the one that fits the environment; {} where nothing is known.

    Example:
        >>> preset_for("CartPole-v1")["gamma"]
        0.98
        >>> preset_for("MyOwnEnv-v0")
        {}
    """
    if preset == "none":
        return {}
    if preset != "auto":
        if preset not in PRESETS:
            raise BadArgument(f"there is no preset {preset!r}: auto, none, {', '.join(sorted(PRESETS))}")
        return _on_this_machine(env, PRESETS[preset])
    name = env.lower() if isinstance(env, str) else ""
    return next((_on_this_machine(env, PRESETS[found]) for part, found in _BY_NAME.items() if part in name), {})


def _on_this_machine(env: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A preset without the backend "native" where it does not run: another environment of such a name, or nothing was built."""
    has_native = has_native_version(env) and is_built()
    return {name: value for name, value in settings.items() if name != "backend" or has_native}
