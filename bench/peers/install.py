"""`python -m bench.peers.install [NAME…]`: a venv for each peer that clashes with our pins.

Each is made beside this file; delete `.venv` here to be rid of all. One that cannot be installed is reported and left out.
"""

from __future__ import annotations

import subprocess
import sys
import venv

from bench.peers.remote import VENVS

#: What goes into each venv, pinned to what the peer itself asks for.
WANTED = {
    "rllib": ["ray[rllib]==2.60.0", "gymnasium[mujoco]==1.2.2", "torch==2.13.0"],
    "sample_factory": ["sample-factory==2.1.1", "gymnasium[classic-control]==0.29.1", "numpy<2", "torch==2.13.0"],
    "agilerl": ["agilerl==2.58.0", "mpe2==1.1.1", "torch==2.13.0"],
}


def install(name: str) -> bool:
    """Make the venv of one peer; True when it is there."""
    folder = VENVS / name
    if (folder / ".ready").exists():
        print(f"{name}: already there")
        return True
    print(f"{name}: installing {' '.join(WANTED[name])}", flush=True)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*command, *WANTED[name]], check=False)
    if done.returncode:
        print(f"{name}: pip failed; the benchmark goes on without it")
        return False
    (folder / ".ready").touch()
    print(f"{name}: ready")
    return True


def main(words: list[str]) -> int:
    """Install those named, or all."""
    unknown = set(words) - set(WANTED)
    if unknown:
        print(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(WANTED)}")
        return 2
    return 0 if all([install(name) for name in words or WANTED]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
