"""Replay recorded episodes and compare every step: `python -m envfleet.envs.cage2.verify RECORDINGS.json.gz`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.draws import Outcomes, RecordedDraws
from envfleet.envs.cage2.native_cage2 import NativeCage2Env
from envfleet.envs.cage2.recordings import Episode, outputs_of, read_recordings
from envfleet.envs.cage2.red_agents import RED_NAMES
from envfleet.envs.cage2.rules import Simulator
from envfleet.envs.cage2.scenario import ACTION_MEANINGS
from envfleet.envs.cage2.true_state import true_states
from envfleet.errors import FleetError

_MAX_SHOWN = 10


class Replay(Protocol):
    """One implementation in the middle of a recorded episode."""

    def step(self, action: int, outcomes: Outcomes) -> tuple[NDArray[np.uint8], float]:
        """Observation and reward, with these outcomes instead of drawn ones."""

    def state(self) -> NDArray[Any]:
        """The record of `STATE` after it."""


class PythonReplay:
    """The plain-Python rules."""

    def __init__(self, episode: Episode) -> None:
        self._draws = RecordedDraws()
        self._simulator = Simulator(episode.red, episode.green)
        self.state = self._simulator.state

    def step(self, action: int, outcomes: Outcomes) -> tuple[NDArray[np.uint8], float]:
        """Observation and reward, with these outcomes instead of drawn ones."""
        self._draws.outcomes = outcomes
        return self._simulator.step(action, self._draws)


class NativeReplay:
    """The C++ version."""

    def __init__(self, episode: Episode) -> None:
        self._env = NativeCage2Env(RED_NAMES[episode.red], "active" if episode.green else "sleep", max_steps=None)
        self._env.reset(seed=0)
        self._env.record["is_recorded"] = 1
        self.state = self._env.state

    def step(self, action: int, outcomes: Outcomes) -> tuple[NDArray[np.uint8], float]:
        """Observation and reward, with these outcomes instead of drawn ones."""
        self._env.record["recorded"] = outcomes
        observation, reward, *_ = self._env.step(action)
        return observation, reward


IMPLEMENTATIONS: dict[str, Callable[[Episode], Replay]] = {"python": PythonReplay, "native": NativeReplay}


def differences(episode: Episode, implementation: str) -> Iterator[str]:
    """Replay one episode; a sentence for every value that is not as it was recorded."""
    replay = IMPLEMENTATIONS[implementation](episode)
    for step, action in enumerate(episode.fields["a"]):
        observation, reward = replay.step(action, episode.outcomes(step))
        for name, value in outputs_of(observation, reward, true_states(replay.state())).items():
            recorded = episode.fields[name][step]
            if value != recorded:
                where = f"{implementation}: episode {episode.number}, step {step} ({ACTION_MEANINGS[action]})"
                yield f"{where}: {name} is {value!r}, recorded {recorded!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything is as recorded, 1 if not, 2 if the file cannot be used."""
    parser = argparse.ArgumentParser("python -m envfleet.envs.cage2.verify", description=__doc__)
    parser.add_argument("recordings", help="a gzipped JSON file of recorded episodes")
    parser.add_argument("-n", "--episodes", type=_count, default=None, help="only the first N episodes")
    parser.add_argument("--implementation", choices=("both", *IMPLEMENTATIONS), default="both")
    given = parser.parse_args(arguments)
    names = tuple(IMPLEMENTATIONS) if given.implementation == "both" else (given.implementation,)
    try:
        episodes = read_recordings(given.recordings)[: given.episodes]
        found = {name: [text for episode in episodes for text in differences(episode, name)] for name in names}
    except FleetError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    for text in itertools.islice(itertools.chain(*found.values()), _MAX_SHOWN):
        print(text)
    for name, texts in found.items():
        print(
            f"{name}: {len(episodes)} episodes, {sum(map(len, (e.fields['a'] for e in episodes)))} steps, {len(texts)} differences"
        )
    return int(any(found.values()))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give a whole number from 1 up")
    return number


if __name__ == "__main__":
    sys.exit(main())
