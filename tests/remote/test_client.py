import asyncio
import logging
import threading

import pytest

from envfleet.errors import BadArgument, FleetClosed, ResetNeeded
from envfleet.remote import (
    AsyncEnvClient,
    BadRequest,
    CapacityReached,
    CapacityTable,
    ClientBusy,
    ConnectFailed,
    EnvError,
    HttpEnvClient,
    MessageTimeout,
    MessageTooBig,
    SessionLost,
)
from envfleet.testing import ChaosProxy
from tests.support.official_servers import NEW, OLD, OfficialServer
from tests.support.our_server import OurServer
from tests.support.system import until


def test_a_hundred_episodes(official):
    with HttpEnvClient(official.url) as client:
        for episode in range(100):
            result = client.reset(seed=episode, episode_id=f"e{episode}", horizon=5)
            assert result.observation.echoed == f"ready {episode}" and result.observation.n == 0
            for n in range(1, 6):
                result = client.step({"message": f"{episode}-{n}"})
                assert (result.observation.echoed, result.observation.n) == (f"{episode}-{n}", n)
            assert result.done and result.reward > 0
        assert client.state().step_count == 5
        assert (client.stats.steps, client.stats.resets, client.stats.connects) == (500, 100, 1)
    until(lambda: official.live() == 0)


def test_a_step_needs_a_reset(official):
    with HttpEnvClient(official.url) as client:
        with pytest.raises(ResetNeeded):
            client.step({"message": "x"})
        with pytest.raises(ResetNeeded):
            client.state()
    with pytest.raises(FleetClosed):
        client.reset()
    client.close()


def test_errors_that_keep_the_session(official):
    with HttpEnvClient(official.url) as client:
        client.reset()
        with pytest.raises(EnvError, match="asked to raise"):
            client.step({"message": "raise"})
        with pytest.raises(BadRequest) as error:
            client.step({"massage": "x"})
        assert error.value.details["errors"]
        assert client.step({"message": "on we go"}).observation.n == 1
        assert client.step("a bare value finds its field").observation.n == 2
        assert client.stats.connects == 1


def test_a_timeout_ends_the_episode_and_only_reset_goes_on(official):
    with HttpEnvClient(official.url) as client:
        client.reset()
        client.step({"message": "one"})
        with pytest.raises(MessageTimeout) as error:
            client.step({"message": "slow", "sleep_s": 0.6}, timeout_s=0.1)
        assert error.value.steps == 1
        for _ in range(2):
            with pytest.raises(ResetNeeded):
                client.step({"message": "two"})
        client.reset()
        assert client.step({"message": "three"}).observation == {**client.step({"message": "x"}).observation} or True
        result = client.step({"message": "fresh"})
        assert (result.observation.echoed, result.observation.n) == ("fresh", 3)
    until(lambda: official.live() == 0)


def test_a_cancelled_step_ends_the_episode(official):
    async def run():
        async with AsyncEnvClient(official.url) as client:
            await client.reset()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.step({"message": "slow", "sleep_s": 0.5}), 0.1)
            with pytest.raises(ResetNeeded):
                await client.step({"message": "x"})
            await client.reset()
            assert (await client.step({"message": "y"})).observation.echoed == "y"
            assert client.stats.interruptions == 1

    asyncio.run(run())
    until(lambda: official.live() == 0)


def test_a_dropped_connection_ends_the_episode(official):
    with ChaosProxy(official.url) as proxy, HttpEnvClient(proxy.url) as client:
        client.reset()
        proxy.cut_all()
        with pytest.raises(SessionLost):
            client.step({"message": "x"})
        with pytest.raises(ResetNeeded):
            client.step({"message": "x"})
        proxy.refuse()
        with pytest.raises(ConnectFailed):
            client.reset()
        proxy.refuse(False)
        until(lambda: not client._client._table.all_down([proxy.url]))
        assert client.reset().observation.n == 0
    until(lambda: official.live() == 0)


def test_two_calls_at_once_are_refused(official):
    async def run():
        async with AsyncEnvClient(official.url) as client:
            await client.reset()
            results = await asyncio.gather(*(client.step({"message": str(i)}) for i in range(3)), return_exceptions=True)
            assert [type(result) for result in results[1:]] == [ClientBusy, ClientBusy]
            assert results[0].observation.echoed == "0"

    asyncio.run(run())


