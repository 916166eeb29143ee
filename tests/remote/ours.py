"""Our server as a process of its own, as `envfleet serve` runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parent.parent.parent / "src"
COMMAND = """
import argparse, sys
from envfleet.cli import serve
parser = argparse.ArgumentParser()
serve.add_parser(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""


class OurServer:
    """`envfleet serve ENV --port 0 …`; `url` once entered."""

    def __init__(self, env: str, *options: str, variables: dict | None = None):
        self.command = [sys.executable, "-c", COMMAND, "serve", env, "--port", "0", *options]
        self.variables = variables or {}

    def __enter__(self):
        paths = os.pathsep.join([str(SRC), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, **self.variables, "PYTHONPATH": paths}
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, env=env)
        self.line = self.process.stdout.readline()
        self.url = self.line.split(" on ")[1].split(" ")[0]
        return self

    def __exit__(self, *exc):
        self.stop()

    def stop(self) -> int:
        """As Ctrl-C does; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code
