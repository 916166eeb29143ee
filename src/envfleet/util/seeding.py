"""Seeds that never overlap: one stream per (run, role, slot, episode), spawned with `SeedSequence`.

`reset(seed=int)` of a fleet follows Gymnasium's convention (slot i gets seed + i) and does not come through here.
"""

from __future__ import annotations

import zlib

import numpy as np

from envfleet.errors import BadArgument


def _sequence(run_seed: int, role: str, *key: int) -> np.random.SeedSequence:
    if isinstance(run_seed, bool) or not isinstance(run_seed, (int, np.integer)) or run_seed < 0:
        raise BadArgument(f"seed={run_seed!r}: give a whole number, 0 or more")
    # crc32, not hash(): Python's string hash differs from process to process.
    return np.random.SeedSequence(entropy=int(run_seed), spawn_key=(zlib.crc32(role.encode()), *key))


def episode_seed(run_seed: int, role: str, slot: int, episode: int) -> int:
    """The seed of one episode: any episode can be replayed alone from these four values.

    Example:
        >>> episode_seed(0, "train", 3, 7) == episode_seed(0, "train", 3, 7)
        True
        >>> episode_seed(0, "train", 3, 7) == episode_seed(0, "eval", 3, 7)
        False
    """
    sequence = _sequence(run_seed, role, slot, episode)
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # 63 bits: fits the int64 column


def stream(run_seed: int, role: str, *key: int) -> np.random.Generator:
    """A random generator of its own for one purpose of a run.

    Example:
        >>> float(stream(0, "policy", 1).random()) == float(stream(0, "policy", 1).random())
        True
    """
    return np.random.default_rng(_sequence(run_seed, role, *key))
