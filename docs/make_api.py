"""Writes docs/api.md from the public names and their docstrings: `make docs`. A test fails when the page is not current."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import envfleet

PAGE = Path(__file__).with_name("api.md")

HEAD = """# Public names

Everything in `envfleet.__all__`, and nothing else, is public. `import envfleet as ef` imports none of it: each name is
loaded when it is first used. `help(ef.make)` shows the whole docstring with an example. This page is written by
`make docs`.

| name | what it is | defined in |
|---|---|---|
"""

#: Values have no docstring of their own.
VALUES = {
    "__version__": "The version of this installation.",
    "KEEP": "In `Fleet.assign(tasks=[…])`: leave this slot's task as it is.",
}


def page() -> str:
    """The page as it should be."""
    rows = []
    for name in envfleet.__all__:
        value = getattr(envfleet, name)
        text = VALUES.get(name) or (inspect.getdoc(value) or "").split("\n\n")[0]
        if not text:
            raise SystemExit(f"envfleet.{name} has no docstring")
        where = "envfleet" if name == "__version__" else f"envfleet.{envfleet._WHERE[name]}"
        rows.append(f"| `{name}` | {' '.join(text.split()).replace('|', chr(92) + '|')} | `{where}` |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
