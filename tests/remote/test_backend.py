"""The remote backend: a fleet whose slots are sessions."""

import asyncio
import threading
import time

import gymnasium
import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import BadArgument, EnvFailed, EnvTimeout
from envfleet.remote import AsyncEnvClient, CapacityTable, ConnectFailed, Server
from envfleet.remote.remote_backend import RemoteBackend, count_sessions, is_remote, remote_factory
from envfleet.rollout import Collector
from envfleet.slots.layout import FAULT
from envfleet.testing import ChaosProxy
from tests.support.official_servers import NEW, OfficialServer
from tests.support.our_server import OurServer
from tests.support.served_envs import Misbehaving
from tests.support.system import until


@pytest.fixture(scope="module")
def cartpole():
    with Server("CartPole-v1", port=0, max_sessions=16, num_workers=2) as server:
        yield server


def make_remote(urls, num_envs=None, *, fleet=None, **env_kwargs):
    return ef.make(urls, num_envs, env_kwargs=env_kwargs, **(fleet or {}))


@pytest.mark.parametrize("on_end", ["reset", "wait"])
def test_the_same_rows_as_a_local_fleet(cartpole, on_end):
    """One slot life: a remote fleet gives, row for row, what a serial one gives."""
    rng = np.random.default_rng(0)
    with (
        ef.make("CartPole-v1", num_envs=5, backend="serial", on_end=on_end) as local,
        make_remote(cartpole.url, num_envs=5, fleet={"on_end": on_end}) as remote,
    ):
        assert remote.single_observation_space == local.single_observation_space
        assert remote.single_action_space == local.single_action_space
        assert remote.plan.backend == "remote"
        ours, theirs = remote.reset(seed=3), local.reset(seed=3)
        for _ in range(120):
            for name in ("obs", "reward", "terminated", "truncated", "episode", "step", "length", "ep_return",
                         "seed", "scored", "status", "final_obs"):  # fmt: skip
                assert np.array_equal(getattr(ours, name), getattr(theirs, name), equal_nan=True), name
            actions = rng.integers(0, 2, 5)
            ours, theirs = remote.step(actions), local.step(actions)
        assert ours.episode.min() >= 2
    until(lambda: cartpole.active_sessions == 0)


def test_send_and_receive_apart(cartpole):
    with make_remote(cartpole.url, num_envs=6) as fleet:
        fleet.reset(seed=0)
        fleet.send([0, 1, 0], slots=[1, 3, 5])
        seen = set()
        while len(seen) < 3:
            batch = fleet.recv(at_least=1, timeout_s=10)
            seen |= set(batch.slots.tolist())
        assert seen == {1, 3, 5}


def test_tasks_are_reset_arguments_and_max_steps_truncates(official):
    with make_remote(official.url, num_envs=2, actions=["a", "bb"], max_steps=4) as fleet:
        batch = fleet.reset(seed=5, tasks=[{"horizon": 2}, {"horizon": 50}])
        assert [obs for obs in batch.obs["echoed"]] == ["ready 5", "ready 6"]
        fleet.step([0, 1])
        batch = fleet.step([1, 1])
        assert batch.terminated.tolist() == [True, False]
        assert batch.final_obs["echoed"][0] == "bb" and batch.final_obs["n"][0] == 2
        fleet.step([0, 0])
        batch = fleet.step([0, 0])
        assert batch.truncated.tolist() == [False, True] and batch.length[1] == 4
        assert batch.ep_return[1] == pytest.approx(0.6)
        assert fleet.task_value(batch.task[0]) == {"horizon": 2}


def test_faults_are_rows_and_the_run_goes_on():
    with Server(Misbehaving, port=0, max_sessions=4, num_workers=4) as server:
        with make_remote(server.url, num_envs=3) as fleet:
            fleet.reset(seed=0)
            batch = fleet.step([0, 1, 0])
            assert batch.status.tolist() == [0, FAULT, 0] and batch.scored.tolist() == [True, False, True]
            assert "asked to raise" in str(fleet.faults[0])
            batch = fleet.step([0, 0, 0])
            assert batch.status.tolist() == [0, 0, 0] and batch.step[1] == 0
        with make_remote(server.url, num_envs=2, fleet={"on_fault": "raise"}) as fleet:
            fleet.reset(seed=0)
            with pytest.raises(EnvFailed, match="asked to raise"):
                fleet.step([1, 0])
        until(lambda: server.active_sessions == 0)


