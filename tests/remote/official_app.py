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
LIVE = 0


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

    def __init__(self) -> None:
        global LIVE
        super().__init__()
        LIVE += 1
        self._n, self._horizon, self._last, self._episode = 0, 10, "", None
        self._open = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, horizon: int = 10, **kwargs: Any):
        self._n, self._horizon, self._episode = 0, horizon, episode_id
        return CountObservation(echoed=f"ready {seed}", n=0, live=LIVE, done=False, reward=None)

    def _answer(self, action: CountAction) -> CountObservation:
        if action.message == "raise":
            raise ValueError("asked to raise")
        self._n += 1
        self._last = action.message
        return CountObservation(
            echoed=action.message,
            n=self._n,
            live=LIVE,
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
        global LIVE
        if self._open:
            self._open = False
            LIVE -= 1


class AsyncCountEnvironment(CountEnvironment):
    async def step_async(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any):
        if LATENCY_S or action.sleep_s:
            await asyncio.sleep(LATENCY_S or action.sleep_s)
        return self._answer(action)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--use-async", action="store_true")
    args = parser.parse_args()
    app = create_fastapi_app(
        AsyncCountEnvironment if args.use_async else CountEnvironment,
        CountAction,
        CountObservation,
        max_concurrent_envs=args.sessions,
    )
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", args.port))

    @app.get("/live")
    def live() -> dict:
        return {"live": LIVE}

    sock.listen(1024)
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])


if __name__ == "__main__":
    main()
