"""Names of a package that are imported when they are first used.

A package lists its names once, as imports in its `__init__.pyi`: type checkers read them there, and `attach` reads the
same file when the package is imported. An import of the package therefore loads nothing else.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envfleet.errors import MissingExtra
from envfleet.util.extras import extra_of


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package.

    Example:
        >>> load, names, public = attach("envfleet.rollout")
        >>> load("Rollout").__module__, "Rollout" in public
        ('envfleet.rollout.episodes.episode', True)
    """
    where, public = _read(Path(str(sys.modules[package].__file__)).with_suffix(".pyi"))

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            if where[name] == package:  # a module of the package
                return importlib.import_module(f"{package}.{name}")
            value = getattr(importlib.import_module(where[name]), name)
        except ModuleNotFoundError as missing:
            if extra := extra_of(missing.name or ""):
                raise MissingExtra(str(missing.name), extra=extra) from missing
            raise
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(public), public


def _read(stub: Path) -> tuple[dict[str, str], list[str]]:
    """Which module each name comes from, and `__all__` (every name, if the stub has none)."""
    where: dict[str, str] = {}
    public: list[str] = []
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            where.update((name.name, str(node.module)) for name in node.names)
        elif isinstance(node, ast.Assign):
            public = ast.literal_eval(node.value)
    return where, public or sorted(where)
