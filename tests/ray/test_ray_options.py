"""What backend "ray" refuses, before any actor is asked for."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import envfleet as ef
from envfleet.backends.ray_options import RayOptions
from envfleet.cli.main import main
from envfleet.errors import BadArgument, KeeperLost, WorkerLost
from tests.support.system import child_env

pytest.importorskip("ray", reason="pip install 'envfleet[ray]'")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resources": {"num_cpus": -1}}, r"resources\['num_cpus'\]=-1"),
        ({"resources": ["num_cpus"]}, "names and amounts"),
        ({"placement": "spread"}, "SPREAD, DEFAULT"),
        ({"transport": "udp"}, "'stream' or 'call'"),
        ({"ports": (9, 5)}, "first and the last port"),
        ({"ports": (9000, 9100), "transport": "call"}, "Ray's own ports"),
        ({"spawn_timeout_s": 0}, "seconds above 0"),
        ({"start_method": "fork"}, "actors of their own"),
        ({"ray_address": "local"}, "would start a cluster"),
        ({"ray_address": "127.0.0.1:1"}, "nobody listens there .*refused"),
        ({}, "ray.init"),
    ],
)
def test_what_cannot_be_is_refused_before_ray_is_asked(options: dict[str, Any], said: str) -> None:
    code = f"import envfleet as ef\nef.make('CartPole-v1', 2, backend='ray', **{options!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = ran.stderr.strip().splitlines()[-1]
    assert "BadArgument" in last
    assert re.search(said, last), last


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from envfleet.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray-resources", "num_cpus=-1"], "resources['num_cpus']=-1: give an amount of 0 or more"),
        (["--ray-resources", "cpu"], "pairs like name=value,other=2 are needed"),
        (["--ray-transport", "udp"], "transport='udp': choose 'stream' or 'call'"),
        (["--ray-address", "127.0.0.1:1"], "nobody listens there"),
        (["--ray-resources", "num_cpus=0.5,gpu_kind=2"], "call ray.init(...) first"),
    ],
)
def test_collect_takes_them_without_pytorch(options: list[str], said: str) -> None:
    words = ["collect", "CartPole-v1", "--backend", "ray", "--num-envs", "2", "--episodes", "2", *options]
    ran = subprocess.run([sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and said in ran.stderr.strip().splitlines()[-1], ran.stderr


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("transport", ["stream", "call"])
def test_commands_hand_them_to_the_fleet(transport: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    found: list[RayOptions] = []
    real = RayOptions.connect
    monkeypatch.setattr(RayOptions, "connect", lambda options: (found.append(options), real(options))[1])
    words = [
        "--backend",
        "ray",
        "--num-envs",
        "2",
        "--num-workers",
        "1",
        "--ray-resources",
        "num_cpus=0.5",
        "--ray-transport",
        transport,
    ]
    assert main(["collect", "CartPole-v1", "--episodes", "2", *words]) == 0
    assert (
        main(
            [
                "train",
                "CartPole-v1",
                "--total-steps",
                "64",
                "--num-steps",
                "32",
                "--quiet",
                "--out",
                str(tmp_path / "run"),
                *words,
            ]
        )
        == 0
    )
    assert [(options.resources, options.transport) for options in found] == [({"num_cpus": 0.5}, transport)] * 2
    assert "used 2" in capsys.readouterr().out


def test_its_options_do_not_go_with_other_backends() -> None:
    with pytest.raises(BadArgument, match=r"resources, transport can be given only with backend='ray', not 'pipe'"):
        ef.make("CartPole-v1", 2, backend="pipe", resources={"num_cpus": 1}, transport="call")


def test_there_is_no_cluster_at_the_address() -> None:
    # Ray would also take any cluster that it finds among the processes of this machine, such as those of other tests.
    alone = "import ray._private.services as found; found._find_address_from_flag = lambda flag: set()"
    code = f"{alone}\nimport envfleet as ef\nef.make('CartPole-v1', 2, backend='ray', ray_address='auto')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "there is no Ray cluster at ray_address='auto'" in ran.stderr.strip().splitlines()[-1]


@pytest.mark.usefixtures("ray_here")
def test_workers_that_fit_nowhere_are_an_error_that_says_what_is_missing() -> None:
    with pytest.raises(WorkerLost, match=r"has no place: Ray found none within spawn_timeout_s=1 \(it needs num_cpus 64\)"):
        ef.make("CartPole-v1", 2, backend="ray", num_workers=1, resources={"num_cpus": 64}, spawn_timeout_s=1.0)


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resources": {"num_cpus": 1, "CPU": 1}}, "'num_cpus'"),
        ({"resources": {"num_cpus": 0.00001}}, "cannot go beyond"),
        ({"resources": {"runtime_env": 3}}, "'runtime_env' must be"),
        ({"placement": object()}, "'scheduling_strategy' must be"),
    ],
)
def test_what_ray_itself_refuses_is_a_bad_argument(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=rf"Ray refuses what each worker is to have .*{said}"):
        ef.make("CartPole-v1", 2, backend="ray", num_workers=1, **options)


@pytest.mark.usefixtures("ray_here")
def test_a_range_without_a_free_port_is_said_before_anything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            WorkerLost, match=rf"ended: BadArgument: no free port on 127.0.0.1 in ports=\({port}, {port}\): give a range"
        ):
            ef.make("CartPole-v1", 2, backend="ray", num_workers=1, ports=(port, port))


@pytest.mark.usefixtures("ray_here")
def test_a_port_outside_of_the_range_is_never_used() -> None:
    with ef.make("CartPole-v1", 2, backend="ray", num_workers=2, ports=(21500, 21540)) as fleet:
        peers = {worker.channel.sock.getpeername() for worker in fleet._backend._workers}
        assert all(host == "127.0.0.1" and 21500 <= port <= 21540 for host, port in peers) and len(peers) == 2


@pytest.mark.usefixtures("ray_here")
def test_an_env_that_raises_keeps_its_traceback() -> None:
    def broken() -> Any:
        raise ValueError("no such level")

    with pytest.raises(ef.EnvFailed, match="no such level") as caught:
        ef.make(broken, 2, backend="ray", num_workers=1)
    assert "no such level" in str(caught.value.__cause__)


@pytest.mark.full
def test_a_ray_that_was_shut_down_is_an_error_and_closing_works() -> None:
    code = """
import os, sys
from tests.support.ray_cluster import one_machine
import envfleet as ef
with one_machine() as ray:
    fleet = ef.make("CartPole-v1", 2, backend="ray", num_workers=1)
    fleet.reset(seed=0)
try:
    for _ in range(100_000):
        fleet.step([0, 1])
except ef.FleetError as error:
    print(type(error).__name__)
fleet.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split()[-1] in (KeeperLost.__name__, WorkerLost.__name__), ran.stderr[-2000:]


@pytest.mark.full
def test_a_ray_that_is_shut_down_while_new_workers_wait_for_a_place_ends_the_wait() -> None:
    code = """
import threading, time
from tests.support.ray_cluster import one_machine
import envfleet as ef
with one_machine(2) as ray:
    fleet = ef.make("CartPole-v1", 4, backend="ray", num_workers=2, spawn_timeout_s=600.0)
    fleet.reset(seed=0)
    threading.Timer(1.0, ray.shutdown).start()
    try:
        fleet.resize(3)
    except ef.FleetError as error:
        print(type(error).__name__)
    fleet.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=child_env())
    assert ran.stdout.split()[-1:] == [KeeperLost.__name__], ran.stderr[-2000:]
