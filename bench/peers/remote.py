"""Peers that clash with our pins: each in a venv of its own, driven over a pipe, one line a slice.

`make bench-peers` (`python -m bench.peers.install`) makes the venvs. A peer without one is skipped by name.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.contestants import Contestant

HERE = Path(__file__).parent
VENVS = HERE / ".venv"

#: name -> (venv, script, mode). "plain" is the venv's own loop, to compare with: its Gymnasium is another version.
PEERS = {
    "RLlib two runners": ("rllib", "rllib_peer.py", "runners"),
    "RLlib venv, plain loop": ("rllib", "rllib_peer.py", "plain"),
    "Sample Factory sampler": ("sample_factory", "sample_factory_peer.py", "sampler"),
    "Sample Factory venv, plain loop": ("sample_factory", "sample_factory_peer.py", "plain"),
    "AgileRL async (2 agents)": ("agilerl", "agilerl_peer.py", "async"),
    "AgileRL venv, plain loop (2 agents)": ("agilerl", "agilerl_peer.py", "plain"),
}


class Remote(Contestant):
    """A script in another venv that answers "seconds" lines with {"steps": …, "seconds": …}."""

    def __init__(self, python: Path, script: str, mode: str, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), mode, env, str(slots)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("bench "):  # these frameworks print things of their own
                answer: dict[str, float] = json.loads(line[6:])
                return answer
        raise RuntimeError(f"the peer's process ended with code {self._process.wait()}")

    def run(self, seconds: float) -> tuple[int, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        answer = self._answer()
        return int(answer["steps"]), answer["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def builder(name: str) -> Callable[[str, int], Contestant] | str:
    """How to build the peer, or why it cannot take part."""
    venv, script, mode = PEERS[name]
    python = VENVS / venv / "bin" / "python"
    if not (VENVS / venv / ".ready").exists():
        return f"its venv is not there: make bench-peers (or python -m bench.peers.install {venv})"
    return lambda env, slots: Remote(python, script, mode, env, slots)
