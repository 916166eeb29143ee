"""The results of environment clients, in the known formats, as one record."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np

from envfleet.util.text import short


class StepResult(NamedTuple):
    """One step in canonical form; a reset has reward 0 and no flags."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class NotAResult(ValueError):
    """The client returned something that is in none of the known formats."""


def parse_reset(raw: Any) -> StepResult:
    """Read the answer to reset(): Gymnasium's (obs, info), OpenEnv's result, or a bare observation.

    Example:
        >>> parse_reset(([1, 2], {"map": 3})).info
        {'map': 3}
        >>> parse_reset([1, 2]).obs
        [1, 2]
    """
    if isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[1], dict):
        return StepResult(raw[0], 0.0, False, False, raw[1])
    if hasattr(raw, "observation") or _is_json_result(raw):
        return _from_openenv(raw)
    return StepResult(raw, 0.0, bool(getattr(raw, "done", False)), False, {})


def parse_step(raw: Any) -> StepResult:
    """Read the answer to step(): a 5-tuple, an old 4-tuple, or OpenEnv's result object.

    Example:
        >>> parse_step((0, 1.0, True, {"TimeLimit.truncated": True}))[2:4]
        (False, True)
    """
    if isinstance(raw, tuple) and len(raw) == 5:
        obs, reward, terminated, truncated, info = raw
        return StepResult(obs, _number(reward), bool(terminated), bool(truncated), dict(info or {}))
    if isinstance(raw, tuple) and len(raw) == 4:
        obs, reward, done, info = raw
        cut = bool(done) and bool((info or {}).get("TimeLimit.truncated", False))
        return StepResult(obs, _number(reward), bool(done) and not cut, cut, dict(info or {}))
    if hasattr(raw, "observation") or _is_json_result(raw) or hasattr(raw, "done"):
        return _from_openenv(raw)
    raise NotAResult(
        f"step() returned {short(raw, 200)}; expected (obs, reward, terminated, truncated, info), "
        "(obs, reward, done, info) or an object with .observation, .reward and .done"
    )


def own(value: Any) -> Any:
    """Copy arrays inside a value: some environments write into the array they returned before."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: own(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(own(item) for item in value)
    return value


def _is_json_result(raw: Any) -> bool:
    return isinstance(raw, dict) and "observation" in raw and "done" in raw


def _from_openenv(raw: Any) -> StepResult:
    def get(name: str) -> Any:
        return raw.get(name) if isinstance(raw, dict) else getattr(raw, name, None)

    has_obs = isinstance(raw, dict) or hasattr(raw, "observation")
    info = get("info") or get("metadata") or {}
    # OpenEnv has one flag; some servers give the other in the metadata.
    truncated = bool(get("truncated")) or (isinstance(info, dict) and bool(info.get("truncated")))
    return StepResult(
        obs=get("observation") if has_obs else raw,
        reward=_number(get("reward")),
        terminated=bool(get("done")) and not truncated,
        truncated=truncated,
        info=dict(info) if isinstance(info, dict) else {"metadata": info},
    )


def _number(reward: Any) -> float:
    if reward is None:  # OpenEnv: this step had no reward
        return 0.0
    if isinstance(reward, numbers.Real):
        return float(reward)
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise NotAResult(f"the reward is {short(reward, 200)}, not a number")
    return float(array.reshape(())[()])
