"""Rooms without cycles: a package imports what is below it in docs/design.md, never what is above or beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src" / "envfleet"
#: From the bottom up. Packages in one line do not know each other.
LAYERS = (
    ("errors",),
    ("util",),
    ("native", "tasks"),
    ("envs", "faults"),
    ("slots",),
    ("multiagent",),
    ("workers",),
    ("backends",),
    ("autotune",),
    ("core",),
    ("rollout",),
    ("adapters",),
    ("remote", "networks"),
    ("train", "testing"),
    ("cli",),
)


def _imports(node: ast.AST) -> Iterator[str]:
    """Every module named in an import, also inside functions; not those only for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield child.module if child.module != "envfleet" else f"envfleet.{child.names[0].name}"
        elif isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        yield from _imports(child)


def _found() -> set[tuple[str, str]]:
    """(module, package it must not import) of every import against the rule."""
    height = {package: i for i, layer in enumerate(LAYERS) for package in layer}
    found = set()
    for path in sorted(SRC.rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        own = name.split(".")[0]
        if own not in height:
            continue  # the package's own __init__ and __main__
        for module in _imports(ast.parse(path.read_text())):
            parts = module.split(".")
            other = parts[1] if parts[0] == "envfleet" and len(parts) > 1 else None
            if other in height and other != own and height[other] >= height[own]:
                found.add((name, other))
    return found


def test_every_package_has_its_layer() -> None:
    packages = {path.stem for path in SRC.iterdir() if (path / "__init__.py").exists()} | {"errors"}
    assert packages == {package for layer in LAYERS for package in layer}


def test_packages_import_only_what_is_below_them() -> None:
    assert not _found()


def test_no_two_modules_have_the_same_name() -> None:
    names = [path.name for path in SRC.rglob("*.py") if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
