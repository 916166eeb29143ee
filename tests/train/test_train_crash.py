"""What docs/training.md promises about crashes, with the default settings: only the env is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from envfleet.autotune.auto import Probe
from envfleet.envs.probe import Counting
from envfleet.train import PPOConfig, PPOTrainer


class Crashing(Counting):
    """Ends its process at its 40th step, the first time only."""

    def __init__(self, mark: str) -> None:
        super().__init__(limit=1000)
        self.mark = mark

    def step(self, action: Any) -> Any:
        if self.count == 40 and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os._exit(11)
        return super().step(action)


@pytest.mark.parametrize("settings", [{}, {"num_envs": 4}])
def test_an_env_that_ends_its_process_does_not_end_a_run(settings: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    # A probe that sees no crash: cheap enough that one process would be fastest.
    monkeypatch.setattr("envfleet.autotune.auto._probe", lambda recipe: Probe(2e-6, 2e-6, 8))
    mark = str(tmp_path / "crashed")
    out = str(tmp_path / "run")
    config = PPOConfig(env=lambda: Crashing(mark), total_steps=1024, out=out, tensorboard=False, **settings)
    with PPOTrainer(config) as trainer:
        trainer.train()
        assert trainer.fleet.faults[0].exit_code == 11
        assert trainer.counters.num_steps >= 1000  # but for the rows of the fault
