"""What the documentation says is true: its Python runs, its names exist, its links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envfleet

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```(.*)$")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_of(page: Path) -> str:
    """The ```python blocks of a page as one script; every line keeps its number, so that a traceback leads to the page."""
    out, kind = [], None
    for line in page.read_text().splitlines():
        fence = BLOCK.match(line.strip())
        if fence:
            kind = None if kind is not None else fence.group(1).strip()
            out.append("")
        else:
            out.append(line if kind == "python" else "")
    return "\n".join(out) + "\n"


def run_script(script: Path, folder: Path) -> None:
    """Run a script as a user would, in an empty folder; a missing optional part is a skip that says which."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=280, env=env)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode and re.match(r"(envfleet\.errors\.MissingExtra|ModuleNotFoundError)", last):
        pytest.skip(last)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page).strip()], ids=name_of)
def test_python_of_a_page_runs(page, tmp_path):
    script = tmp_path / f"{page.stem}_md.py"
    script.write_text(python_of(page))
    run_script(script, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_runs(example, tmp_path):
    run_script(example, tmp_path)


def modules() -> list[str]:
    return [module.name for module in pkgutil.walk_packages(envfleet.__path__, "envfleet.") if "__main__" not in module.name]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_hold(name):
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        pytest.skip(f"{name}: {missing}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_api_page_is_what_the_package_exports():
    for name in envfleet.__all__:
        try:
            getattr(envfleet, name)
        except ImportError as missing:
            pytest.skip(f"envfleet.{name}: {missing}")
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs/make_api.py")
    assert spec is not None and spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    assert (ROOT / "docs/api.md").read_text() == make_api.page(), "run `make docs`"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_and_tests_a_page_names_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
    for named in re.findall(r"`((?:tests|examples|bench|src|docs)/[\w/.-]+\.(?:py|md))(?:::(\w+))?`", text):
        path, test = named
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{name_of(page)} names {path}::{test}"


def test_the_readme_names_the_two_commands_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    assert (ROOT / ".ci/run").read_text().strip().splitlines()[-1] == "make test"