def test_deadlines_are_enforced_and_the_slot_is_built_anew():
    with Server(Misbehaving, port=0, max_sessions=4, num_workers=4, step_timeout_s=3.0) as server:
        with make_remote(server.url, num_envs=2, message_timeout_s=30.0, fleet={"step_timeout_s": 1.0}) as fleet:
            fleet.reset(seed=0)
            batch = fleet.step([0, 2])  # hangs; the server ends it after our own deadline
            assert batch.status.tolist() == [0, FAULT]
            assert isinstance(fleet.faults[0].error(), EnvTimeout)
            for _ in range(4):
                batch = fleet.step([0, 0])
            assert batch.status.tolist() == [0, 0] and not len(fleet.quarantined)
        until(lambda: server.active_sessions == 0)


def test_a_pause_of_the_caller_trips_no_keep_alive():
    with (
        Server("CartPole-v1", port=0, max_sessions=2, num_workers=1, ping_s=0.2) as server,
        make_remote(server.url, num_envs=2, ping_interval_s=0.2, ping_timeout_s=0.2) as fleet,
    ):
        fleet.reset(seed=0)
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:  # the caller's thread is busy, as in a gradient step
            sum(range(1000))
        assert fleet.step([0, 1]).status.tolist() == [0, 0]


@pytest.mark.parametrize(
    "build",
    [
        lambda: OurServer("Echo", "--backend", "serial", "--max-sessions", "8"),
        pytest.param(lambda: OfficialServer(NEW, sessions=8), marks=pytest.mark.full),
    ],
    ids=["ours", "openenv-0.10"],
)
def test_a_server_dies_its_slots_move_and_come_back(build):
    with build() as a, build() as b:
        options = {"capacity": CapacityTable(), "actions": ["x"]}
        with make_remote([a.url, b.url], num_envs=8, **options) as fleet:
            fleet.reset(seed=0)
            assert (a.live(), b.live()) == (4, 4)
            fleet.step([0] * 8)
            a.kill()
            batch = fleet.step([0] * 8)
            assert (batch.status == FAULT).sum() == 4 and b.live() == 8
            batch = fleet.step([0] * 8)
            assert (batch.status == 0).all()
            b.kill()
            back = threading.Thread(target=b.start)
            back.start()
            batch = fleet.step([0] * 8)
            back.join()
            assert (batch.status == FAULT).all()
            assert (fleet.step([0] * 8).status == 0).all()
        until(lambda: b.live() == 0)
        a.start()


