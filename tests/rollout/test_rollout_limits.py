"""Executors under load and with clients that are stuck: bounded streams, deadlines that interrupt, interrupts."""

import asyncio
import math
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from envfleet.errors import BadArgument, LedgerWarning, RolloutsFailed, RolloutTimeout
from envfleet.remote import AsyncEnvClient, HttpEnvClient, OpenEnvGymnasiumWrapper, Server
from envfleet.rollout import AsyncParallelExecutor, BatchedPolicy, ParallelEnvironmentExecutor, ParallelRolloutCollector
from envfleet.rollout.executors.executor import SPARE
from envfleet.rollout.timing import Verdict
from tests.support.rollout_clients import AsyncClient, Counter, stay
from tests.support.system import child_env, until

MODES = ["thread", "async", "process"]


def pid_file(folder):
    class Marked(Counter):  # each rollout that starts leaves a file, also from another process
        def reset(self, seed=None, options=None):
            (folder / f"{seed}").touch()
            return super().reset(seed, options)

    return lambda: Marked(1)


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_consumer_bounds_what_is_started(mode, tmp_path, no_leaks):
    factory, num_workers = pid_file(tmp_path), 2
    with ParallelRolloutCollector(mode, num_workers=num_workers) as collector:
        stream = collector.iter_rollouts([factory] * 40, stay, seeds=range(40))
        for taken in range(1, 30):
            next(stream)
            assert len(list(tmp_path.iterdir())) <= taken + num_workers + SPARE
        stream.close()
    assert len(list(tmp_path.iterdir())) < 40


def test_a_slow_consumer_on_its_own_loop_bounds_what_is_started():
    started = []

    class Counted(AsyncClient):
        async def reset(self, seed=None, options=None):
            started.append(seed)
            return await super().reset(seed, options)

    async def main():
        async with AsyncParallelExecutor(num_workers=2) as executor:
            taken = 0
            async for _ in executor.iter_rollouts([Counted(1) for _ in range(40)], stay):
                taken += 1
                for _ in range(20):
                    await asyncio.sleep(0)  # the collection gets all the turns it wants
                assert len(started) <= taken + 2 + SPARE
            return taken

    assert asyncio.run(main()) == 40


def test_a_stream_that_nobody_takes_holds_up_neither_other_collections_nor_shutdown(no_leaks):
    with ParallelEnvironmentExecutor(num_workers=3) as executor:
        left = executor.iter_rollouts([Counter(1) for _ in range(30)], stay)
        next(left)
        next(left)
        assert len(executor.collect_rollouts([Counter(1) for _ in range(9)], stay)) == 9
        assert executor.shutdown(timeout_s=20)
        with pytest.raises(RolloutsFailed, match=r"given up|is closed"):
            list(left)


gate = threading.Event()


class Stuck(Counter):
    def step(self, action):
        if self.t == 2:
            gate.wait(60)
        return super().step(action)


class StuckInReset(Counter):
    def reset(self, seed=None, options=None):
        gate.wait(60)
        return super().reset(seed, options)


class StuckAwaiting(AsyncClient):
    async def step(self, action):
        if self.t == 2:
            await asyncio.sleep(60)
        return await super().step(action)


async def awaited(obs, done):
    return 1


@pytest.fixture
def let_go():
    gate.clear()
    yield
    gate.set()


@pytest.mark.parametrize(
    "mode, client, agent, steps",
    [
        ("thread", Stuck, stay, 2),
        ("thread", StuckInReset, stay, 0),
        ("thread", StuckAwaiting, stay, 2),
        ("async", Stuck, stay, 2),
        ("async", Stuck, awaited, 2),
        ("async", StuckInReset, awaited, 0),
        ("async", StuckAwaiting, stay, 2),
        ("process", lambda: Stuck(5), stay, 0),
    ],
)
def test_a_deadline_ends_a_rollout_whose_client_is_stuck(mode, client, agent, steps, let_go):
    clients = [client, lambda: Counter(3)] if mode == "process" else [client(5), Counter(3)]
    with ParallelRolloutCollector(mode, num_workers=1, on_error="skip", rollout_timeout_s=0.2) as collector:
        stuck, good = collector.collect(clients, agent)
        again = collector.collect(clients[1:] * 3, stay)  # the one worker is there
    assert isinstance(stuck.error, RolloutTimeout) and len(stuck) == steps == len(stuck.actions)
    assert good.error is None and len(good) == 3 and [len(rollout) for rollout in again] == [3] * 3


