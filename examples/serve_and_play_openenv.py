"""Serve Connect Four, and play it over the wire: blocking, then many games at once.

python examples/serve_and_play_openenv.py
"""

import asyncio
import random

from envfleet.remote import AsyncEnvClient, HttpEnvClient, Server


def play_one(url: str) -> None:
    """One game, one session, blocking."""
    with HttpEnvClient(url) as client:
        result = client.reset(seed=1, level="hard")
        while not result.done:
            result = client.step({"column": random.choice(result.observation.legal_actions)})
        print(result.observation.text)
        print("winner:", result.observation.winner)


async def play_many(url: str, games: int) -> None:
    """Many games on fewer sessions: who finds no place waits, first come, first served."""

    async def game(seed: int) -> float:
        async with AsyncEnvClient(url) as client:
            result = await client.reset(seed=seed, level="easy")
            while not result.done:
                result = await client.step({"column": random.choice(result.observation.legal_actions)})
            return result.reward or 0.0

    rewards = await asyncio.gather(*(game(seed) for seed in range(games)))
    print(f"{games} games on 4 sessions: {rewards.count(1.0)} won, {rewards.count(-1.0)} lost")


if __name__ == "__main__":
    with Server("Connect4", port=0, max_sessions=4, backend="thread") as server:
        play_one(server.url)
        asyncio.run(play_many(server.url, games=20))
