"""Where chance enters: everything random in a step is asked from one object, which draws it or reads it from a recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from envfleet.envs.cage2.scenario import ENTERPRISE0, ENTERPRISE2, USER0, USER4

#: The chance that the best exploit of a host is tried, and that a reverse shell is noticed.
BEST_EXPLOIT, NOTICED = 0.75, 0.95
#: The hosts that the green agent scans.
GREEN_HOSTS = (*range(ENTERPRISE0, ENTERPRISE2 + 1), *range(USER0, USER4 + 1))


class Draws(Protocol):
    """What a step asks chance for."""

    def host(self, candidates: Sequence[int]) -> int:
        """One of the hosts that red may choose; they come in ascending order."""

    def exploit(self, options: Sequence[int]) -> int:
        """One of the exploits that a host offers; they come with the best one first."""

    def noticed(self) -> bool:
        """Whether a reverse shell is noticed."""

    def green_host(self) -> int:
        """The host that green scans, -1 for none."""


class RandomDraws:
    """Draws from a NumPy generator; only `random()` is used, so that compiled code can follow with one function.

    A choice from one needs no draw.

    Example:
        >>> draws = RandomDraws(np.random.default_rng(0))
        >>> draws.host([4]), draws.host([9, 10, 11, 12])
        (4, 11)
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._random = generator.random

    def host(self, candidates: Sequence[int]) -> int:
        """Each candidate is equally likely."""
        return candidates[int(self._random() * len(candidates))] if len(candidates) > 1 else candidates[0]

    def exploit(self, options: Sequence[int]) -> int:
        """The best one with probability 0.75, else one of the others."""
        if len(options) == 1 or self._random() < BEST_EXPLOIT:
            return options[0]
        return self.host(options[1:])

    def noticed(self) -> bool:
        """With probability 0.95."""
        return self._random() < NOTICED

    def green_host(self) -> int:
        """None in half of the steps."""
        return -1 if self._random() < 0.5 else self.host(GREEN_HOSTS)


class Outcomes(NamedTuple):
    """What chance gave in one step of a recorded episode; -1 where nothing was drawn."""

    target: int
    exploit: int
    noticed: int
    green: int


class RecordedDraws:
    """Answers with the outcomes of a recording; an outcome that the rules do not allow here gives the first that they do.

    What was used is in the true state, so that a comparison with the recording finds it.

    Example:
        >>> draws = RecordedDraws()
        >>> draws.outcomes = Outcomes(target=10, exploit=-1, noticed=-1, green=-1)
        >>> draws.host([9, 10]), draws.host([11, 12])
        (10, 11)
    """

    def __init__(self) -> None:
        self.outcomes = Outcomes(-1, -1, -1, -1)

    def host(self, candidates: Sequence[int]) -> int:
        """The recorded target."""
        return self.outcomes.target if self.outcomes.target in candidates else candidates[0]

    def exploit(self, options: Sequence[int]) -> int:
        """The recorded exploit."""
        return self.outcomes.exploit if self.outcomes.exploit in options else options[0]

    def noticed(self) -> bool:
        """Whether the recorded shell was noticed."""
        return self.outcomes.noticed == 1

    def green_host(self) -> int:
        """The recorded green host."""
        return self.outcomes.green if self.outcomes.green in GREEN_HOSTS else -1
