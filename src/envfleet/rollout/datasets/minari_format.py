"""Rollouts as a Minari dataset, and back: the interchange format."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.envs.registry import spec_of
from envfleet.errors import BadArgument, DatasetDamaged, DatasetError
from envfleet.rollout.datasets.episode_codec import stored_json
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.util.extras import from_extra
from envfleet.util.files import open_sealed, sealed_json, write_durably
from envfleet.util.trees import tree_leaves, tree_map

#: Digests of the files of a Minari dataset that we wrote.
SUMS_FILE = "envfleet-sums.json"

_PATH_LOCK = threading.Lock()


def minari() -> Any:
    """The minari module, or an error that says what to install."""
    with from_extra("minari"):
        import minari
        import minari.dataset._storages.hdf5_storage  # needs h5py, which minari alone does not bring
    return minari


def save_minari(
    rollouts: Rollouts,
    directory: str | Path,
    *,
    dataset_id: str = "envfleet/collected-v0",
    observation_space: Any = None,
    action_space: Any = None,
    env: Any = None,
    **about: Any,
) -> Path:
    """Write a Minari dataset below `directory`, which becomes a MINARI_DATASETS_PATH.

    Give `env` (a name, spec or environment; it is stored, for Minari's `recover_environment`) or both spaces. Images are stored without loss. `about` goes to
    `minari.create_dataset_from_buffers` (author, description, algorithm_name …). Failed rollouts are left
    out: the format has no place for them.
    """
    if isinstance(env, str):
        env = spec_of(env)
    if env is not None:
        about.setdefault("eval_env", env)
    if env is None and (observation_space is None or action_space is None):
        raise BadArgument("the Minari format needs env=…, or observation_space=… and action_space=…")
    module = minari()
    buffers = [_buffer(rollout) for rollout in rollouts.successes]
    if not buffers:
        raise BadArgument("no successful rollout to save")
    with _datasets_path(Path(directory)):
        module.create_dataset_from_buffers(
            dataset_id,
            buffers,
            env=env,
            observation_space=observation_space,
            action_space=action_space,
            jpeg_encoding=False,
            **about,
        )
        found = find_minari(Path(directory))
    assert found is not None
    # Minari's files have no checksums of their own: ours are beside them.
    write_durably(found / SUMS_FILE, sealed_json({"files": _sums(found)}))
    return Path(directory)


def read_minari(directory: str | Path) -> Iterator[Rollout]:
    """Yield the episodes of the Minari dataset in or below a directory."""
    minari()
    from minari.dataset.minari_storage import MinariStorage

    found = find_minari(Path(directory))
    if found is None:
        raise DatasetError(f"there is no Minari dataset in {directory}")
    _check_sums(found)
    storage = MinariStorage.read(found)
    indices = range(storage.total_episodes)
    for data, about in zip(storage.get_episodes(indices), storage.get_episode_metadata(indices)):
        yield _rollout(data, about)


def find_minari(directory: Path) -> Path | None:
    """The data directory of a Minari dataset at or below a path; folders with an underscore hold half-made ones."""
    for path in sorted(directory.rglob("main_data.hdf5")):
        if not any(part.startswith("_") for part in path.relative_to(directory).parts):
            return path.parent
    return None


def _sums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS_FILE):
        with open(path, "rb") as file:
            sums[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _check_sums(folder: Path) -> None:
    path = folder / SUMS_FILE
    if not path.exists():
        return  # written by others, or before there were checksums
    try:
        written = open_sealed(path.read_bytes())["files"]
    except (ValueError, KeyError) as error:
        raise DatasetDamaged(path, f"it cannot be read ({error})") from error
    found = _sums(folder)
    for name, digest in written.items():
        if found.get(name) != digest:
            raise DatasetDamaged(folder / name, "its content does not match its digest")


def _buffer(rollout: Rollout) -> Any:
    from minari.data_collector.episode_buffer import EpisodeBuffer

    arrays = rollout.arrays()
    for path, leaf in tree_leaves(arrays["observations"]):
        if leaf.dtype == object and not all(isinstance(value, str) for value in leaf):
            raise BadArgument(f"observation {path or 'value'} is neither numbers nor text: save it as parquet")
    trees = {
        name: tree_map(lambda leaf: leaf.tolist() if leaf.dtype == object else leaf, arrays[name])
        for name in ("observations", "actions")
    }
    ours = {
        "id": rollout.episode,
        "env_name": rollout.env_name,
        "slot": rollout.slot,
        "task": stored_json(rollout.task, "the task"),
        "reset_info": stored_json(rollout.reset_info, "the reset info"),
        "infos": stored_json(rollout.infos, "an info") if any(rollout.infos) else "[]",
        "wall_s": rollout.wall_s,
        "started_s": rollout.started_s,
    }
    in_steps = {"policy_version": rollout.policy_version, "step_latencies": rollout.step_latencies}
    infos: dict[str, Any] = {name: np.asarray(values) for name, values in in_steps.items() if len(values)}
    if rollout.extras:
        infos["extras"] = {name: np.asarray(values) for name, values in rollout.extras.items()}
    return EpisodeBuffer(
        seed=rollout.seed,
        options={"envfleet": ours},
        observations=trees["observations"],
        actions=trees["actions"],
        rewards=arrays["rewards"].tolist(),
        terminations=arrays["terminated"].tolist(),
        truncations=arrays["truncated"].tolist(),
        infos=infos,
    )


def _rollout(data: dict[str, Any], about: dict[str, Any]) -> Rollout:
    ours = about.get("options", {}).get("envfleet", {})
    infos = data["infos"] or {}
    return Rollout(
        env_name=str(ours.get("env_name", "")),
        observations=data["observations"],
        actions=data["actions"],
        rewards=data["rewards"],
        terminated=data["terminations"],
        truncated=data["truncations"],
        infos=json.loads(ours.get("infos", "[]")),
        reset_info=json.loads(ours.get("reset_info", "{}")),
        seed=about.get("seed"),
        task=json.loads(ours.get("task", "null")),
        slot=int(ours.get("slot", -1)),
        episode=int(ours.get("id", data["id"])),
        policy_version=infos.get("policy_version", []),
        step_latencies=infos.get("step_latencies", []),
        extras=dict(infos.get("extras", {})),
        wall_s=float(ours.get("wall_s", 0.0)),
        started_s=float(ours.get("started_s", 0.0)),
    )


@contextmanager
def _datasets_path(directory: Path) -> Iterator[None]:
    """Minari takes its root from the environment only."""
    with _PATH_LOCK:
        before = os.environ.get("MINARI_DATASETS_PATH")
        os.environ["MINARI_DATASETS_PATH"] = str(directory.absolute())
        try:
            yield
        finally:
            if before is None:
                del os.environ["MINARI_DATASETS_PATH"]
            else:
                os.environ["MINARI_DATASETS_PATH"] = before
