"""Bad lines: whatever stalls or breaks, no answer meets the wrong request and no session is left behind."""

import asyncio
import time

import pytest

from envfleet.errors import ResetNeeded
from envfleet.remote import AsyncEnvClient, CapacityReached, CapacityTable, ConnectFailed, SessionInterrupted
from envfleet.testing import ChaosProxy

STALL_S = 0.5


async def talk(url, index, steps, table):
    """Steps with counters; returns the seconds of the last clean hundred and how often it was interrupted."""
    done = interrupted = 0
    async with AsyncEnvClient(
        url, capacity=table, message_timeout_s=STALL_S / 2, connect_timeout_s=STALL_S / 2, down_timeout_s=30
    ) as client:
        while done < steps:
            try:
                tag = f"{index}/{done}"
                seed = index * 100_000 + done
                result = await client.reset(seed=seed, horizon=20)
                assert (result.observation.echoed, result.observation.n) == (f"ready {seed}", 0)
                for n in range(1, 21):
                    result = await client.step({"message": f"{tag}/{n}"})
                    assert (result.observation.echoed, result.observation.n) == (f"{tag}/{n}", n)
                    done += 1
            except SessionInterrupted:
                interrupted += 1
                with pytest.raises(ResetNeeded):
                    await client.step({"message": "must not be sent"})
            except (ConnectFailed, CapacityReached):
                interrupted += 1
    return interrupted


def run_chaos(server, total, clients=8):
    table = CapacityTable()
    with ChaosProxy(server.url, stall=0.01, cut=0.01, stall_s=STALL_S, seed=3) as proxy:

        async def everybody():
            return await asyncio.gather(*(talk(proxy.url, i, total // clients, table) for i in range(clients)))

        interrupted = sum(asyncio.run(everybody()))
        assert proxy.counts.stalls > 0 and proxy.counts.cuts > 0
        assert interrupted >= 0.5 * (proxy.counts.stalls + proxy.counts.cuts)
        proxy.calm()
        calmed = time.monotonic()
        assert asyncio.run(talk(proxy.url, 99, 200, table)) <= 1
        assert time.monotonic() - calmed < 10, "back at work within 10 s of the last fault"
    deadline = time.monotonic() + 10
    while server.live():
        assert time.monotonic() < deadline, f"{server.live()} sessions leaked"
        time.sleep(0.02)
    assert all(place.active == 0 for place in table.view().values())


def test_no_answer_meets_the_wrong_request(official):
    run_chaos(official, 1_200)


@pytest.mark.full
def test_no_answer_meets_the_wrong_request_in_ten_thousand(official):
    run_chaos(official, 10_000)
