"""Run the tutorials and write what they print into their ```output blocks: `.venv/bin/python -m tools.tutorial_outputs [PAGE …]`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.test_pages import TUTORIALS, as_a_user, blocks_of


def main(pages: list[Path]) -> None:
    """Every block that shows output runs in a folder of its own; the commands of a page share one, as in the tests."""
    for page in pages:
        text, shared = page.read_text(), Path(tempfile.mkdtemp())
        for block in blocks_of(page):
            if block.title:
                (shared / block.title).write_text(block.code)
            if block.output is None or block.kind not in ("python", "sh"):
                continue
            words = ["bash", "-e", "-c", block.code] if block.kind == "sh" else [sys.executable, "-c", block.code]
            folder = shared if block.kind == "sh" else tempfile.mkdtemp()
            printed = subprocess.run(words, cwd=folder, env=as_a_user(), check=True, capture_output=True, text=True).stdout
            before, after = text.split(block.code, 1)
            text = before + block.code + after.replace(f"```output\n{block.output}", f"```output\n{printed.strip()}\n", 1)
        page.write_text(text)


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or TUTORIALS)
