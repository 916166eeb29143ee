"""A wheel and an sdist build; the sdist installs and works on a machine without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The sdist of what is committed or staged here, and a wheel built from that sdist."""
    pytest.importorskip("build", reason="the package `build` is not installed (it comes with the dev extra)")
    source = tmp_path_factory.mktemp("source")
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():  # a copy: building in the checkout would leave build/ and *.egg-info behind
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


def test_sdist_and_wheel_have_everything(built):
    (sdist,) = built.glob("envfleet-*.tar.gz")
    (wheel,) = built.glob("envfleet-*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md", "src/envfleet/core/fleet.py"} <= names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "compiled").rglob("*.[ch]*")}
    assert sources <= names, "MANIFEST.in leaves C sources out"
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/envfleet").rglob("*.py")}
    assert source | {"envfleet/py.typed", "envfleet/native/envfleet_env.h", "envfleet/native/template.cpp"} <= packed
    built_parts = {name.partition(".")[0] for name in packed if name.endswith(".so")}
    assert {"envfleet/_compiled", "envfleet/_native_envs"} <= built_parts


@pytest.mark.parametrize("compiler", ["/bin/false", "/nonexistent/compiler"])
def test_the_sdist_installs_and_works_without_a_compiler(built, tmp_path, compiler):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    # The new environment borrows numpy, gymnasium, pip and setuptools from this one; envfleet itself must come from the sdist.
    (site,) = (home / "lib").glob("python*/site-packages")
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for folder in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for entry in folder.iterdir():
            if "envfleet" not in entry.name and entry.suffix != ".pth":
                (borrowed / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bare |= {"CC": compiler, "CXX": compiler}
    (sdist,) = built.glob("envfleet-*.tar.gz")
    pip = (python, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "--no-index", f"--log={tmp_path}/log")
    run(*pip, sdist, env=bare, cwd=tmp_path)
    log = (tmp_path / "log").read_text()
    assert "envfleet._compiled could not be built" in log and "envfleet._native_envs could not be built" in log
    code = (
        "import warnings, envfleet as ef\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    ef.make('CartPole-v1', backend='serial').close()\n"
        "    with ef.make('CartPole-v1', 2, backend='shm', num_workers=2) as fleet:\n"
        "        fleet.reset(seed=0); fleet.step([0, 1])\n"
        "        print(fleet.plan)\n"
        "print(len([one for one in said if 'without its compiled core' in str(one.message)]))\n"
        "print(ef.__file__)\n"
        "try:\n"
        "    ef.make('CartPole-v1', 2, backend='native')\n"
        "except ef.errors.MissingExtra as missing:\n"
        "    print(missing)"
    )
    plan, warned, where, missing = run(python, "-c", code, env=bare, cwd=tmp_path).splitlines()
    assert plan.startswith("shm") and "without the compiled core" in plan and warned == "1"
    assert Path(where).is_relative_to(home)
    assert missing.startswith("'native' is not available here. Its environments were not built: install a C++ compiler")
    assert not list(site.glob("envfleet/**/*.so")), "a compiler that only fails cannot have built anything"
    assert run(home / "bin" / "envfleet", "--version", env=bare).startswith("envfleet ")
