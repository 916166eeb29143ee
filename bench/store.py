"""Results: one JSON file a run, written anew after every case, so that a run can be taken up again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.stats import Slice
from envfleet.util.machine import usable_cpus

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def new_path() -> Path:
    """`bench/results/<date>.json`; a second run of the day gets a number."""
    today = datetime.date.today().isoformat()
    path, number = RESULTS / f"{today}.json", 1
    while path.exists():
        number += 1
        path = RESULTS / f"{today}-{number}.json"
    return path


def latest_path() -> Path | None:
    """The file written last."""
    found = sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def about() -> dict[str, Any]:
    """What was measured where."""
    import gymnasium
    import numpy

    from envfleet import __version__
    from envfleet.slots import compiled_core

    versions = {"envfleet": __version__, "gymnasium": gymnasium.__version__, "numpy": numpy.__version__}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpus": usable_cpus(),
        "processor": _processor(),
        "python": platform.python_version(),
        "compiled core": compiled_core.status(),
        "versions": versions | _versions("torch", "mujoco", "stable_baselines3", "tianshou", "torchrl"),
    }


def _versions(*names: str) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(results, indent=1))
    os.replace(draft, path)


@dataclasses.dataclass
class Record:
    """What one case gave."""

    slices: dict[str, dict[int, Slice]]
    values: dict[str, Any]
    raw: dict[str, Any]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Record:
        slices = {
            name: {int(turn): Slice(*numbers) for turn, numbers in rows.items()} for name, rows in raw.get("slices", {}).items()
        }
        return cls({name: rows for name, rows in slices.items() if rows}, raw.get("values", {}), raw)


def as_json(slices: Mapping[str, Mapping[int, Slice]]) -> dict[str, dict[str, list[float]]]:
    """Slices as lists [steps, seconds, cpu_ns, foreign] by contestant and round."""
    return {
        name: {
            str(turn): [one.steps, round(one.seconds, 6), round(one.cpu_ns), round(one.foreign, 4)] for turn, one in rows.items()
        }
        for name, rows in slices.items()
    }
