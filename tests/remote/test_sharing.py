"""Sessions that share a worker process: nobody waits for a slow one, and a crash takes the process's own, who are told."""

import asyncio
import threading

import numpy as np
import pytest

from envfleet.envs.echo import AsyncEcho, Echo
from envfleet.remote import AsyncEnvClient, EnvError, HttpEnvClient, Server, session_host
from tests.support.served_envs import Homesick, Misbehaving


@pytest.fixture(scope="module")
def crowded():
    with Server(Misbehaving, port=0, max_sessions=4, backend="pipe", num_workers=1, step_timeout_s=1.5) as server:
        yield server


def test_a_slow_step_delays_nobody_in_the_same_process(crowded):
    with HttpEnvClient(crowded.url) as slow, HttpEnvClient(crowded.url) as other:
        assert slow.reset().observation.obs[1] == other.reset().observation.obs[1], "one process"
        for _ in range(2):  # unexpected at first, known to be slow the second time
            over = threading.Event()
            thread = threading.Thread(target=lambda over=over: (slow.step(5), over.set()))
            thread.start()
            steps = 0
            while not over.is_set():
                if other.step(0).done:
                    other.reset()
                steps += not over.is_set()
            thread.join()
            assert steps >= 5, "the other session stood still"
            slow.reset()


@pytest.mark.parametrize(("action", "why"), [(3, "exit"), (2, "step_timeout_s")], ids=["crash", "hang"])
def test_who_shares_a_lost_process_is_told_and_goes_on(crowded, action, why):
    with HttpEnvClient(crowded.url) as culprit, HttpEnvClient(crowded.url) as other:
        before = other.reset().observation.obs[1]
        culprit.reset()
        with pytest.raises(EnvError, match=why):
            culprit.step(action)
        with pytest.raises(EnvError, match="worker") as told:
            other.step(0)
        assert told.value.details["kind"] == "lost"
        assert other.reset().observation.obs[1] != before, "a new process"
        assert other.step(0).observation.obs[0] == 1
        culprit.reset()
        assert culprit.step(0).observation.obs[0] == 1


def test_the_other_processes_feel_nothing():
    with Server(Misbehaving, port=0, max_sessions=4, num_workers=2) as server:
        with HttpEnvClient(server.url) as culprit, HttpEnvClient(server.url) as other:
            mine, theirs = culprit.reset().observation.obs[1], other.reset().observation.obs[1]
            assert mine != theirs, "sessions are dealt out to processes in turn"
            with pytest.raises(EnvError, match="exit"):
                culprit.step(3)
            assert other.step(0).observation.obs[:2] == pytest.approx([1, theirs])


def test_an_environment_keeps_its_thread():
    with Server(Homesick, port=0, max_sessions=6, backend="pipe", num_workers=1) as server:

        async def talk(index):
            rng = np.random.default_rng(index)
            async with AsyncEnvClient(server.url) as client:
                for _ in range(3):
                    await client.reset()
                    for action in (rng.random(15) < 0.2).astype(int).tolist():
                        result = await client.step({"action": action})
                        assert (result.observation.obs, result.reward) == (action, action)

        async def everybody():
            await asyncio.gather(*(talk(index) for index in range(12)))

        asyncio.run(everybody())


@pytest.mark.parametrize(
    ("env", "options"),
    [(Echo, {"backend": "thread"}), (Echo, {"workers": 2}), (Echo, {"workers": 4}), (AsyncEcho, {})],
    ids=["thread", "shared", "process each", "aio"],
)
def test_the_loop_hears_of_what_is_done(env, options, monkeypatch):
    """Without its timer: every answer comes because a worker rang."""
    monkeypatch.setattr(session_host, "_LOOK_S", 1000.0)
    with Server(env, port=0, max_sessions=4, **options) as server, HttpEnvClient(server.url) as client:
        client.reset(horizon=1000)
        for n in range(1, 20):
            assert client.step({"message": "hello"}).observation.n == n
