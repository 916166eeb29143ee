"""Our server as a process of its own, as `envfleet serve` runs it."""

import json
import signal
import subprocess
import sys
import urllib.request

from tests.support.system import child_env


class OurServer:
    """`envfleet serve ENV --port 0 …`; `url` once entered. `kill()` and `start()` model a crash and a comeback."""

    def __init__(self, env: str, *options: str, log=None):
        self.log = log  # a file for what it writes to stderr
        self.command = [sys.executable, "-m", "envfleet", "serve", env, *options]
        self.port = "0"

    def __enter__(self):
        return self.start()

    def start(self):
        command = [*self.command, "--port", self.port]
        errors = None if self.log is None else self.log.open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_env())
        self.line = self.process.stdout.readline()
        self.url = self.line.split(" on ")[1].split(" ")[0]
        self.port = self.url.rpartition(":")[2]
        return self

    def live(self) -> int:
        with urllib.request.urlopen(self.url + "/health", timeout=10) as response:
            return json.load(response)["active_sessions"]

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def __exit__(self, *exc):
        self.stop()

    def stop(self) -> int:
        """As Ctrl-C does; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(30)
        self.process.stdout.close()
        return code
