"""Numbers that C and Python both write into rows: compared, because nothing else keeps them equal."""

from __future__ import annotations

import re
from pathlib import Path

from envfleet.core import infos
from envfleet.slots import layout
from envfleet.slots.slot_life import PHASES

SOURCES = Path(__file__).resolve().parents[2] / "compiled"


def _enums(name: str) -> dict[str, int]:
    """Every enumerator of a C file and its value."""
    found: dict[str, int] = {}
    for body in re.findall(r"enum\s*\{([^}]*)\}", (SOURCES / name).read_text()):
        value = -1
        for entry in body.split(","):
            key, _, given = (part.strip() for part in entry.partition("="))
            value = int(given) if given else value + 1
            found[key] = value
    return found


def test_commands_states_and_phases_are_the_same() -> None:
    enums = _enums("envfleet.h")
    assert enums["COMMAND_STEP"] == layout.STEP
    assert (enums["STATUS_READY"], enums["STATUS_FAULT"]) == (layout.READY, layout.FAULT)
    for name in ("idle", "reset", "step"):
        assert enums[f"PHASE_{name.upper()}"] == PHASES.index(name)


def test_kinds_of_values_in_infos_are_the_same() -> None:
    enums = _enums("info.c")
    assert enums["INFO_PLAIN"] == infos.PLAIN
    kinds = ("FLOAT", "INT", "FALSE", "TRUE", "NONE", "TEXT", "SCALAR", "ARRAY")
    assert [enums[f"KIND_{kind}"] for kind in kinds] == [getattr(infos, f"_{kind}") for kind in kinds]
