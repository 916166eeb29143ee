"""What the tests of CAGE 2 share: both implementations under one driver, where the recordings are, and how golden ones are made.

`python -m tests.support.cage2` writes the golden episodes again, after the rules were changed on purpose and verified.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envfleet.envs.cage2.draws import Outcomes, RecordedDraws
from envfleet.envs.cage2.env import Cage2Env
from envfleet.envs.cage2.native_cage2 import NativeCage2Env
from envfleet.envs.cage2.recordings import outputs_of, write_recordings
from envfleet.envs.cage2.red_agents import RED_NAMES, red_number
from envfleet.envs.cage2.rules import Simulator
from envfleet.envs.cage2.scenario import ACTION_MEANINGS, HOST_NAMES, NUM_ACTIONS, action_id
from envfleet.envs.cage2.true_state import true_states

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "envs" / "cage2_golden.json.gz"
VERSIONS = {"python": Cage2Env, "native": NativeCage2Env}
QUIET, SCAN, EXPLOIT = "00", "10", "11"


def recordings() -> Path:
    """The recorded episodes of the original simulator: beside the checkout, or where ENVFLEET_FACTS says."""
    folders = [Path(os.environ["ENVFLEET_FACTS"])] if "ENVFLEET_FACTS" in os.environ else []
    for folder in (*folders, ROOT.parent / "shared" / "facts", ROOT.parent.parent / "shared" / "facts"):
        if (folder / "cage2_traces.json.gz").is_file():
            return folder / "cage2_traces.json.gz"
    pytest.skip("no recorded CAGE 2 episodes: cage2_traces.json.gz is neither in ENVFLEET_FACTS nor in ../shared/facts")


class Game:
    """One episode in which a test decides what chance gives. Exploits are the best ones and noticed, unless it says else."""

    def __init__(self, version: str, red: str, green: bool = False, rule: Any = "strict") -> None:
        self._native = NativeCage2Env(red, "active" if green else "sleep", None, rule) if version == "native" else None
        self._python = Simulator(red_number(red), green, rule)
        self._draws = RecordedDraws()
        if self._native is not None:
            self._native.reset(seed=0)
            self._native.record["is_recorded"] = 1
        self.bits = "0" * 52
        self.reward = 0.0

    def step(self, action: str = "Sleep", target: int = -1, exploit: int = -1, noticed: int = 1, green: int = -1) -> Any:
        """Play one step and return the true state."""
        outcomes, number = Outcomes(target, exploit, noticed, green), ACTION_MEANINGS.index(action)
        if self._native is not None:
            self._native.record["recorded"] = outcomes
            observation, self.reward, *_ = self._native.step(number)
        else:
            self._draws.outcomes = outcomes
            observation, self.reward = self._python.step(number, self._draws)
        self.bits = "".join(map(str, observation.tolist()))
        return self.true

    @property
    def true(self) -> Any:
        """The true state."""
        return true_states(self._native.state() if self._native is not None else self._python.state())

    def seen(self, host: str) -> str:
        """What blue saw on a host in the last step."""
        return self.bits[4 * HOST_NAMES.index(host) :][:2]

    def believed(self, host: str) -> str:
        """What blue believes of a host."""
        return ("no", "unknown", "user", "privileged")[self.true["memory"][HOST_NAMES.index(host)]]

    def access(self, host: str) -> int:
        """Red's access to a host."""
        return int(self.true["access"][HOST_NAMES.index(host)])


def careful_blue(rng: np.random.Generator, state: Any) -> int:
    """Half of the time an action on the host that red was just at, else any: it meets more rules than chance alone."""
    if state["red_kind"] in (1, 2, 3, 4) and rng.random() < 0.5:
        kind = ("Analyse", "Remove", "Restore", "DecoyVsftpd", "DecoyApache", "DecoyTomcat", "DecoySSHD")[int(rng.integers(7))]
        return action_id(kind, HOST_NAMES[int(state["red_target"])])
    return int(rng.integers(NUM_ACTIONS))


def _golden(red: str, green: str, seed: int, num_steps: int = 60) -> dict[str, Any]:
    env, rng = Cage2Env(red, green, None), np.random.default_rng(seed)  # type: ignore[arg-type]
    env.reset(seed=seed)
    episode: dict[str, Any] = {"red": red, "green": "GreenAgent" if green == "active" else "Sleep", "seed": seed, "a": []}
    for _ in range(num_steps):
        action = careful_blue(rng, env.state())
        observation, reward, *_ = env.step(action)
        episode["a"].append(action)
        for name, value in outputs_of(observation, reward, env.true_state()).items():
            episode.setdefault(name, []).append(value)
    return episode


if __name__ == "__main__":
    write_recordings(GOLDEN, [_golden(red, green, seed) for red in RED_NAMES for green in ("sleep", "active") for seed in (1, 2)])
