"""What `auto` remembers of its probes between runs: for the env's code, on this machine, for a while.

A probe is kept with the files its env's code came from, as the probe's worker saw them. When one of them has changed, is
found elsewhere, or the probe is old, it is not used any more. A lookup reads files only: no import, no env.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

from envfleet.autotune.probing import Probe
from envfleet.slots.factories import Recipe, SpecFactory, WrappedFactory
from envfleet.util.files import write_durably
from envfleet.util.machine import usable_cpus

#: After so many days an env is probed again: its cost may depend on more than files (data, a driver, a clock rate).
KEPT_DAYS = 14.0

_INSTALLED = ("site-packages", "dist-packages")


def cache_path() -> Path:
    """Where probes are remembered: ENVFLEET_CACHE_DIR, else the user's cache folder."""
    base = os.environ.get("ENVFLEET_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "envfleet"
    )
    return Path(base) / "probes.json"


def remembered(recipe: Recipe, now: float | None = None) -> Probe | None:
    """The probe of an earlier run on this machine, if it still holds."""
    key = key_of(recipe)
    if key is None:
        return None
    entry: Any = _read().get(key)
    try:
        if not 0 <= (time.time() if now is None else now) - entry["at"] < KEPT_DAYS * 86400:
            return None
        if any(_found_at(name) != where for name, where in entry["modules"].items()):
            return None
        if any(digest(path) != seen for path, seen in entry["files"].items()):
            return None
        return Probe(**entry["probe"])
    except (KeyError, TypeError, AttributeError):  # none, or not ours: probe again
        return None


def remember(recipe: Recipe, probe: Probe, code: dict[str, Any], now: float | None = None) -> None:
    """Keep a probe with what `code_of` found of the env's code."""
    key, path = key_of(recipe), cache_path()
    if key is None or code.get("by_value", True):
        return
    entry = {
        "at": time.time() if now is None else now,
        "probe": dataclasses.asdict(probe),
        "modules": code["modules"],
        "files": code["files"],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps({**_read(), key: entry}, indent=1).encode(), fsync=False)
    except OSError:
        return  # a read-only home folder costs one probe per run


def key_of(recipe: Recipe) -> str | None:
    """Spec, arguments, wrappers, versions and machine; None if there is no lasting key.

    Callables of the user have no name that means the same in the next run; a registered id has.
    """
    factory, wrappers = recipe.factories[0], []
    if any(other is not factory for other in recipe.factories):
        return None  # a list: the first is not all of them
    if isinstance(factory, WrappedFactory):
        wrappers = [f"{getattr(one, '__module__', '')}:{getattr(one, '__qualname__', one)}" for one in factory.wrappers]
        factory = factory.inner
    if not isinstance(factory, SpecFactory):
        return None
    words = [repr(factory.spec), repr(factory.kwargs), *wrappers]
    if any(sign in word for word in words for sign in (" at 0x", "<lambda>", "<locals>", "__main__")):
        return None
    from envfleet import __version__

    machine = [platform.node(), platform.machine(), platform.processor(), str(usable_cpus()), str(os.cpu_count())]
    versions = [platform.python_version(), gym.__version__, __version__, sys.executable]
    text = "\n".join(words + machine + versions)
    return f"{factory.spec.id} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def code_of(env: Any) -> dict[str, Any]:
    """In the probe's worker: the files an env's code came from.

    Those of its classes and wrappers; of every other module that is loaded, its own file where it is the user's, its
    package's where it is installed (an upgrade changes it). `by_value`: some of it has no file.
    """
    classes = {base for layer in _layers(env) for base in type(layer).__mro__}
    own = {cls.__module__ for cls in classes} - {"builtins"}
    by_value = any(getattr(sys.modules.get(name), "__file__", None) is None for name in own if not _is_standard(name))
    modules: dict[str, str | None] = {}
    files: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if not isinstance(path, str) or top in ("__main__", "__mp_main__") or _is_standard(name):
            continue
        if name not in own and top == "envfleet":
            continue  # ourselves: the key has our version
        if name not in own and any(part in _INSTALLED for part in Path(path).parts):
            path = getattr(sys.modules.get(top), "__file__", None) or path
        modules[top] = _found_at(top)
        files.setdefault(path, digest(path))
    return {"by_value": by_value, "modules": modules, "files": files}


def digest(path: str) -> str:
    """Size, time and content of a file in a few characters; "" when there is none."""
    try:
        about = os.stat(path)
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    except OSError:
        return ""
    return f"{about.st_size}-{about.st_mtime_ns}-{content}"


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while (inner := getattr(layers[-1], "env", None)) is not None and len(layers) < 64:
        layers.append(inner)
    return layers


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _found_at(name: str) -> str | None:
    """Where a top-level module is found, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None else spec.origin


def _read() -> dict[str, Any]:
    try:
        known = json.loads(cache_path().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
