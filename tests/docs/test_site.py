"""The documentation site: it builds without a warning, loads nothing from elsewhere, and describes every public name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envfleet
from tests.support.system import ROOT

pytest.importorskip("material", reason="mkdocs-material is not installed")
#: What a browser loads: in a page, in a style sheet.
LOADED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
LOADED_BY_CSS = re.compile(r"""(?:@import\s+|url\(\s*)["']?((?:https?:)?//[^"')\s]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """`mkdocs build --strict`: a link or an anchor that leads nowhere, or a page in no menu, is an error (but not with --quiet)."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site):
    assert LOADED.findall('<script src="https://a.org/b.js"></script><link rel="x" href="//c.org/d.css">')
    for page in site.rglob("*.html"):
        assert LOADED.findall(page.read_text()) == [], page
        assert 'class="mermaid"' not in page.read_text(), f"{page}: the theme loads mermaid from elsewhere"
    for sheet in site.rglob("*.css"):
        assert LOADED_BY_CSS.findall(sheet.read_text()) == [], sheet


def test_the_first_use_of_a_word_leads_to_the_glossary(site):
    rollouts = (site / "rollouts.html").read_text()
    assert rollouts.count('href="glossary.html#ledger"') == 1
    assert "glossary.html#fleet" in (site / "tutorials/01_first_fleet.html").read_text()


def test_search_knows_pages_words_and_names(site):
    index = json.loads((site / "search/search_index.js").read_text().partition("= ")[2])
    titles = {entry["location"] for entry in index["docs"]}
    assert {"glossary.html#slab", "tutorials/03_own_env.html", "reference/fleet.html#make", "troubleshooting.html"} <= titles


def test_the_reference_describes_every_public_name(site):
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    described = set(re.findall(r'<h2 id="[^"]+"><code>([\w.]+)</code>', text))
    modules = {"adapters", "envs", "errors", "remote", "rollout", "tasks", "testing", "train"}
    assert {name for name in envfleet.__all__ if name not in described} == modules
