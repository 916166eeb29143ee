"""`make test-versions`: build the wheel, install it and run the core's tests on every Python the classifiers name.

A Python that is not on this machine is skipped by name. The last leg is the oldest Python with the lowest versions of the
dependencies, and of the extras `remote` and `datasets`, that pyproject.toml allows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
TOOLS = ["pytest", "pytest-timeout", "hypothesis", "psutil"]
CORE_TESTS = [
    *(f"tests/unit/test_{name}.py" for name in ("core_fleet", "core_life", "core_close", "send_reset")),
    "tests/conformance/test_conformance.py",
    "tests/compiled/test_infos.py",
    "tests/faults/test_other_threads.py",
]
FLOOR_TESTS = [*CORE_TESTS, "tests/remote/test_server.py", "tests/rollout/test_rollout_datasets.py"]


def find_python(version: str) -> str | None:
    """An interpreter of that version that starts: on the PATH, or one of pyenv's."""
    places = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for place in filter(None, places):
        ask = [str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(ask, capture_output=True, text=True).stdout.strip() == version:
            return str(place)
    return None


def floors(*extras: str) -> list[str]:
    """The lowest versions that pyproject.toml allows, as pins."""
    wanted = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    return [one.replace(">=", "==") for one in wanted]


def leg(name: str, python: str, pins: list[str], tests: list[str]) -> bool:
    """Wheel, install, tests, in a venv of its own; True when all went well."""
    home = ROOT / "build" / "versions" / name
    shutil.rmtree(home, ignore_errors=True)
    pip = [str(home / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    try:
        subprocess.run([python, "-m", "venv", str(home / "venv")], check=True)
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(home), str(_copy_source(home / "source"))], check=True)
        (wheel,) = home.glob("envfleet-*.whl")
        assert "linux" in wheel.name or sys.platform != "linux", f"{wheel.name}: the compiled core was not built"
        subprocess.run([*pip, "install", str(wheel), *pins, *TOOLS], check=True)
        # From the root, where `src` is not on the path: the installed package is tested.
        subprocess.run([pip[0], "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT, check=True)
    except (subprocess.CalledProcessError, AssertionError) as problem:
        print(f"FAILED {name}: {problem}", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


def _copy_source(target: Path) -> Path:
    """A copy to build from: in the checkout, files of an earlier build would get into the wheel."""
    for folder in ("src", "compiled"):
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, target)
    return target


def main(words: list[str]) -> int:
    """Run the legs whose names begin with one of `words`, or all; 1 when one failed."""
    legs = [(version, version, [], CORE_TESTS) for version in VERSIONS]
    legs.append((f"{VERSIONS[0]}-floors", VERSIONS[0], floors("remote", "datasets"), FLOOR_TESTS))
    good = True
    for name, version, pins, tests in legs:
        if words and not name.startswith(tuple(words)):
            continue
        python = find_python(version)
        if python is None:
            print(f"SKIPPED {name}: there is no python{version} on this machine", flush=True)
            continue
        good &= leg(name, python, pins, tests)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