@pytest.mark.parametrize("mode, agent", [("thread", stay), ("async", awaited)])
def test_a_stuck_client_is_not_used_before_its_call_returns(mode, agent, let_go):
    client = Stuck(5)
    with ParallelRolloutCollector(mode, num_workers=2, on_error="skip", rollout_timeout_s=1.0) as collector:
        first, second = collector.collect([client, client], agent)
        assert isinstance(first.error, RolloutTimeout) and "earlier rollout" in str(second.error)
        assert len(client.resets) == 1
        gate.set()
        until(lambda: not collector.executor._stuck)
        (third,) = collector.collect([client], agent)
    assert len(third) == 5 and len(client.resets) == 2


@pytest.mark.parametrize("mode", ["thread", "async"])
def test_the_agent_is_not_asked_by_a_rollout_that_was_given_up(mode, let_go):
    asked = []
    with ParallelRolloutCollector(mode, num_workers=1, on_error="skip", rollout_timeout_s=0.1) as collector:
        (late,) = collector.collect([StuckInReset(5)], lambda obs, done: asked.append(obs) or 1)
        assert isinstance(late.error, RolloutTimeout) and collector.executor._stuck
        gate.set()
        until(lambda: not collector.executor._stuck)
    assert asked == []


@pytest.mark.parametrize("mode, agent", [("thread", stay), ("thread", awaited), ("async", awaited)])
def test_a_factory_that_hangs_once_concerns_no_other_rollout(mode, agent, let_go):
    builds = []

    def build():
        builds.append(1)
        if len(builds) == 1:
            gate.wait(60)
        return Counter(3)

    with ParallelRolloutCollector(mode, num_workers=1, on_error="skip", rollout_timeout_s=0.2) as collector:
        stuck, *others = collector.collect([build] * 4, agent)
    assert isinstance(stuck.error, RolloutTimeout) and [len(rollout) for rollout in others] == [3] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("mode", ["thread", "async"])
def test_a_rollout_that_collects_on_its_own_executor_is_refused_and_does_not_wait_forever(mode, inline):
    executor = ParallelEnvironmentExecutor(1) if mode == "thread" else AsyncParallelExecutor(1, inline_agent=inline)

    async def awaits(obs, done):
        return len(await executor.collect_rollouts([Counter(1)], stay))

    agent = awaits if mode == "async" and inline else lambda obs, done: len(executor.run([Counter(1)], stay))
    with executor, pytest.raises(RolloutsFailed, match="use another executor there"):
        executor.run([Counter(3)], agent)


def test_one_rollout_on_the_callers_thread_has_a_deadline_too(let_go):
    with ParallelEnvironmentExecutor(num_workers=1, rollout_timeout_s=0.1) as executor:
        futures = [executor.executor.submit(executor.collect_rollout, Stuck(5), stay) for _ in range(2)]
        assert [type(future.exception()) for future in futures] == [RolloutTimeout] * 2


def test_the_deadline_counts_from_when_a_worker_has_imported_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(0.8)\nfrom tests.support.rollout_clients import Counter\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_module

    with ParallelRolloutCollector("process", num_workers=1, rollout_timeout_s=0.3) as collector:
        assert len(collector.collect([slow_module.Counter], stay)[0]) == 3


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_does_not_wait_for_the_running_episode(mode, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, threading, time
            from envfleet.rollout import ParallelRolloutCollector
            from tests.support.rollout_clients import Counter

            parent = os.getpid()

            class Slow(Counter):
                def step(self, action):
                    os.kill(parent, signal.SIGINT)
                    time.sleep(60)

            try:
                with ParallelRolloutCollector("{mode}", num_workers=1) as collector:
                    collector.collect([Slow] * 3, lambda obs, done: 0)
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=40, env=child_env())
    assert done.stdout == "interrupted\n"


def test_addresses_in_place_of_clients():
    with Server("echo", port=0, backend="thread", max_sessions=2) as server:
        for mode in MODES:
            with ParallelRolloutCollector(mode, num_workers=4 if mode != "process" else 2) as collector:
                clients = [server.url] * 2 + [{"env_url": server.url, "capacity_timeout_s": 30.0}]
                rollouts, stats = collector.collect_with_stats(clients, lambda obs, done: "hello")
                assert [len(rollout) for rollout in rollouts] == [10] * 3
                assert set(stats.seconds) == {"agent", "env", "network", "waiting", "idle"} and stats.seconds["network"] > 0
    with ParallelRolloutCollector() as collector:
        for bad, text in (
            ("http://a", "give a list"),
            ([3], r"clients\[0\] is int"),
            (["nope"], r"clients\[0\]: a server's address"),
        ):
            with pytest.raises(BadArgument, match=text):
                collector.collect(bad, stay)