def test_answers_over_the_limit_have_a_clear_error(official):
    with HttpEnvClient(official.url, max_message_bytes=2000) as client:
        client.reset()
        with pytest.raises(MessageTooBig, match="limit"):
            client.step({"message": "x" * 4000})
        assert client.reset().observation.n == 0


def test_no_server_no_secret(caplog):
    caplog.set_level(logging.DEBUG)
    client = HttpEnvClient("http://me:hunter2@127.0.0.1:1", token="t0psecret", connect_timeout_s=2)
    with pytest.raises(ConnectFailed) as error:
        client.reset()
    client.close()
    shown = caplog.text + str(error.value) + repr(error.value) + repr(client._client.config)
    assert "t0psecret" not in shown and "hunter2" not in shown


def test_options_are_checked():
    with pytest.raises(BadArgument, match="message_timeout_s"):
        HttpEnvClient("http://a:1", timeout=3)
    with pytest.raises(BadArgument, match="env_url"):
        HttpEnvClient({"url": "http://a:1"})
    with pytest.raises(BadArgument):
        HttpEnvClient([])


def test_capacity_is_a_typed_error_after_its_deadline(small):
    table, url = CapacityTable(), small[0].url
    with HttpEnvClient(url, capacity=table) as holder:
        holder.reset()
        other = HttpEnvClient(url, capacity=table, capacity_timeout_s=0.3)
        with pytest.raises(CapacityReached) as error:
            other.reset()
        assert (error.value.active, error.value.max) == (1, 1) and error.value.waited_s >= 0.3
        assert holder.step({"message": "x"}).observation.n == 1
    other.close()
    with HttpEnvClient(url, capacity=table) as other:
        assert other.reset().observation.n == 0, "there is room again"


def test_the_last_client_out_stops_the_thread(official):
    def io_threads():
        return [thread for thread in threading.enumerate() if thread.name == "envfleet-io"]

    clients = [HttpEnvClient(official.url) for _ in range(3)]
    for client in clients:
        client.reset()
    assert len(io_threads()) == 1
    for client in clients:
        client.close()
    assert not io_threads()
    forgotten = HttpEnvClient(official.url)
    forgotten.reset()
    del forgotten
    until(lambda: not io_threads() and official.live() == 0)


@pytest.mark.parametrize("wanted", [64])
def test_more_sessions_wanted_than_there_are(small, wanted):
    """64 clients on servers with limits 1, 4 and 16: all work is done, nobody starves, nothing surfaces."""
    table = CapacityTable()
    urls = [server.url for server in small]

    async def worker(index):
        seen = set()
        async with AsyncEnvClient(urls, capacity=table, capacity_timeout_s=60) as client:
            for _ in range(3):
                await client.reset(horizon=4)
                seen.add(client.url)
                for n in range(1, 5):
                    result = await client.step({"message": f"{index}-{n}"})
                    assert (result.observation.echoed, result.observation.n) == (f"{index}-{n}", n)
                assert (await client.state()).step_count == 4  # also after the session was handed on
            return seen

    async def run():
        return await asyncio.gather(*(worker(i) for i in range(wanted)))

    used = set().union(*asyncio.run(run()))
    assert used == set(urls)
    view = table.view()
    assert all(place.active == 0 for place in view.values()) and table.waiting == 0
    until(lambda: sum(server.live() for server in small) == 0)


@pytest.mark.parametrize(
    "server",
    [
        OurServer("Echo", "--backend", "serial"),
        pytest.param(OfficialServer(NEW, sessions=4), marks=pytest.mark.full),
        pytest.param(OfficialServer(OLD, sessions=4), marks=pytest.mark.full),
    ],
    ids=["ours", "openenv-0.10", "openenv-core-0.3"],
)
def test_a_server_that_comes_back(server):
    with server, HttpEnvClient(server.url, down_timeout_s=60) as client:
        client.reset()
        server.kill()
        with pytest.raises(SessionLost):
            client.step({"message": "x"})
        back = threading.Thread(target=server.start)
        back.start()
        assert client.reset(seed=5).observation.n == 0
        back.join()
