"""What `mkdocs build` does beside the pages of docs/: adds the reference, CONTRIBUTING.md and CHANGELOG.md to the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import make_reference

ROOT = Path(__file__).parents[1]
#: Pages of the root of the repository, under the name they have in the site.
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
#: Words of the glossary that are not common English: their first use on a page becomes a link.
WORDS = (
    "slab",
    "slot life",
    "doorbell",
    "ledger",
    "keeper",
    "ticket",
    "segment",
    "mailbox",
    "pulse",
    "fault row",
    "compiled core",
    "side part",
)
_TOKENS = re.compile(r"(`[^`]*`|!?\[[^\]]*\]\([^)]*\))")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, text in make_reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for source, page in ROOT_PAGES.items():
        text = _LINK.sub(lambda found: found[1] + found[2].removeprefix("docs/") + found[3], (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to the root of the repository lead to pages of the site; names in the list of public names lead to the reference."""
    # A search for a word finds its definition first, and guides before the reference.
    page.meta["search"] = {
        "boost": {"glossary.md": 8.0}.get(page.file.src_uri, 0.5 if page.file.src_uri.startswith("reference/") else 1.0)
    }
    for source, name in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{source}", f"]({'../' * page.file.src_uri.count('/')}{name}", markdown)
    up = "../" * (page.file.src_uri.count("/") + 1)
    markdown = re.sub(
        rf"\[([^\]]+)\]\({re.escape(up)}[^)]+\)", r"\1", markdown
    )  # other files of the repository are not in the site
    if page.file.src_uri == "api.md":
        return _linked(markdown)
    if page.file.src_uri in ("glossary.md", "changes.md", "index.md") or page.file.src_uri.startswith("reference/"):
        return markdown
    return with_words(markdown, "../" * page.file.src_uri.count("/") + "glossary.md")


def with_words(markdown: str, glossary: str) -> str:
    """Link the first use of each word in running text, unless the page links it already."""
    left = {word for word in WORDS if f"glossary.md#{word.replace(' ', '-')}" not in markdown}
    lines, in_code = [], False
    for line in markdown.splitlines():
        in_code ^= line.lstrip().startswith("```")
        if left and not in_code and not line.startswith("#"):
            parts = _TOKENS.split(line)
            for word in sorted(left):
                for i in range(0, len(parts), 2):  # every other part is code or a link
                    link = rf"[\g<0>]({glossary}#{word.replace(' ', '-')})"
                    parts[i], found = re.subn(rf"\b{word}s?\b", link, parts[i], count=1, flags=re.I)
                    if found:
                        left.remove(word)
                        break
                parts = _TOKENS.split("".join(parts))
            line = "".join(parts)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _linked(markdown: str) -> str:
    def row(found: re.Match[str]) -> str:
        name, what, module = found.groups()
        if module == f"envfleet.{name}":
            return found[0]
        page = make_reference.page_of(module)
        return f"| [`{name}`](reference/{page}.md#{name.lower()}) |{what}| `{module}` |"

    return re.sub(r"^\| `(\w+)` \|(.*)\| `([\w.]+)` \|$", row, markdown, flags=re.M)
