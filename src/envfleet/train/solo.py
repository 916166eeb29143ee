"""What a checkpoint holds of a run with one agent, and how it gets back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from envfleet.train.trainer import PPOTrainer


def state_of(trainer: PPOTrainer) -> dict[str, Any]:
    """Return weights, optimiser, normalisers, memory and random generators."""
    learner, policy = trainer.learner, trainer.policy
    state: dict[str, Any] = {
        "net": trainer.net.state_dict(),
        "optimiser": learner.optimiser.state(),
        "memory": {"actor": policy.state, "learner": learner.state},
        "rng": {"actions": policy.rng.bit_generator.state, "minibatches": learner.rng.bit_generator.state},
    }
    for name, part in (("observations", trainer.observations), ("rewards", trainer.rewards)):
        state[name] = part.state() if part is not None else None
    return state


def load_into(trainer: PPOTrainer, state: dict[str, Any]) -> None:
    """Take over what a checkpoint stored, and go back into the episodes that were running."""
    learner, policy = trainer.learner, trainer.policy
    trainer.net.load_state_dict(state["net"])
    learner.optimiser.load(state["optimiser"])
    for name, part in (("observations", trainer.observations), ("rewards", trainer.rewards)):
        if part is not None:
            part.load(state[name])
    policy.state = np.array(state["memory"]["actor"])
    learner.state = state["memory"]["learner"].to(trainer.device)
    policy.version = trainer.counters.update
    policy.rng.bit_generator.state = state["rng"]["actions"]
    learner.rng.bit_generator.state = state["rng"]["minibatches"]
    ended = trainer.collector.restore_segments(state["running"], trainer.config.restore)
    if len(ended) and learner.state.numel():
        learner.state[:, torch.from_numpy(ended)] = 0.0
    if trainer.rewards is not None:
        trainer.rewards.running[ended] = 0.0
