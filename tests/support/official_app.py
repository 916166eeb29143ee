"""A small environment written with the official base classes; run by an interpreter that has them.

It counts: every observation carries the counter of its step and the message it answers, so a test can see
whether an answer met the wrong request. Prints the port it listens on.
"""

import argparse
import asyncio
import os
import socket
import time
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LATENCY_S = float(os.environ.get("LATENCY_S", "0"))


class CountAction(Action):
    message: str
    sleep_s: float = 0.0


class CountObservation(Observation):
    echoed: str = ""
    n: int = 0
    live: int = 0


class CountState(State):
    last: str = ""


class CountEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    live = 0  # environments of this class that are open; every app has a class of its own

    def __init__(self) -> None:
        super().__init__()
        type(self).live += 1
        self._n, self._horizon, self._last, self._episode = 0, 10, "", None
        self._open = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, horizon: int = 10, **kwargs: Any):
        self._n, self._horizon, self._episode = 0, horizon, episode_id
        return CountObservation(echoed=f"ready {seed}", n=0, live=type(self).live, done=False, reward=None)

    def _answer(self, action: CountAction) -> CountObservation:
        if action.message == "raise":
            raise ValueError("asked to raise")
        self._n += 1
        self._last = action.message
        return CountObservation(
            echoed=action.message,
            n=self._n,
            live=type(self).live,
            reward=0.1 * len(action.message),
            done=self._n >= self._horizon,
            metadata={"from": "official"},
        )

    def step(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any):
        if LATENCY_S or action.sleep_s:
            time.sleep(LATENCY_S or action.sleep_s)
        return self._answer(action)

    @property
    def state(self) -> CountState:
        return CountState(episode_id=self._episode, step_count=self._n, last=self._last)

    def close(self) -> None:
        if self._open:
            self._open = False
            type(self).live -= 1


class AsyncCountEnvironment(CountEnvironment):
    async def step_async(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any):
        if LATENCY_S or action.sleep_s:
            await asyncio.sleep(LATENCY_S or action.sleep_s)
        return self._answer(action)


def make_app(base, sessions: int):
    env = type(base.__name__, (base,), {"live": 0})
    app = create_fastapi_app(env, CountAction, CountObservation, max_concurrent_envs=sessions)

    @app.get("/live")
    def live() -> dict:
        return {"live": env.live}

    return app


async def serve(apps, sockets) -> None:
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning")) for app in apps]
    await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in zip(servers, sockets)))


def main() -> None:
    """One server for each session limit, all in this process: importing the package is what takes long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", type=int, nargs="+")
    parser.add_argument("--sessions", type=int, nargs="+")
    parser.add_argument("--use-async", action="store_true")
    args = parser.parse_args()
    base = AsyncCountEnvironment if args.use_async else CountEnvironment
    apps = [make_app(base, sessions) for sessions in args.sessions]
    sockets = []
    for port in args.ports:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(1024)
        sockets.append(sock)
    print(*(sock.getsockname()[1] for sock in sockets), flush=True)
    asyncio.run(serve(apps, sockets))


if __name__ == "__main__":
    main()
