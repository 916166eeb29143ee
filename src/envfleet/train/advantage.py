"""Generalised advantage estimation over [T, B] arrays, with terminations and truncations kept apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def following_values(values: Floats, final_values: Floats, terminated: Bools, truncated: Bools) -> Floats:
    """Value of what followed each step [T, B]: 0 after a termination, V(final_obs) after a truncation.

    `values` is [T + 1, B], the last row the bootstrap; `final_values` is [T, B], read at truncations only.

    Example:
        >>> v = np.array([[1.0], [2.0], [3.0]])
        >>> no, yes = np.array([[False], [False]]), np.array([[True], [False]])
        >>> following_values(v, np.full((2, 1), 9.0), no, yes).ravel().tolist()
        [9.0, 3.0]
    """
    following = np.where(truncated, final_values, values[1:])
    following[terminated] = 0.0
    return following


def gae(
    reward: Floats, values: Floats, following: Floats, ended: Bools, scored: Bools, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Return (advantage, value target), both [T, B].

    A truncation cuts the sum like a termination but keeps the value of the state it stopped in; which of the two it
    was is already in `following` (see `following_values`). A row that is no transition (`scored` False: the
    environment failed there) has advantage 0 and its own value as target, and ends the sum of the rows before it.

    Example:
        >>> one, no, yes = np.ones((2, 1)), np.zeros((2, 1), bool), np.ones((2, 1), bool)
        >>> gae(one, np.zeros((3, 1)), np.zeros((2, 1)), no, yes, gamma=0.5, lam=1.0)[0].ravel().tolist()
        [1.5, 1.0]
    """
    delta = np.where(scored, reward + gamma * following - values[:-1], 0.0)
    decay = np.where(ended | ~scored, 0.0, gamma * lam)
    advantage = np.empty_like(delta)  # [step, slot]
    last = np.zeros(delta.shape[1:])
    for t in range(len(delta) - 1, -1, -1):
        last = delta[t] + decay[t] * last
        advantage[t] = last
    return advantage, advantage + values[:-1]
