"""A server that counts, and a proxy that delivers its answers twice, late, to the wrong connection, or not at all."""

import asyncio
import contextlib
import json
import random
import threading

import gymnasium
import numpy as np
from gymnasium import spaces
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed


def model_row(seed: int, actions: list[int]) -> tuple[list[int], float]:
    """What the counting environment gives after these actions: its observation and its reward."""
    total = seed
    for action in actions:
        total = (total * 31 + action + 7) % 1_000_003
    return [len(actions), total], float(total % 17)


class Counting(gymnasium.Env):
    """The model as an environment: every row tells how many steps there were and with which actions."""

    observation_space = spaces.Box(0, 2**40, (2,), np.int64)
    action_space = spaces.Discrete(5)
    openenv = {"observation": "obs"}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.seed, self.actions = seed or 0, []
        self.horizon = int((options or {}).get("horizon", 6))
        return np.array(model_row(self.seed, [])[0]), {}

    def step(self, action):
        self.actions.append(int(action))
        obs, reward = model_row(self.seed, self.actions)
        return np.array(obs), reward, len(self.actions) >= self.horizon, False, {"seen": list(self.actions)}


async def official(socket, monotone: bool = False) -> None:
    """The model behind the plain OpenEnv protocol. `monotone`: answers say nothing, so that many are the same."""
    env, counted = Counting(), 0
    with contextlib.suppress(ConnectionClosed):
        async for text in socket:
            message = json.loads(text)
            data = message.get("data") or {}
            if message["type"] == "state":
                await socket.send(json.dumps({"type": "state", "data": {"episode_id": None, "step_count": counted}}))
                continue
            if message["type"] == "reset":
                obs, reward, done, counted = env.reset(seed=data.pop("seed", 0), options=data)[0], None, False, 0
            else:
                obs, reward, done, _, _ = env.step(data["action"])
                counted += 1
            fields = {"kind": "monotone" if monotone else "counting", "n": 0 if monotone else counted}
            fields["obs"] = [0, int(obs[1]) % 2] if monotone else obs.tolist()
            reward = reward if reward is None or not monotone else float(reward > 8)
            await socket.send(
                json.dumps({"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}})
            )


class LyingProxy:
    """Between a client and a server at `port`: passes whole frames, and for a share of them does something else.

    Args:
        port: of the server.
        shares: of what is done to answers: "twice" at once, "again" in front of a later answer, "soon" a moment later,
            "drop", "delay", "stray" (again, on the next connection); and "ask" for requests that are sent twice. The
            first answer of a connection is passed on, for a client that gets none waits before it connects again.
        exact: let client and server agree on a protocol of our own.
    """

    def __init__(self, port: int, shares: dict[str, float], seed: int = 0, exact: bool = False):
        self.exact = exact
        self.upstream, self.shares, self.random = port, shares, random.Random(seed)
        self.counts = dict.fromkeys(shares, 0)
        self.strays: list = []
        self.mutate = None  # a function from one answer to what is sent instead
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self):
        self._server = await serve(self._pass, "127.0.0.1", 0, compression=None, select_subprotocol=self._agree)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        await self._server.wait_closed()

    def _agree(self, connection, subprotocols):
        return subprotocols[0] if subprotocols and self.exact else None

    def _lot(self, kinds: tuple[str, ...]) -> str:
        at = self.random.random()
        for kind in kinds:
            at -= self.shares.get(kind, 0.0)
            if at < 0:
                self.counts[kind] += 1
                return kind
        return "pass"

    async def _pass(self, near):
        wanted = [near.subprotocol] if near.subprotocol else None
        address = f"ws://127.0.0.1:{self.upstream}/ws"
        async with connect(address, compression=None, subprotocols=wanted) as far:
            pumps = [asyncio.ensure_future(self._ask(near, far)), asyncio.ensure_future(self._answer(near, far))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _ask(self, near, far):
        async for frame in near:
            await far.send(frame)
            if self._lot(("ask",)) == "ask":
                await far.send(frame)

    async def _answer(self, near, far):
        held: list[tuple[int, object]] = []
        passed = 0
        async for frame in far:
            passed += 1
            what = self._lot(("twice", "again", "soon", "drop", "delay", "stray")) if passed > 1 else "pass"
            if passed > 1 and self.strays:
                await near.send(self.strays.pop())
            for due, copy in list(held):
                if due <= passed:
                    held.remove((due, copy))
                    await near.send(copy)
            if self.mutate is not None:
                frame = self.mutate(frame)
            if what == "delay":
                await asyncio.sleep(self.random.random() * 0.01)
            if what != "drop":
                await near.send(frame)
            if what == "twice":
                await near.send(frame)
            if what == "again":
                held.append((passed + self.random.randint(1, 3), frame))
            if what == "stray":
                self.strays.append(frame)
            if what == "soon":
                later = near.send(frame)
                asyncio.get_running_loop().call_later(self.random.random() * 0.002, _send, later)


def _send(sending):
    task = asyncio.ensure_future(sending)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


@contextlib.contextmanager
def in_thread(build):
    """Run `async with build()` on a loop in a thread, for clients that block; gives what it gives."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    manager = build()
    try:
        yield do(manager.__aenter__())
        do(manager.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextlib.asynccontextmanager
async def official_server(monotone: bool = False):
    """An honest server of the plain protocol; gives its port. It takes no subprotocol, as official ones do not."""

    async def handler(socket):
        await official(socket, monotone)

    async with serve(handler, "127.0.0.1", 0, compression=None) as server:
        yield server.sockets[0].getsockname()[1]
