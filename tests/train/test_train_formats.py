"""Checkpoints that earlier versions wrote. The files here were written by the code before format 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from envfleet.train import Agent, CheckpointError, PPOConfig, PPOTrainer, TeamAgent, TeamEvaluation, load_agent
from envfleet.train.checkpoint import read, write

HERE = Path(__file__).parent
SETTINGS = {
    "num_envs": 2, "num_steps": 8, "total_steps": 64, "seed": 3, "preset": "none", "backend": "serial",
    "tensorboard": False, "report": False, "hidden": (4,), "state_size": 4, "normalize_obs": True,
    "normalize_reward": True,
}  # fmt: skip
RUNS = {"one_agent": {"env": "CartPole-v1", "arch": "memory"}, "many_agents": {"env": "gridworld-aec", "arch": "markov"}}


def stored(name: str) -> tuple[Path, dict]:
    """A file of format 1, and the policy in it as that version wrote it."""
    path = HERE / f"format_1_{name}.pt"
    content = torch.load(path, weights_only=True)
    assert content["format"] == 1
    state = content["state"]
    return path, state["team"]["policies"]["shared"] if "team" in state else state


@pytest.mark.parametrize("name", RUNS)
def test_an_agent_of_format_1_is_loaded(name):
    if name == "many_agents":
        pytest.importorskip("pettingzoo")
    path, wanted = stored(name)
    agent = load_agent(path)
    assert agent.update == 2 and type(agent) is (Agent if name == "one_agent" else TeamAgent)
    net = agent.policies["shared"].net.state_dict()
    assert list(net) == list(wanted["net"]) and all(torch.equal(net[key], wanted["net"][key]) for key in net)
    found = agent.evaluate(2)
    assert found.num_episodes == 2 and isinstance(found, TeamEvaluation) == bool(agent.agents)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_format_1_is_resumed(name, tmp_path):
    if name == "many_agents":
        pytest.importorskip("pettingzoo")
    path, wanted = stored(name)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(path, tmp_path / "checkpoints" / "update_000000002.pt")
    with PPOTrainer(PPOConfig(**{**SETTINGS, **RUNS[name]}, out=str(tmp_path), resume=True)) as trainer:
        (one,) = trainer.learner.trained.values()
        assert trainer.counters.update == trainer.policy.version == 2
        assert one.rng.bit_generator.state == wanted["rng"]["actions"]
        assert one.learner.rng.bit_generator.state == wanted["rng"]["minibatches"]
        assert torch.equal(one.learner.state, wanted["memory"]["learner"])
        assert one.rewards.count == wanted["rewards"]["count"]
        trainer.train()
        assert trainer.counters.update == 4 and not trainer.collector.ledger.dropped
    assert read(tmp_path / "checkpoints" / "update_000000004.pt")["team"]["num_updates"] == 4


def test_a_file_of_a_later_format_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(write.__globals__, "FORMAT", 9)
    write(tmp_path / "later.pt", {"weights": np.zeros(1)})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 9, this version reads up to 2: upgrade envfleet"):
        read(tmp_path / "later.pt")


def test_tuples_come_back_as_tuples(tmp_path):
    state = {"held": {"obs": (np.arange(3), {"a": (np.zeros(2),)})}, "list": [1, (2, 3)]}
    write(tmp_path / "a.pt", state)
    found = read(tmp_path / "a.pt")
    assert isinstance(found["held"]["obs"], tuple) and isinstance(found["held"]["obs"][1]["a"], tuple)
    assert found["held"]["obs"][0].tolist() == [0, 1, 2] and found["list"] == [1, (2, 3)]