def test_a_client_that_waits_gets_the_session_of_an_idle_one(no_leaks):
    with Server("echo", port=0, backend="thread", max_sessions=2) as server:
        clients = [HttpEnvClient(server.url, capacity_timeout_s=4.0) for _ in range(5)]
        with ParallelRolloutCollector("thread", num_workers=2) as collector:
            for max_steps in (1000, 3, 3):  # the episode's own end, and the collector's
                assert len(collector.collect(clients, lambda obs, done: "hello", max_steps=max_steps)) == 5
        for client in clients:
            client.close()


def test_a_reset_at_the_moment_a_session_is_passed_on_gets_another_one():
    async def main(url):
        loop, client = asyncio.get_running_loop(), AsyncEnvClient(url)
        for episode in range(20):
            await client.reset(episode_id=f"e{episode}")
            await client.step("hello")
            client.offer_session()
            resets = []
            # The reset begins right after the session was given away, and before anything else runs.
            loop.call_soon(lambda resets=resets: resets.append(loop.create_task(client.reset(episode_id="next"))))
            client._table._take_offer((client.url,))
            while not resets:
                await asyncio.sleep(0)
            assert (await resets[0]).observation.n == 0
            state = await client.state()
            assert (state.episode_id, state.step_count) == ("next", 0)
        await client._passing_on
        await client.close()
        return client._table.view()[client.url].active

    with Server("echo", port=0, backend="thread", max_sessions=4) as server:
        assert asyncio.run(main(server.url)) == 0


def test_an_offer_that_is_taken_late_ends_no_later_episode():
    async def main(url):
        client = AsyncEnvClient(url)
        await client.reset()
        client.offer_session()
        _, give = client._table._offers.pop(id(client))  # another thread takes it, and is interrupted there
        await client.reset()
        give()
        await asyncio.sleep(0)
        step = await client.step("hello")
        await client.close()
        return step.observation.n

    with Server("echo", port=0, backend="thread") as server:
        assert asyncio.run(main(server.url)) == 1


def test_a_client_travels_without_its_session_and_shows_no_secret():
    with Server("echo", port=0, backend="thread", token="secret") as server, HttpEnvClient(server.url, token="secret") as client:
        client.reset()
        copy = pickle.loads(pickle.dumps(client))
        assert not copy.connected and copy.reset().observation.n == 0
        copy.close()
        assert repr(client) == f"HttpEnvClient('{server.url}')"
        with ParallelRolloutCollector("process", num_workers=1) as collector:
            assert len(collector.collect([client], lambda obs, done: "hello")[0]) == 10
    assert "secret" not in repr(AsyncEnvClient("http://me:secret@a:8000", token="secret"))


def test_a_mapping_has_all_options_of_the_wrapper():
    with Server("echo", port=0, backend="thread") as server:
        options = {
            "env_url": server.url,
            "observation_mode": "raw_text",
            "text_length": 9,
            "max_steps": 2,
            "connect_timeout_s": 5.0,
        }
        env = OpenEnvGymnasiumWrapper(options)
        assert env.observation_space.max_length == 9 and env.client._client.config.connect_timeout_s == 5.0
        env.reset()
        assert [env.step("hi")[3] for _ in range(2)] == [False, True]
        env.close()
        with pytest.raises(BadArgument, match="has no argument 'observaton_mode': did you mean observation_mode"):
            OpenEnvGymnasiumWrapper({"env_url": server.url, "observaton_mode": "text"})


def test_a_bare_action_asks_for_the_schema_once_for_all_clients(monkeypatch):
    asked = []
    real = __import__("envfleet.remote.client", fromlist=["get_json"]).get_json
    monkeypatch.setattr("envfleet.remote.client.get_json", lambda *args: asked.append(args[1]) or real(*args))
    with Server("echo", port=0, backend="thread") as server, ParallelRolloutCollector(num_workers=8) as collector:
        assert len(collector.collect([server.url] * 8, lambda obs, done: "hello")) == 8
    assert asked == ["/schema"]