def test_more_slots_than_sessions(small):
    """64 slots on 1 + 4 + 16 sessions, received as they come: every slot completes episodes, nothing surfaces."""
    urls = [server.url for server in small]
    with make_remote(urls, num_envs=64, actions=["x"], capacity=CapacityTable(), fleet={"on_end": "wait"}) as fleet:
        everybody = np.arange(64)
        fleet.assign(everybody, tasks={"horizon": 3})
        fleet._submit(everybody, 1)  # reset of all without waiting for all: there are not that many sessions
        episodes = np.zeros(64, int)
        while episodes.min() < 2:
            batch = fleet.recv(at_least=1, timeout_s=60)
            assert (batch.status == 0).all(), fleet.faults
            episodes[batch.slots[batch.terminated]] += 1
            again = batch.slots[~(batch.terminated & (episodes[batch.slots] >= 2))]
            if len(again):
                fleet.send([0] * len(again), again)
        assert not fleet.faults
    until(lambda: sum(server.live() for server in small) == 0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_collector_goes_on_with_the_sessions_there_are(mode):
    with Server("Echo", port=0, max_sessions=3, backend="serial") as server:
        with make_remote(server.url, num_envs=8, capacity=CapacityTable()) as fleet:
            collector = Collector(fleet, random_actions=True, seed=1, mode=mode)
            with pytest.warns(RuntimeWarning, match="sessions for 3 of 8 slots"):
                rollouts = collector.collect(20)
            assert [rollout.episode for rollout in rollouts] == list(range(20))
            assert len({rollout.slot for rollout in rollouts}) == 3
            assert collector.ledger.used == 20 and not fleet.faults


def test_chaos_under_a_fleet(official):
    with ChaosProxy(official.url, stall=0.005, cut=0.01, stall_s=0.6, seed=1) as proxy:
        options = {"actions": ["x", "yy"], "message_timeout_s": 0.3, "connect_timeout_s": 0.3}
        table, policy = CapacityTable(), {"max_restarts": 1000}
        with make_remote(proxy.url, num_envs=8, capacity=table, fleet=policy, **options) as fleet:
            fleet.reset(seed=0)
            count = np.zeros(8, int)
            for _ in range(60):
                batch = fleet.step([1] * 8)
                good = batch.scored
                n = np.where(batch.ended, batch.final_obs["n"], batch.obs["n"])
                count = np.where(good, count + 1, 0)
                assert (n[good] == count[good]).all(), "an answer met the wrong request"
                count[batch.ended] = 0
            assert fleet.faults and not len(fleet.quarantined)
    until(lambda: official.live() == 0)


def test_make_takes_addresses(cartpole):
    with ef.make([cartpole.url], num_envs=3, env_kwargs={"max_steps": 5}) as fleet:
        assert fleet.plan.backend == "remote"
        fleet.reset(seed=0)
        for _ in range(5):
            batch = fleet.step([0, 1, 0])
        assert batch.truncated.all() and not fleet.faults
    with pytest.raises(BadArgument, match="remote"):
        ef.make(cartpole.url, num_envs=2, backend="shm")


def test_the_sessions_that_are_free_are_counted(small):
    assert [count_sessions(server.url, 6) for server in small] == [1, 4, 6]
    assert count_sessions([server.url for server in small], 64) == 21
    until(lambda: sum(server.live() for server in small) == 0)


def test_collect_from_the_command_line(small, capsys):
    from envfleet.cli.main import main

    assert main(["collect", small[1].url, "--num-envs", "8", "--agent", "random", "--episodes", "12"]) == 0
    said = capsys.readouterr().out
    assert "4 sessions free" in said and "started 12 = used 12 + dropped 0 + failed 0" in said
    until(lambda: small[1].live() == 0)


def test_collect_takes_a_token(capsys, monkeypatch, tmp_path):
    from envfleet.cli.main import main

    with Server("Echo", port=0, max_sessions=2, backend="serial", token="sesame") as server:
        command = ["collect", server.url, "--num-envs", "2", "--episodes", "4"]
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "token" in said and "sesame" not in said
        monkeypatch.setenv("ENVFLEET_TOKEN", "sesame")
        assert main(command) == 0
        monkeypatch.setenv("ENVFLEET_TOKEN", "wrong")
        (tmp_path / "token").write_text("sesame\n")
        assert main([*command, "--token-file", str(tmp_path / "token")]) == 0
        assert "sesame" not in "".join(capsys.readouterr())


def test_collect_refuses_a_token_without_an_address(capsys, tmp_path):
    from envfleet.cli.main import main

    (tmp_path / "token").write_text("sesame\n")
    assert main(["collect", "CartPole-v1", "--episodes", "1", "--token-file", str(tmp_path / "token")]) == 2
    assert "--token-file is for OpenEnv servers, and 'CartPole-v1' is no address" in capsys.readouterr().err


def test_who_waits_for_a_lost_server_says_so(caplog):
    async def two():
        table = CapacityTable()
        clients = [AsyncEnvClient("http://127.0.0.1:9", down_timeout_s=0.3, capacity=table) for _ in range(2)]
        return await asyncio.gather(*(client.reset() for client in clients), return_exceptions=True)

    assert all(isinstance(error, ConnectFailed) for error in asyncio.run(two()))
    told = [record.getMessage() for record in caplog.records if record.name == "envfleet.remote"]
    assert told == ["no server answers at http://127.0.0.1:9: waiting up to 0.3 s for one"]


def test_what_make_is_told():
    assert is_remote(["http://a:1", "wss://b"]) and is_remote({"env_url": "http://a:1"})
    assert not is_remote("CartPole-v1") and not is_remote([]) and not is_remote([gymnasium.make])
    with pytest.raises(BadArgument):
        remote_factory("CartPole-v1")
    with pytest.raises(ConnectFailed):
        make_remote("http://127.0.0.1:1", num_envs=2)
    with pytest.raises(BadArgument, match="unknown client options"):
        make_remote("http://127.0.0.1:1", num_envs=2, nonsense=3)
    assert RemoteBackend.name == "remote"


class Ordered(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        pos=gymnasium.spaces.Box(-9, 9, (2,)),
        goal=gymnasium.spaces.Dict(z=gymnasium.spaces.Box(-9, 9, (1,)), a=gymnasium.spaces.Discrete(2)),
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"pos": np.float32([1, 2]), "goal": {"z": np.float32([3]), "a": 1}}, {}

    def step(self, action):
        return self.reset()[0], 0.0, True, False, {}


def test_parts_of_a_dict_keep_their_order():
    """A network reads them one after another: in another order it would take one for the other."""
    with Server(Ordered, port=0, max_sessions=1, backend="thread") as server, make_remote(server.url, 1) as fleet:
        assert list(fleet.single_observation_space) == ["pos", "goal"]
        assert list(fleet.single_observation_space["goal"]) == ["z", "a"]
        obs = fleet.reset(seed=0).obs
        assert list(obs) == ["pos", "goal"] and list(obs["goal"]) == ["z", "a"]
