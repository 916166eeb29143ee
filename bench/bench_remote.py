"""Remote environments: what a step costs a client and a server, and how close waiting sessions come to the ideal.

    python bench/bench_remote.py               all parts
    python bench/bench_remote.py --only client one part: client, latency, server, async (each about a minute)

Every number is a ratio within this run, against the official openenv 0.10.0 client and server (in the venv that
`tests/support/official_servers.py` makes) doing the same work on the same machine. A server's CPU includes its workers'.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]

from envfleet.remote import AsyncEnvClient, CapacityTable  # noqa: E402
from tests.support.official_servers import NEW, OfficialServer, interpreter  # noqa: E402
from tests.support.our_server import OurServer  # noqa: E402

# Runs in the official venv: the same loop with the official async client. Prints steps per second and CPU per step.
OFFICIAL_CLIENT = """
import asyncio, sys, time
from openenv.core import GenericEnvClient
url, clients, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def main():
    sessions = [GenericEnvClient(base_url=url) for _ in range(clients)]
    for session in sessions:
        await session.connect()
        await session.reset(horizon=10**9)
    async def work(session, count):
        for _ in range(count):
            await session.step({"message": "hello"})
    await asyncio.gather(*(work(session, steps // 5) for session in sessions))
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(session, steps) for session in sessions))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(clients * steps / wall, cpu / clients / steps)
    for session in sessions:
        await session.close()
asyncio.run(main())
"""


def official_client(url: str, clients: int, steps: int) -> tuple[float, float]:
    command = [str(interpreter(NEW)), "-c", OFFICIAL_CLIENT, url, str(clients), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rate, cpu = done.stdout.split()
    return float(rate), float(cpu)


def our_client(url: str, clients: int, steps: int) -> tuple[float, float]:
    async def main() -> tuple[float, float]:
        table = CapacityTable()
        sessions = [AsyncEnvClient(url, capacity=table, down_timeout_s=60) for _ in range(clients)]
        await asyncio.gather(*(session.reset(horizon=10**9) for session in sessions))

        async def work(session: AsyncEnvClient, count: int) -> None:
            for _ in range(count):
                await session.step({"message": "hello"})

        await asyncio.gather(*(work(session, steps // 5) for session in sessions))
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work(session, steps) for session in sessions))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        await asyncio.gather(*(session.close() for session in sessions))
        return clients * steps / wall, cpu / clients / steps

    return asyncio.run(main())


def saturated(url: str, processes: int = 2, clients: int = 32, steps: int = 150) -> float:
    """The rate at which a server saturates: several client processes at once."""
    command = [sys.executable, __file__, "--work", url, str(clients), str(steps)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(float(process.communicate()[0].split()[0]) for process in started)


def server_cpu_s(pid: int) -> float:
    total = 0.0
    for process in (top := psutil.Process(pid), *top.children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return total


def client_part() -> None:
    """64 sessions, no latency, one official server: client CPU a step and the rate."""
    with OfficialServer(NEW, sessions=128) as server:
        best = max(saturated(server.url) for _ in range(2))
        rounds = [(our_client(server.url, 64, 100), official_client(server.url, 64, 100)) for _ in range(3)]
        ours_rate, theirs_rate = (max(r[i][0] for r in rounds) for i in (0, 1))
        ours_cpu, theirs_cpu = (min(r[i][1] for r in rounds) for i in (0, 1))
    print(f"client CPU per step: {ours_cpu * 1e6:.0f} us, official {theirs_cpu * 1e6:.0f} us: ", end="")
    print(f"{ours_cpu / theirs_cpu:.2f} x (wanted: at most 0.60)")
    print(f"steps per second: {ours_rate:.0f}, official client {theirs_rate:.0f}, the server saturates at {best:.0f}: ", end="")
    print(f"{ours_rate / max(best, ours_rate, theirs_rate):.2f} (wanted: at least 0.90)")


def latency_part() -> None:
    """64 sessions of 50 ms steps on an official server, waiting in a thread each or on its loop: share of the ideal."""
    for words, use_async in (("coroutines", True), ("threads", False)):
        with OfficialServer(NEW, sessions=64, latency_s=0.05, use_async=use_async) as server:
            share = max(our_client(server.url, 64, 60)[0] for _ in range(2)) / (64 * 20)
            theirs = official_client(server.url, 64, 60)[0] / (64 * 20)
        line = f"50 ms steps, 64 sessions, official server that waits in {words}: {share:.0%} of ideal"
        print(f"{line} (wanted: 90 %), official client {theirs:.0%}")


def async_part() -> None:
    """256 sessions of 50 ms steps on our server with async environments: share of the ideal."""
    latency = '{"latency_s": 0.05}'
    with OurServer("AsyncEcho", "--max-sessions", "256", "--env-kwargs", latency) as server:
        share = max(our_client(server.url, 256, 40)[0] for _ in range(2)) / (256 * 20)
    print(f"our server, async environments, 256 sessions: {share:.0%} of ideal (wanted: 80 %)")
    with OurServer("Echo", "--env-kwargs", latency) as server:
        share = max(our_client(server.url, 64, 40)[0] for _ in range(2)) / (64 * 20)
    print(f"our server, ordinary environments, 64 sessions: {share:.0%} of ideal")


def server_part() -> None:
    """The same echo environment, 64 sessions: CPU a step of our server against the official one's."""
    servers = {
        "official": OfficialServer(NEW, sessions=64),
        "ours, default": OurServer("Echo"),
        "ours, threads": OurServer("Echo", "--backend", "thread"),
        "ours, a process each": OurServer("Echo", "--workers", "64"),
        "ours, async": OurServer("AsyncEcho"),
        "ours, in the server": OurServer("Echo", "--backend", "serial"),
    }
    costs: dict[str, list[float]] = {name: [] for name in servers}
    with contextlib.ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)  # all at once: the ones that are not asked use no CPU
            our_client(server.url, 64, 20)
        for _ in range(3):  # in turns: the machine's own speed changes from one minute to the next
            for name, server in servers.items():
                before = server_cpu_s(server.process.pid)
                our_client(server.url, 64, 60)
                costs[name].append((server_cpu_s(server.process.pid) - before) / (64 * 72))
    base = min(costs["official"])
    for name, cost in ((name, min(each)) for name, each in costs.items()):
        print(f"server CPU per step, {name}: {cost * 1e6:.0f} us, {cost / base:.2f} x (wanted: at most 0.70)")


PARTS = {"client": client_part, "latency": latency_part, "async": async_part, "server": server_part}


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        print(*our_client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given again")
    for name in parser.parse_args().only or PARTS:
        PARTS[name]()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
