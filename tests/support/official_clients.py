"""Run by an interpreter that has an official package: its clients against our server, and through our guard."""

import asyncio
import sys
import time

from openenv.core import GenericEnvClient

from envfleet.errors import EnvError, MessageTimeout, ResetNeeded
from envfleet.remote.official_clients import as_client
from envfleet.remote.wrapper import OpenEnvGymnasiumWrapper


async def episodes_async(url: str) -> None:
    async with GenericEnvClient(base_url=url) as client:
        for episode in range(20):
            result = await client.reset(seed=episode, horizon=5)
            assert result.observation["echoed"] == "ready", result
            for n in range(1, 6):
                result = await client.step({"message": f"{episode}-{n}"})
                assert result.observation["echoed"] == f"{episode}-{n}" and result.observation["n"] == n, result
            assert result.done and abs(result.reward - 0.1 * len(f"{episode}-5")) < 1e-9, result
        state = await client.state()
        assert state["step_count"] == 5, state


def episodes_sync(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        for _ in range(5):
            client.reset(horizon=2)
            client.step({"message": "a"})
            assert client.step({"message": "b"}).done


def through_our_guard(official_url: str) -> None:
    """Their client object where a client of ours is expected; `official_url` is a server that can be slow."""
    client = as_client(GenericEnvClient(base_url=official_url, message_timeout_s=0.5))
    try:
        client.step({"message": "x"})
        raise AssertionError("a step before the reset went through")
    except ResetNeeded:
        pass
    client.reset(seed=1)
    assert client.step({"message": "one"}).observation.n == 1
    try:
        client.step({"message": "raise"})
        raise AssertionError("no error")
    except EnvError:
        pass
    try:
        client.step({"message": "slow", "sleep_s": 1.2})
        raise AssertionError("no timeout")
    except MessageTimeout:
        pass
    try:
        client.step({"message": "after"})
        raise AssertionError("a step after an interruption went through")
    except ResetNeeded:
        pass
    deadline = time.monotonic() + 20
    while True:
        try:
            client.reset(seed=2)
            break
        except Exception:
            assert time.monotonic() < deadline
    result = client.step({"message": "fresh"})
    assert (result.observation.echoed, result.observation.n) == ("fresh", 1), result
    env = OpenEnvGymnasiumWrapper(client, "raw_text", "discrete", actions=["yes", "no"])
    obs, _ = env.reset(seed=3)
    assert obs == "ready 3", obs
    assert env.step(1)[0] == "no"
    env.close()


if __name__ == "__main__":
    ours, official = sys.argv[1:]
    asyncio.run(episodes_async(ours))
    episodes_sync(ours)
    through_our_guard(official)
    print("all well")
