"""Seeds of many episodes at once are those of one at a time."""

import numpy as np
import pytest

from envfleet.util.seeding import episode_seed, episode_seeds


@pytest.mark.parametrize("run_seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**127 + 3, 2**128, 2**200 + 7])
@pytest.mark.parametrize("role", ["segment", "eval"])
def test_seeds_of_many_episodes_at_once_are_those_of_one_at_a_time(run_seed, role):
    rng = np.random.default_rng(0)
    slots = np.concatenate([[0, 1, 2**32 - 1], rng.integers(0, 2**20, 40)])
    episodes = np.concatenate([[0, 2**32 - 1, 5], rng.integers(0, 2**32, 40)])
    for count in (0, 1, 3, 4, 43):
        wanted = [episode_seed(run_seed, role, b, e) for b, e in zip(slots[:count].tolist(), episodes[:count].tolist())]
        assert episode_seeds(run_seed, role, slots[:count], episodes[:count]).tolist() == wanted


def test_an_episode_number_beyond_32_bits_has_its_own_seed():
    slots, episodes = np.arange(5), np.arange(5) + 2**32
    wanted = [episode_seed(1, "segment", b, e) for b, e in zip(slots.tolist(), episodes.tolist())]
    assert episode_seeds(1, "segment", slots, episodes).tolist() == wanted
