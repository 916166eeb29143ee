"""Count the lines of src/ against the budget in pyproject.toml; part of `make check`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print lines per package; 1 when there are more than the budget allows."""
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["envfleet"]["max_source_lines"]
    source = ROOT / "src" / "envfleet"
    lines: dict[str, int] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        package = parts[0] if len(parts) > 1 else "."
        lines[package] = lines.get(package, 0) + len(path.read_text().splitlines())
    total = sum(lines.values())
    print(f"src: {total:,} of {budget:,} lines  ({', '.join(f'{name} {count:,}' for name, count in lines.items())})")
    if total > budget:
        print("over the budget: delete something, or raise max_source_lines in pyproject.toml and say why there")
    return int(total > budget)


if __name__ == "__main__":
    sys.exit(main())
