"""The reference pages of the documentation site, from signatures and docstrings; `docs/site_hooks.py` adds them to the site."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from typing import Any

#: Page -> title, what it holds in a sentence, and the modules whose public names it describes. The first page that fits takes a name.
PAGES = {
    "errors": ("Errors", "Every error derives from `FleetError`.", ("envfleet.errors",)),
    "tasks": (
        "Tasks and curricula",
        "The guide is [tasks](../tasks.md).",
        (
            "envfleet.tasks",
            "envfleet.adapters.meta_envs",
            "envfleet.adapters.rl2_inputs",
            "envfleet.envs.varibad",
            "envfleet.train.meta_learner",
        ),
    ),
    "agents": (
        "Many agents",
        "Views and wrappers for PettingZoo environments; the guide is [many agents](../agents.md).",
        ("envfleet.multiagent", "envfleet.adapters.agents", "envfleet.adapters.flatten"),
    ),
    "adapters": (
        "Adapters",
        "A fleet with the interface of another library; the guide is [adapters](../adapters.md).",
        ("envfleet.adapters",),
    ),
    "rollout": (
        "Rollouts and datasets",
        "The guides are [rollouts](../rollouts.md) and [datasets](../datasets.md).",
        ("envfleet.rollout",),
    ),
    "remote": (
        "Servers and clients",
        'Needs `pip install "envfleet[remote]"`; the guide is [OpenEnv](../openenv.md).',
        ("envfleet.remote",),
    ),
    "train": ("Training", 'Needs `pip install "envfleet[train]"`; the guide is [training](../training.md).', ("envfleet.train",)),
    "testing": ("Testing", "For tests of fleets, environments and backends of your own.", ("envfleet.testing",)),
    "fleet": ("Making a fleet", "`make` and what it returns; the guide is [the fleet](../core.md).", ("envfleet",)),
}
#: In the order of the site's navigation.
ORDER = ("fleet", "adapters", "agents", "tasks", "rollout", "remote", "train", "testing", "errors")
#: Modules whose classes and functions are public although they are in no `__all__` that is read below.
MODULES = tuple(
    f"envfleet.adapters.{name}" for name in ("gymnasium", "sb3", "torchrl", "tianshou", "rllib", "agents", "classic", "flatten")
)
PACKAGES = (
    "envfleet",
    "envfleet.rollout",
    "envfleet.remote",
    "envfleet.tasks",
    "envfleet.train",
    "envfleet.testing",
    "envfleet.errors",
)

#: Users get objects of these classes and do not construct them.
MADE_FOR_USERS = {"Batch", "Fleet", "FleetVectorEnv", "Fault", "Plan", "TrainResult", "UpdateResult", "Agent", "TeamAgent"}
#: Methods for our own code.
INTERNAL = {"Batch.poison"}

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Examples?|Note):\s*$", re.M)
_ITEM = re.compile(r"^([\w*,. `]+?)\s*(?:\([^)]*\))?: (.*)$", re.S)


def pages() -> dict[str, str]:
    """Markdown by page name."""
    found: dict[str, dict[str, Any]] = {page: {} for page in ORDER}
    missing: dict[str, str] = {}
    for where, name, value in names():
        if inspect.ismodule(value):
            continue
        if isinstance(value, ImportError):
            missing[where] = str(value)
            continue
        defined = getattr(value, "__module__", where)
        found[page_of(defined)].setdefault(f"{defined}.{name}", (where, name, value))
    texts = {}
    for page in ORDER:
        title, about, _ = PAGES[page]
        text = f"# {title}\n\n{about}\n\n"
        taken: set[str] = set()
        for where, name, value in sorted(found[page].values(), key=importance):
            heading = name if name not in taken else f"{where.rpartition('.')[2]}.{name}"
            taken.add(name)
            text += entry(where, name, value, heading)
        for where in [module for module in missing if page_of(module) == page]:
            text += f"## `{where}`\n\nNot described here, because the library it is for was not installed when the site was built.\n\n"
        texts[page] = text
    return texts


def importance(each: tuple[str, str, Any]) -> tuple[bool, bool, bool]:
    """`make` first, then functions, classes, and values."""
    return each[1] != "make", not inspect.isfunction(each[2]), not inspect.isclass(each[2])


def names() -> Iterator[tuple[str, str, Any]]:
    """(where users import it from, name, value) of everything public. The shortest import comes first."""
    for package in (*PACKAGES, *MODULES):
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            yield package, "", error
            continue
        public = getattr(module, "__all__", None) or [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == package and key[0] != "_"
        ]
        for name in public:
            if callable(value := getattr(module, name)) or inspect.ismodule(value) or name == "KEEP":
                yield package, name, value


def page_of(module: str) -> str:
    """The page that describes a module's names."""
    return next(page for page, (_, _, modules) in PAGES.items() if any(f"{module}.".startswith(f"{each}.") for each in modules))


