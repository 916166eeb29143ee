"""Reading below PettingZoo's own wrappers tells the same as asking through them."""

import numpy as np
import pytest

from envfleet.multiagent.pettingzoo import AecAgentEnv, _below_wrappers

pytest.importorskip("pettingzoo")

from pettingzoo.classic import connect_four_v3, rps_v2, tictactoe_v3
from pettingzoo.utils.wrappers import BaseWrapper


class Doubled(BaseWrapper):
    """A wrapper of the user's own, which changes what agents are told."""

    def last(self, observe=True):
        obs, reward, terminated, truncated, info = super().last(observe)
        return obs, 2 * reward, terminated, truncated, info


def told(seat, steps, seed):
    """What a seat hears over many steps of any action, legal or not."""
    rng = np.random.default_rng(seed)
    heard = []
    result = seat.reset(seed=seed)
    for _ in range(steps):
        heard.append(repr(result))
        if not seat.env.agents:
            result = seat.reset()
            continue
        agent = seat.env.agent_selection
        result = seat.step(int(rng.integers(seat.env.action_space(agent).n)))
    return heard


@pytest.mark.filterwarnings("ignore:.*llegal move.*")
@pytest.mark.parametrize("module", [connect_four_v3, tictactoe_v3, rps_v2], ids=lambda m: m.__name__.split(".")[-1])
def test_the_short_way_hears_what_the_long_way_does(module):
    short, long = AecAgentEnv(module.env()), AecAgentEnv(module.env())
    assert short._bare is short.env.unwrapped
    long._bare = None
    assert told(short, 300, seed=3) == told(long, 300, seed=3)


def test_other_wrappers_are_asked_themselves():
    assert _below_wrappers(Doubled(connect_four_v3.env())) is None
    assert _below_wrappers(connect_four_v3.raw_env()) is None  # nothing to skip