def test_numbers_that_would_mislead_are_warned_of():
    class NotANumber(Counter):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return (obs, math.nan if self.t == 2 else 1.0, *rest)

    with ParallelRolloutCollector() as collector, pytest.warns(RuntimeWarning, match="'lab' gave the reward nan at step 1"):
        collector.collect([NotANumber(3)], stay, env_names=["lab"])
    rules = {"on_error": "retry", "max_retries": 1, "backoff_s": 0.0}
    with ParallelRolloutCollector(**rules) as collector, pytest.warns(LedgerWarning, match="in all of its 2 attempts"):
        rollouts, stats = collector.collect_with_stats([Counter(3, fail_at=0), Counter(3)], stay, env_names=["lab", "sea"])
    assert math.isnan(stats.env_breakdown["lab"]) and stats.env_breakdown["sea"] == 3.0
    assert repr(rollouts) == "Rollouts(2 episodes, 3 steps, 1 failed)"
    assert [repr(r) for r in rollouts] == ["Rollout('lab', 0 steps, return 0, ClientFailed)", "Rollout('sea', 3 steps, return 3)"]


def test_wrong_arguments_are_named():
    for mode in MODES:
        for options, text in (
            ({"max_workers": 0}, "max_workers=0"),
            ({"num_workers": "8"}, "num_workers='8'"),
            ({"max_retry": 3}, "has no argument 'max_retry': did you mean max_retries"),
            ({"rollout_timeout_s": "2"}, "rollout_timeout_s='2'"),
        ):
            with pytest.raises(BadArgument, match=text):
                ParallelRolloutCollector(mode, **options)
    with ParallelRolloutCollector() as collector, pytest.raises(BadArgument, match="has no argument 'seed': did you mean seeds"):
        collector.collect([Counter()], stay, seed=3)
    with AsyncParallelExecutor(max_workers=50) as executor:
        assert executor.num_workers == 50


def test_one_error_of_a_batched_policy_does_not_grow_with_the_episodes():
    def broken(batch):
        raise KeyError("weights")

    with ParallelRolloutCollector(num_workers=8, on_error="skip") as collector:
        rollouts = collector.collect([Counter(2) for _ in range(8)], BatchedPolicy(broken, stack=list))
    depths = []
    for rollout in rollouts:
        frame, depth = rollout.error.__cause__.__traceback__, 0
        while frame is not None:
            frame, depth = frame.tb_next, depth + 1
        depths.append(depth)
    assert max(depths) < 10


def test_tensors_of_one_field():
    pytest.importorskip("torch")

    class Mixed(Counter):
        def step(self, action):
            _, *rest = super().step(action)
            return ({"text": "hi", "board": np.ones(3)}, *rest)

        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            return {"text": "", "board": np.zeros(3)}, {}

    with ParallelRolloutCollector() as collector:
        rollouts = collector.collect([Mixed(2), Mixed(3)], stay)
    assert rollouts.to_tensors(observation="board")["observations"].shape == (2, 4, 3)
    assert "observations" not in rollouts[0].to_tensors(without=["observations"])
    for record in (rollouts, rollouts[0]):
        with pytest.raises(BadArgument, match=r"observations/text of Rollout\('env_0'"):
            record.to_tensors()
        with pytest.raises(BadArgument, match=r"have fields \['board', 'text'\]"):
            record.to_tensors(observation="bord")


def test_a_serial_fleet_is_not_advised_to_be_serial():
    seconds = {"policy": 0.1, "env": 0.1, "slowest": 0.0, "transfer": 1.0}
    assert "serial" in Verdict(seconds, []).sentence and "serial" not in Verdict(seconds, [], is_serial=True).sentence
    assert Verdict({"agent": 3.0, "env": 1.0}, [], mode="clients").sentence.startswith("agent-bound: 75 %")


def test_leaving_a_collection_does_not_wait_for_a_stuck_slot():
    import envfleet as ef
    from envfleet.rollout import Collector
    from tests.support.rollout_envs import StuckAtThree

    with ef.make([StuckAtThree, lambda: StuckAtThree(stuck=False)], backend="pipe", num_workers=2) as fleet:
        collector = Collector(fleet, random_actions=True, mode="async", at_least=1)
        episodes = collector.episodes(100, order="finish")
        next(episodes)
        episodes.close()
        assert {fault.kind for fault in fleet.faults} <= {"abandoned"}
        assert fleet.reset(seed=1).slots.tolist() == [0, 1]
