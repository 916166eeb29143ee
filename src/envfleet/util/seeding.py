"""Seeds that never overlap: one stream per (run, role, slot, episode), spawned with `SeedSequence`.

`reset(seed=int)` of a fleet follows Gymnasium's convention (slot i gets seed + i) and does not come through here.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument

Ints = NDArray[np.int64]


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


def episode_seeds(run_seed: int, role: str, slots: Ints, episodes: Ints) -> Ints:
    """`episode_seed` of many slots at once: the arithmetic of NumPy's `SeedSequence` on arrays, the same bits.

    One at a time they take 10 us each, here 50 of them take 40 us: a third of the time of collecting, while episodes are short.

    Example:
        >>> slots, episodes = np.arange(5), np.array([0, 3, 1, 2**31, 7])
        >>> found = episode_seeds(9, "train", slots, episodes)
        >>> found.tolist() == [episode_seed(9, "train", b, e) for b, e in zip(slots.tolist(), episodes.tolist())]
        True
    """
    if len(slots) < 4 or int(episodes.max()) >= 2**32:  # a number beyond 32 bits is two words
        pairs = zip(slots.tolist(), episodes.tolist())
        return np.array([episode_seed(run_seed, role, slot, episode) for slot, episode in pairs], np.int64)
    pool = _sequence(run_seed, role).pool[:, None]  # four words, into which what all have in common is mixed already
    num_words = max(4, -(-int(run_seed).bit_length() // 32)) + 1
    hashed = 0x43B0D7E5 * pow(0x931E8875, 16 + 4 * (num_words - 4), 2**32) % 2**32  # that many times it was multiplied
    for word in (slots, episodes):
        value, hashed = _hashed(word.astype(np.uint32)[None], hashed, 0x931E8875, 4)
        pool = pool * np.uint32(0xCA01F9DD) - value * np.uint32(0x4973F715)
        pool ^= pool >> np.uint32(16)
    low, high = _hashed(pool[:2], 0x8B51F9DD, 0x58F38DED, 2)[0].astype(np.uint64)
    seeds: Ints = ((low | high << np.uint64(32)) >> np.uint64(1)).astype(np.int64)
    return seeds


def _hashed(words: NDArray[np.uint32], start: int, times: int, count: int) -> tuple[NDArray[np.uint32], int]:
    """`words` hashed with `count` constants in turn, [count, ...], and the next constant."""
    constants = np.array([start * pow(times, i, 2**32) % 2**32 for i in range(count + 1)], np.uint32)[:, None]
    value: NDArray[np.uint32] = (words ^ constants[:-1]) * constants[1:]
    value ^= value >> np.uint32(16)
    return value, int(constants[-1, 0])


def stream(run_seed: int, role: str, *key: int) -> np.random.Generator:
    """A random generator of its own for one purpose of a run.

    Example:
        >>> float(stream(0, "policy", 1).random()) == float(stream(0, "policy", 1).random())
        True
    """
    return np.random.default_rng(_sequence(run_seed, role, *key))
