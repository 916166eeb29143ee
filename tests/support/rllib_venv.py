"""A venv with Ray and RLlib, which pins an older Gymnasium than ours. `python -m tests.support.rllib_venv` makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.official_servers import CACHE, ROOT

HOME = CACHE / "rllib"
RAY = "ray[rllib]==2.60.0"
#: What our own tests and extras need beside it, in the versions of constraints.txt.
OURS = ("cloudpickle", "threadpoolctl", "psutil", "pytest", "pytest-timeout", "websockets", "uvicorn", "starlette", "matplotlib")


def python_with_rllib() -> Path | None:
    """The interpreter of the venv; None where it was not made."""
    return HOME / "bin" / "python" if (HOME / ".complete").exists() else None


def pinned(name: str) -> str:
    """A requirement as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.lower().startswith(f"{name}=="))


def main() -> None:
    """Make the venv, if it is not there."""
    if python_with_rllib() is not None:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
    install = [str(HOME / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*install, pinned("torch")], check=True)  # first and by itself, so that the build for CPUs is found
    subprocess.run([*install, RAY, "gymnasium[classic-control]", *map(pinned, OURS)], check=True)
    (HOME / ".complete").touch()


if __name__ == "__main__":
    main()
