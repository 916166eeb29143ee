"""Real official servers in interpreters of their own, created once and kept between runs.

`python -m tests.support.official_servers` creates the one that `make test` needs beforehand, so that no test waits for pip; with `all`,
the others too.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("ENVFLEET_TEST_VENVS", ROOT / ".envs"))
NEW, OLD = "openenv==0.10.0", "openenv-core==0.3.0"  # one project under two names: never both in one venv
PINS = HERE / "openenv.txt"  # the versions that were found for NEW: without them pip tries many, for minutes
OURS = ("gymnasium", "cloudpickle", "threadpoolctl")  # what envfleet itself needs, to meet official client objects


def interpreter(package: str) -> Path:
    """The Python of a venv that has the package; builds it when it is not there yet."""
    home = CACHE / package.replace("==", "-")
    python = home / "bin" / "python"
    if not (home / ".complete").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pins = ["-c", str(PINS)] if package == NEW else []
        subprocess.run([str(python), "-m", "pip", "install", "-q", *pins, package, *OURS], check=True)
        (home / ".complete").touch()
    return python


class Part:
    """One server of an official process."""

    def __init__(self, package: str, sessions: int, port: int):
        self.package, self.sessions, self.port = package, sessions, port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def live(self) -> int:
        """How many environments exist on the server right now."""
        with urllib.request.urlopen(self.url + "/live", timeout=30) as response:
            return json.load(response)["live"]


class OfficialServer(Part):
    """A process with official servers, one for each session limit; as a Part it is the last of them.

    `kill()` and `start()` model a crash and a comeback on the same ports.
    """

    def __init__(self, package=NEW, sessions=1, use_async=False, latency_s=0.0):
        self.limits = sessions if isinstance(sessions, tuple) else (sessions,)
        super().__init__(package, self.limits[-1], 0)
        self.ports = [0] * len(self.limits)
        self.use_async, self.latency_s = use_async, latency_s
        self.process: subprocess.Popen | None = None

    @property
    def parts(self) -> list[Part]:
        return [Part(self.package, limit, port) for limit, port in zip(self.limits, self.ports)]

    def start(self) -> "OfficialServer":
        command = [str(interpreter(self.package)), str(HERE / "official_app.py")]
        command += ["--ports", *map(str, self.ports), "--sessions", *map(str, self.limits)]
        command += ["--use-async"] if self.use_async else []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LATENCY_S": str(self.latency_s)},
        )
        line = self.process.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"the official server did not start: {' '.join(command)}")
        self.ports = [int(port) for port in line.split()]
        self.port = self.ports[-1]
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()
            self.process = None

    def __enter__(self) -> "OfficialServer":
        return self.start()

    def __exit__(self, *exc) -> None:
        self.kill()


def run_official(package: str, script: str, *args: str, timeout_s: float = 120) -> str:
    """Run a script with an official client's interpreter; returns what it printed."""
    done = subprocess.run(
        [str(interpreter(package)), str(HERE / script), *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    if done.returncode:
        raise AssertionError(f"{script} failed:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    for name in (NEW, OLD) if "all" in sys.argv[1:] else (NEW,):
        interpreter(name)
