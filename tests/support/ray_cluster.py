"""Ray for tests: clusters of several "machines" on this one, bound to loopback, ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

#: Without the first, Ray listens on every interface. Both must be set before Ray is imported.
SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
_STORE = 100 << 20


@contextlib.contextmanager
def one_machine(num_cpus: int = 4) -> Iterator[Any]:
    """A cluster of one machine, connected."""
    os.environ.update(SETTINGS)
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=num_cpus, object_store_memory=_STORE, **options)
    try:
        assert ray.util.get_node_ip_address() == "127.0.0.1", "Ray was imported before SETTINGS were set, and listens everywhere"
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def machines(*cpus: int) -> Iterator[Machines]:
    """A cluster whose head has no CPUs, and one more machine for each number, connected."""
    os.environ.update(SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False}
    )
    found = Machines(cluster)
    try:
        for count in cpus:
            found.add(count)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield found
    finally:
        found.wake()
        ray.shutdown()
        with contextlib.suppress(Exception):
            cluster.shutdown()


class Machines:
    """The machines of a cluster, by node id."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self._nodes: dict[str, Any] = {}
        self._stopped: list[int] = []

    def add(self, num_cpus: int) -> str:
        """One more machine; its node id."""
        node = self.cluster.add_node(num_cpus=num_cpus, object_store_memory=_STORE)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def raylet(self, node: str) -> int:
        """The pid of a machine's raylet."""
        return int(self._nodes[node].all_processes["raylet"][0].process.pid)

    def kill(self, node: str) -> None:
        """A machine is gone at once: its raylet is killed, and with it its workers."""
        os.kill(self.raylet(node), signal.SIGKILL)

    def silence(self, node: str, pids: list[int]) -> None:
        """A machine says nothing any more, and Ray still believes in it."""
        for pid in [self.raylet(node), *pids]:
            os.kill(pid, signal.SIGSTOP)
            self._stopped.append(pid)

    def wake(self) -> None:
        """Stopped processes can only be ended for certain once they go on."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def gone(pid: int, timeout_s: float = 15.0) -> bool:
    """Whether a process has ended, or ends within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False
