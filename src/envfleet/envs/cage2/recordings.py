"""Recorded episodes: a gzipped JSON file with, for every step, blue's action, what chance gave, and all that came of it.

`{"meta": {"hosts": […], "actions": […]}, "episodes": [{"red": "bline", "green": "Sleep", "a": [action, …], "obs": ["0100…", …], …}]}`:
a list per field, with an entry per step. Fields of a step: `a` action, `rt` red's target, `x` exploit, `det` shell noticed, `g` host that
green scanned (-1: none); and the outputs `FIELDS` names.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.draws import Outcomes
from envfleet.envs.cage2.red_agents import red_number
from envfleet.envs.cage2.scenario import ACTION_MEANINGS, HOST_NAMES, NUM_ACTIONS
from envfleet.errors import BadArgument, FileDamaged

_GREENS = {"Sleep": False, "GreenAgent": True}


def _digits(values: NDArray[Any]) -> str:
    return "".join(str(int(value)) for value in values)


#: Output of a step in a recording -> how it is read from a record of `TRUE_STATE`; "obs" and "r" come from the step itself.
FIELDS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "rk": lambda state: int(state["red_kind"]),
    "rt": lambda state: int(state["red_target"]),
    "rs": lambda state: int(state["red_success"]),
    "x": lambda state: int(state["exploit"]),
    "det": lambda state: int(state["noticed"]),
    "g": lambda state: int(state["green_host"]),
    "acc": lambda state: _digits(state["access"]),
    "mal": lambda state: _digits(state["malware"]),
    "dec": lambda state: "".join(f"{int(decoys):02x}" for decoys in state["decoys"]),
    "ot": lambda state: int(state["ot_up"]),
    "otk": lambda state: int(state["ot_known"]),
    "kip": lambda state: _digits(state["known_addresses"]),
    "kh": lambda state: _digits(state["known_names"]),
    "ks": lambda state: _digits(state["known_subnets"]),
}


class Episode(NamedTuple):
    """One recorded episode."""

    number: int
    red: int
    green: bool
    fields: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.fields["a"])

    def outcomes(self, step: int) -> Outcomes:
        """What chance gave in a step."""
        return Outcomes(*(self.fields[name][step] for name in ("rt", "x", "det", "g")))


def outputs_of(observation: NDArray[np.uint8], reward: float, true_state: NDArray[Any]) -> dict[str, Any]:
    """What a step gave, as a recording writes it."""
    return {"obs": _digits(observation), "r": reward, **{name: read(true_state) for name, read in FIELDS.items()}}


def write_recordings(path: str | Path, episodes: list[dict[str, Any]]) -> None:
    """Write episodes, each a dict of "red", "green" and the fields; the same episodes give the same bytes."""
    content = {"meta": {"hosts": HOST_NAMES, "actions": ACTION_MEANINGS}, "episodes": episodes}
    Path(path).write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))


def read_recordings(path: str | Path) -> list[Episode]:
    """The episodes of a file; an error says what is wrong with it."""
    try:
        content = json.loads(gzip.decompress(Path(path).read_bytes()))
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise FileDamaged(Path(path), f"it is not a whole gzipped JSON file ({error})") from error
    except OSError as error:
        raise BadArgument(f"{path} cannot be read: {error.strerror}. Give a file of recorded episodes (.json.gz)") from error
    try:
        return list(_episodes(content))
    except KeyError as error:
        raise FileDamaged(Path(path), f"it has no {error} where recorded episodes have it") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise FileDamaged(Path(path), f"it is not a recording of CAGE 2 episodes ({error})") from error


def _episodes(content: Any) -> Iterator[Episode]:
    meta = content["meta"]
    if tuple(meta["hosts"]) != HOST_NAMES or tuple(meta["actions"]) != ACTION_MEANINGS:
        raise ValueError("its hosts or actions are not those of this environment")
    for number, episode in enumerate(content["episodes"]):
        fields = {name: episode[name] for name in ("a", "obs", "r", *FIELDS)}
        lengths = {name: len(values) for name, values in fields.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the fields of episode {number} have different lengths: {lengths}")
        if not all(isinstance(action, int) and 0 <= action < NUM_ACTIONS for action in fields["a"]):
            raise ValueError(f"episode {number} has an action that does not exist")
        drawn = (value for name in ("rt", "x", "det", "g") for value in fields[name])
        if not all(isinstance(value, int) and -1 <= value < len(HOST_NAMES) for value in drawn):
            raise ValueError(f"episode {number} has an outcome that does not exist")
        if episode["green"] not in _GREENS:
            raise ValueError(f"episode {number} has the green agent {episode['green']!r}; it is 'Sleep' or 'GreenAgent'")
        yield Episode(number, red_number(episode["red"]), _GREENS[episode["green"]], fields)
