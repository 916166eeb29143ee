"""Episodes whose content follows from their number, and what a directory holds of them."""

from __future__ import annotations

import warnings

import numpy as np

from envfleet.errors import DamagedWarning
from envfleet.rollout import DatasetWriter, Rollout, iter_rollouts


def episode(number, length=12):
    rng = np.random.default_rng(number)
    ends = np.zeros(length, dtype=bool)
    ends[-1:] = True
    return Rollout(
        env_name="Maze",
        observations=rng.normal(size=(length + 1, 4)).astype(np.float32),
        actions=rng.integers(0, 9, length),
        rewards=rng.normal(size=length),
        terminated=ends,
        truncated=np.zeros(length, dtype=bool),
        infos=[{"t": t} for t in range(length)],
        task={"level": number},
        seed=number,
        step_latencies=rng.random(length),
        episode=number,
    )


def full_episode(episode, length=4, **changes):
    """An episode with every field set and nested observations; all follows from its number."""
    rng = np.random.default_rng(episode)
    flags = np.zeros(length, dtype=bool)
    flags[-1:] = True
    fields = {
        "env_name": "Maze",
        "observations": {
            "image": rng.integers(0, 255, (length + 1, 3, 2), dtype=np.uint8),
            "pose": (rng.normal(size=(length + 1, 2)).astype(np.float32), rng.random(length + 1) < 0.5),
        },
        "actions": rng.integers(0, 4, length),
        "rewards": rng.normal(size=length),
        "terminated": flags if episode % 2 else ~flags & False,
        "truncated": ~flags & False if episode % 2 else flags,
        "infos": [{"t": t} for t in range(length)],
        "reset_info": {"map": "a"},
        "seed": 2**62 + episode,
        "task": {"level": episode, "name": "maze"},
        "slot": episode % 3,
        "episode": episode,
        "policy_version": np.arange(length),
        "extras": {"logprob": rng.normal(size=length).astype(np.float32)},
        "wall_s": 0.5,
        "started_s": 12.0,
        "step_latencies": rng.random(length),
    }
    return Rollout(**{**fields, **changes})


def everything(rollout):
    """All of an episode as one comparable value."""
    arrays = [np.asarray(getattr(rollout, name)) for name in ("observations", "actions", "rewards", "terminated")]
    arrays += [np.asarray(rollout.truncated), np.asarray(rollout.step_latencies)]
    values = (rollout.env_name, rollout.seed, str(rollout.task), rollout.slot, rollout.attempts, str(rollout.infos))
    return rollout.digest(), [(a.dtype.str, a.tobytes()) for a in arrays], values


def killed(directory, count, length=12, **options):
    """A dataset as a killed writer leaves it: all in the tail."""
    writer = DatasetWriter(directory, **options)
    for number in range(count):
        writer.add(episode(number, length))
    writer._sink.close()
    writer._lock.close()
    return next(directory.glob("_tail-*.records"))


def numbers_on_disk(directory, length=12):
    """The numbers of the episodes there; each is checked to be what was written."""
    found = list(iter_rollouts(directory))
    for rollout in found:
        assert everything(rollout) == everything(episode(rollout.episode, length)), rollout.episode
    return [rollout.episode for rollout in found]


def resumed(directory, **options):
    """Open for going on; returns the writer and what was warned about damage."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        writer = DatasetWriter(directory, resume=True, **options)
    return writer, [str(one.message) for one in seen if issubclass(one.category, DamagedWarning)]
