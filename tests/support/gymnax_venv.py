"""A venv with gymnax, which does not go with the pinned Gymnasium. `python -m tests.support.gymnax_venv` makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.official_servers import CACHE, OURS

#: gymnax needs `six` without saying so, and a Gymnasium below 1.4.
WANTED = ("gymnax>=1.0,<2", "six", "gymnasium<1.4")
HOME = CACHE / "gymnax"


def python_with_gymnax() -> Path | None:
    """The interpreter of the venv; None where it was not made."""
    return HOME / "bin" / "python" if (HOME / ".complete").exists() else None


def main() -> None:
    """Make the venv."""
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
    others = [name for name in OURS if name != "gymnasium"]
    subprocess.run([str(HOME / "bin" / "python"), "-m", "pip", "install", "-q", *WANTED, *others], check=True)
    (HOME / ".complete").touch()


if __name__ == "__main__":
    main()