def entry(where: str, name: str, value: Any, heading: str) -> str:
    """One public name: how to import it, its signature, its docstring, and a class's methods."""
    if name == "KEEP":
        return "## `KEEP`\n\nIn `Fleet.assign(tasks=[…])`: leave this slot's task as it is.\n\n"
    text = f"## `{heading}`\n\n"
    if inspect.isclass(value) and issubclass(value, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        return text + f"`{where}.{name}`, derives from {bases}.\n\n" + described(inspect.getdoc(value) or "")
    call = "" if name in MADE_FOR_USERS else signature(name, value).removeprefix("```py\n")
    text += f"```py\nfrom {where} import {name}\n\n{call}" if call else f"```py\nfrom {where} import {name}\n```\n\n"
    text += described(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        for method, what in members(value):
            text += f"### `{heading}.{method}`\n\n"
            text += (signature(method, what) if callable(what) else "") + described(inspect.getdoc(what) or "")
    return text


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that our own classes define and describe."""
    seen: set[str] = set()
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for base in cls.__mro__:
        if not base.__module__.startswith("envfleet"):
            continue
        for name, value in vars(base).items():
            if name[0] == "_" or name in seen or name in fields:
                continue
            seen.add(name)
            if f"{base.__name__}.{name}" in INTERNAL:
                continue
            what = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            readable = isinstance(what, (property, cached_property)) or hasattr(what, "__set_name__")
            if (inspect.isfunction(what) or readable) and inspect.getdoc(what):
                yield name, what


def signature(name: str, value: Any) -> str:
    """A call as a block of code: on one line, or an argument per line."""
    try:
        sign = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    parts, starred = [], False
    for parameter in sign.parameters.values():
        if parameter.name in ("self", "cls") or "Never" in str(parameter.annotation):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(parameter_text(parameter))
    back = "" if inspect.isclass(value) or sign.return_annotation is sign.empty else f" -> {plain(sign.return_annotation)}"
    line = f"{name}({', '.join(parts)}){back}"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){back}"
    return f"```py\n{line}\n```\n\n"


def parameter_text(parameter: inspect.Parameter) -> str:
    """`name: type = default`, with a default that can be read."""
    text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    typed = parameter.annotation is not parameter.empty
    text += f": {plain(parameter.annotation)}" if typed else ""
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    shown = "…" if default.startswith("<") else default.replace("'", '"')
    return text + (f" = {shown}" if typed else f"={shown}")


def plain(annotation: Any) -> str:
    """An annotation without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:typing|collections\.abc|envfleet(?:\.\w+)*)\.(?=[A-Z])", "", text)


def described(doc: str) -> str:
    """A docstring as Markdown."""
    parts = _SECTION.split(doc)
    text = prose(parts[0])
    for title, body in zip(parts[1::2], parts[2::2]):
        indented, _, after = (
            body.strip("\n").partition("\n\n") if title.startswith("Example") and ">>>" not in body else (body, "", "")
        )
        lines = indented.strip("\n")
        # What follows a section without an indent belongs to the docstring, not to the section.
        inside = re.match(r"(?:[ \t]+.*\n?|\n)*", lines + "\n")
        rest = (lines + "\n")[inside.end() :] if inside else ""
        lines = textwrap.dedent(inside.group() if inside else lines).strip("\n")
        if title in ("Args", "Attributes", "Raises"):
            text += table(title, lines)
        elif title.startswith("Example"):
            text += example(lines)
        else:
            text += f"**{title}**: {prose(lines)}"
        text += prose(rest + after) if (rest + after).strip() else ""
    return text


def prose(text: str) -> str:
    """Paragraphs; names in double backticks get single ones, and pages of docs/ become links."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"`?\bdocs/([\w-]+)\.md`?", r"[\1](../\1.md)", text)
    return text.strip() + "\n\n" if text.strip() else ""


def table(title: str, lines: str) -> str:
    """The items of a section as a table."""
    items = [re.sub(r"\s*\n\s+", " ", item) for item in re.split(r"\n(?=\S)", lines)]
    rows = ""
    for item in items:
        if match := _ITEM.match(item):
            rows += f"| `{match[1].strip('`')}` | {prose(match[2]).strip().replace('|', chr(92) + '|')} |\n"
    head = {"Args": "argument", "Attributes": "attribute", "Raises": "raises"}[title]
    return f"| {head} | meaning |\n|---|---|\n{rows}\n" if rows else prose(lines)


def example(lines: str) -> str:
    """Code as it is typed, with its output."""
    return f"**Example**\n\n```{'pycon' if '>>>' in lines else 'py'}\n{lines.strip()}\n```\n\n"
