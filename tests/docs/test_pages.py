"""What the documentation says is true: its Python runs, its names exist, its links lead somewhere."""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import envfleet

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^(`{3,})(.*)$")
SAME_TEXT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    """A fenced block of a page; `output` is the text of an ```output block that follows it."""

    page: Path
    line: int
    kind: str
    title: str
    code: str
    output: str | None = None

    @property
    def name(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order; an ```output block is part of the one before."""
    found: list[Block] = []
    fence, kind, code, start, indent = "", "", [], 0, 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        match = FENCE.match(line.strip())
        if not fence and match:
            fence, kind, code, start, indent = match[1], match[2].strip(), [], number, len(line) - len(line.lstrip())
        elif fence and line.strip() == fence:
            text = "\n".join(code) + "\n"
            if kind == "output":
                assert found and found[-1].output is None, f"{name_of(page)}:{start}: output of which block?"
                found[-1].output = text
            else:
                title = re.search(r'title="([^"]+)"', kind)
                found.append(Block(page, start, (kind.split() or [""])[0], title[1] if title else "", text))
            fence = ""
        elif fence:
            code.append(line[indent:])
    assert not fence, f"{name_of(page)}:{start}: the block has no end"
    return found


def python_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.kind == "python"]


def as_a_user() -> dict[str, str]:
    """The environment of a shell in which envfleet is installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }


def run(words: list[str], folder: Path) -> str:
    """Run a command as a user would, in a folder; what it prints. A missing optional part is a skip that says which."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, env=as_a_user())
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode and re.match(r"(envfleet\.errors\.MissingExtra|ModuleNotFoundError)", last):
        pytest.skip(last)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def check_output(block: Block, printed: str) -> None:
    """The page shows what was printed. What depends on the machine is not compared: lines of plans and of progress, and the numbers
    of commands and of blocks that train or measure."""
    if block.output is None:
        return
    texts = []
    for text in (block.output, printed):
        lines = [line for line in text.splitlines() if not re.search(r"auto:|^(step |verdict:)", line)]
        text = "\n".join(lines) + "\n"
        if block.kind == "sh" or re.search("train|torch|import time", block.code):
            text = re.sub(r"-?\d[\d,]*(\.\d+)?", "0", text)
        texts.append(text)
    same = doctest.OutputChecker().check_output(*texts, SAME_TEXT)
    assert same, f"{block.name} shows:\n{block.output}\nbut prints:\n{printed}\n`python -m tools.tutorial_outputs` writes it anew"


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.name)
def test_a_block_of_python_runs_alone_and_prints_what_the_page_shows(block, tmp_path):
    script = tmp_path / (block.title or f"{block.page.stem}_line_{block.line}.py")
    script.write_text(block.code)
    check_output(block, run([sys.executable, script.name], tmp_path))


@pytest.mark.full
@pytest.mark.parametrize(
    "page", [page for page in TUTORIALS if any(block.kind == "sh" for block in blocks_of(page))], ids=name_of
)
def test_the_commands_of_a_tutorial_run_and_print_what_it_shows(page, tmp_path):
    for block in blocks_of(page):
        if block.title:
            (tmp_path / block.title).write_text(block.code)
        elif block.kind == "sh":
            check_output(block, run(["bash", "-e", "-c", block.code], tmp_path))


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_runs(example, tmp_path):
    run([sys.executable, str(example)], tmp_path)


def modules() -> list[str]:
    return [module.name for module in pkgutil.walk_packages(envfleet.__path__, "envfleet.") if "__main__" not in module.name]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_hold(name):
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        pytest.skip(f"{name}: {missing}")
    result = doctest.testmod(module, optionflags=SAME_TEXT)
    assert result.failed == 0


def script_of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Public names whose docstring has no example: results that others show, and calls that do not return.
NO_EXAMPLE = {"Agent", "EnvStats", "TeamAgent", "TeamEvaluation", "TrainResult", "UpdateResult", "serve"}


def test_every_public_name_has_an_example():
    without = set()
    for _, name, value in script_of_docs("make_reference").names():
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        if name and callable(value) and not is_error and ">>>" not in (inspect.getdoc(value) or ""):
            without.add(name)
    assert without - NO_EXAMPLE == set() and NO_EXAMPLE - without == set()


def test_api_page_is_what_the_package_exports():
    for name in envfleet.__all__:
        try:
            getattr(envfleet, name)
        except ImportError as missing:
            pytest.skip(f"envfleet.{name}: {missing}")
    make_api = script_of_docs("make_api")
    assert (ROOT / "docs/api.md").read_text() == make_api.page(), "run `make docs`"


def without_code(text: str) -> str:
    text = re.sub(r"^( *)(`{3,}).*?^ *\2 *$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), text)


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """The anchors that headings of a page have, here and on the site."""
    text = re.sub(r"^( *)(`{3,}).*?^ *\2 *$", "", page.read_text(), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        base = anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{base}_{number}"
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_to_pages_pictures_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", without_code(page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors_of(to), f"{name_of(page)} links to {target}: no such heading"


def test_the_links_of_a_page_are_found():
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", without_code((ROOT / "docs/core.md").read_text()))
    assert "performance.md#beside-other-programs" in links and "beside-other-programs" in anchors_of(ROOT / "docs/performance.md")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_files_and_tests_a_page_names_exist(page):
    for named in re.findall(r"`((?:tests|examples|bench|src|docs)/[\w/.-]+\.(?:py|md))(?:::(\w+))?`", page.read_text()):
        path, test = named
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{name_of(page)} names {path}::{test}"


def test_the_readme_names_the_two_commands_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    assert (ROOT / ".ci/run").read_text().strip().splitlines()[-1] == "make test"


def test_the_speed_in_the_readme_is_that_of_the_benchmark():
    said = " ".join((ROOT / "README.md").read_text().split())
    page = (ROOT / "docs/performance.md").read_text()
    times = re.search(r"more than (\d+) times the steps of Gymnasium's process workers", said)
    low = re.search(r"\| cartpole-64 \| ours shm-share, over gymnasium Async \|.*?\[([\d.]+),", page)
    assert times and low and float(times[1]) <= float(low[1])
    shares = re.search(r"reached ([\d.]+) \(CartPole\) and ([\d.]+) \(Ant\) of the limit", said)
    assert shares
    for title, share in zip(("CartPole-v1, 64 slots", "Ant-v5, 64 slots"), shares.groups()):
        table = page.split(f"### {title}\n", 1)[1]
        found = re.search(r"\| ours auto \| [^|]+ \| ([\d.]+) \[", table)
        assert found and found[1] == share
