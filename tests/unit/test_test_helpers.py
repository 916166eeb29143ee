"""Test helpers are found in one way: `from tests.support.x import y`."""

from __future__ import annotations

import ast
import re

from tests.support.system import ROOT

TESTS = ROOT / "tests"


def test_no_test_module_imports_another_one() -> None:
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[-1].startswith("test_")]
    assert not found


def test_no_test_changes_the_search_path_to_find_its_helpers() -> None:
    changes = re.compile(r"sys\.path(?:\.insert|\.append|\[| \+?=)")
    assert not [str(path) for path in TESTS.rglob("*.py") if changes.search(path.read_text())]


def test_helpers_are_in_the_support_package() -> None:
    allowed = {"conftest.py", "__init__.py"}
    folders = [folder for folder in TESTS.iterdir() if folder.is_dir() and folder.name not in ("support", "chaos")]
    files = [*TESTS.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    assert not [str(file) for file in files if file.name not in allowed and not file.name.startswith("test_")]
