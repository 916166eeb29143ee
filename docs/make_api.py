"""Writes docs/api.md from the public names and their docstrings: `make docs`. A test fails when the page is not current."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).with_name("api.md")

HEAD = """# Public names

The names in `envfleet.__all__`, and those of the packages and modules below, are public; nothing else is. `import envfleet as ef`
imports none of it: each name is loaded when it is first used, and type checkers know them all. `help(ef.make)` shows the whole
docstring with an example. This page is written by `make docs`.
"""

TABLE = """
## `{package}`

| name | what it is | defined in |
|---|---|---|
"""

PACKAGES = ("envfleet", "envfleet.errors", "envfleet.rollout", "envfleet.remote", "envfleet.tasks", "envfleet.train")

#: Values have no docstring of their own.
VALUES = {"KEEP": "In `Fleet.assign(tasks=[…])`: leave this slot's task as it is."}


def page() -> str:
    """The page as it should be."""
    told: set[str] = set()
    text = HEAD
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = [name for name in names_of(module) if name not in told]
        told.update(names)
        text += TABLE.format(package=package) + "".join(row(module, name) for name in names)
    return text


def names_of(module: ModuleType) -> list[str]:
    """The names a module makes public: `__all__`, or every class it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
    ]


def row(module: ModuleType, name: str) -> str:
    """One line of a table."""
    value = getattr(module, name)
    text = VALUES.get(name) or (inspect.getdoc(value) or "").split("\n\n")[0]
    if not text:
        raise SystemExit(f"{module.__name__}.{name} has no docstring")
    where = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", module.__name__)
    return f"| `{name}` | {' '.join(text.split()).replace('|', chr(92) + '|')} | `{where}` |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
