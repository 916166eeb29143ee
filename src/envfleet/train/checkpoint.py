"""Checkpoints: written completely or not at all, checked when they are read, read without executing code.

A checkpoint is a `torch.save` file of plain values and tensors only, so that `weights_only=True` reads it. It is
written under a temporary name, flushed to the disk and renamed: a kill at any moment leaves the earlier files intact. Such a file
is a zip archive, and the archive's comment holds the SHA-256 of all bytes before it: `torch.load` reads the file as any other.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envfleet.errors import BadArgument, CheckpointDamaged, CheckpointError, CheckpointMissing, DamagedWarning
from envfleet.multiagent.policy_map import SHARED
from envfleet.util.files import keep_aside, sync_folder, write_durably
from envfleet.util.text import first_line

FORMAT = 2
FOLDER = "checkpoints"
_NAME = re.compile(r"update_(\d+)\.pt$")
_SEAL = b"envfleet sha256 "
_SEAL_SIZE = len(_SEAL) + 64
_ZIP_END = b"PK\x05\x06"
_ZIP_END_SIZE = 22


class Checkpoints:
    """The checkpoints of a run folder: the last `keep` of them, and the best."""

    def __init__(self, run_folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(run_folder) / FOLDER
        self.keep = max(keep, 1)
        self.last_good: Path | None = None  # the newest that was written or read here

    def paths(self) -> list[Path]:
        """Return the numbered checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.match(path.name)]
        return sorted(found, key=lambda path: int(_NAME.match(path.name).group(1)))  # type: ignore[union-attr]

    @property
    def best(self) -> Path:
        """Where the best checkpoint is, if there is one."""
        return self.folder / "best.pt"

    def save(self, update: int, state: dict[str, Any], best: bool = False) -> Path:
        """Write a checkpoint, mark it as the best if it is, and drop those that are too old."""
        path = self.folder / f"update_{update:09d}.pt"
        write(path, state)
        self.last_good = path
        if best:
            self._mark_best(path, state)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def _mark_best(self, path: Path, state: dict[str, Any]) -> None:
        link = self.folder / f".best.pt.{os.getpid()}.tmp"
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)  # no second copy of the data, and the rename below is atomic
        except OSError:
            write(self.best, state)
            return
        try:
            os.replace(link, self.best)
        finally:
            link.unlink(missing_ok=True)
        sync_folder(self.folder)

    def load_latest(self, keep_damaged: bool = False) -> dict[str, Any] | None:
        """Read the newest checkpoint that is whole; None when there is none.

        A `DamagedWarning` names each that is not. `keep_damaged` gives those another name, so that going on does not write
        over them: only the process that holds the folder's lock may ask for it.
        """
        problems: list[CheckpointDamaged] = []
        missed: set[Path] = set()
        paths = self.paths()
        while paths:
            path = paths.pop()
            try:
                state = read(path)
            except CheckpointMissing:
                if path in missed:  # a link that leads nowhere
                    problems.append(CheckpointDamaged(path, "it is listed, but cannot be opened"))
                else:  # the trainer that writes here dropped it, and has written a newer one
                    missed.add(path)
                    problems, paths = [], self.paths()
            except CheckpointDamaged as damaged:
                problems.append(damaged)
            else:
                for problem in problems:
                    self._warn(problem, path, keep_damaged)
                self.last_good = path
                return state
        if problems:
            found = "; ".join(f"{one.path.name}: {one.problem}" for one in problems)
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged ({found}): restore one from a copy, or use another folder"
            )
        return None

    def _warn(self, damaged: CheckpointDamaged, used: Path, keep_damaged: bool) -> None:
        kept = ""
        if keep_damaged:
            with suppress(OSError):
                kept = f" (kept as {keep_aside(damaged.path).name})"
                damaged.path.unlink()
        text = f"{damaged.path} is damaged: {damaged.problem}{kept}; {used.name} is used instead"
        warnings.warn(text, DamagedWarning, stacklevel=4)


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically, sealed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "state": plain(state)}, buffer)
    data = bytearray(buffer.getbuffer())
    assert data[-_ZIP_END_SIZE:][:4] == _ZIP_END, "torch.save ended its archive in another way than expected"
    data[-2:] = _SEAL_SIZE.to_bytes(2, "little")  # the length of the archive's comment, which follows
    data += _SEAL + hashlib.sha256(data).hexdigest().encode()
    write_durably(path, data)


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file; nothing in it is executed.

    `CheckpointDamaged` says that it is not what was written. One from before there were digests is read all the same, with the
    archive's own checksums.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointMissing(f"there is no checkpoint {path}") from error
    except OSError as error:
        raise CheckpointDamaged(path, f"it cannot be read ({error.strerror or error})") from error
    _check(path, data)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zip's and torch's own, of many types
        raise CheckpointDamaged(path, f"it cannot be read as a checkpoint ({first_line(error)})") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of envfleet")
    if content["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version reads up to {FORMAT}: upgrade envfleet")
    state: dict[str, Any] = _arrays(content["state"])
    return _from_format_1(state) if content["format"] == 1 else state


def _from_format_1(state: dict[str, Any]) -> dict[str, Any]:
    """Format 1 kept the policy of a single agent beside the rest of the run; since format 2 it is a team of one."""
    if "net" in state:
        only = {name: state.pop(name) for name in ("net", "observations", "rewards", "optimiser", "memory", "rng")}
        team = {"agents": [], "num_updates": state["update"], "policies": {SHARED: only}}
        state["team"] = {**team, "transitions": None, "pool": None}
    return state


def _check(path: Path, data: bytes) -> None:
    """Compare with the digest in the file; one without has the end of an archive without a comment."""
    body, seal = memoryview(data)[:-_SEAL_SIZE], data[-_SEAL_SIZE:]
    if seal.startswith(_SEAL):
        if seal[len(_SEAL) :] != hashlib.sha256(body).hexdigest().encode():
            raise CheckpointDamaged(path, "its content does not match its digest")
        return
    end = data[-_ZIP_END_SIZE:]
    if end[:4] != _ZIP_END or end[-2:] != b"\0\0":
        raise CheckpointDamaged(path, f"its end is not that of a checkpoint ({len(data)} bytes)")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            wrong = archive.testzip()
    except Exception as error:  # zipfile raises errors of many types for bytes that are no archive
        raise CheckpointDamaged(path, f"it cannot be read as a checkpoint ({first_line(error)})") from error
    if wrong is not None:
        raise CheckpointDamaged(path, f"the checksum of {wrong} in it is another one")


def load(where: str | Path, which: str = "final") -> dict[str, Any]:
    """Read the checkpoint of a run folder (`final` or `best`), or that file.

    Of `final` ones the newest that is whole is taken, and a `DamagedWarning` names those that are not.

    Example:
        >>> load("nowhere")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: there is no run in 'nowhere': give a run folder or a checkpoint file
    """
    checkpoints = Checkpoints(where)
    if Path(where).is_file():
        return read(where)
    if which == "best" and checkpoints.best.exists():
        return read(checkpoints.best)
    state = checkpoints.load_latest()
    if state is None:
        raise BadArgument(f"there is no run in {str(where)!r}: give a run folder or a checkpoint file")
    return state


def plain(value: Any) -> Any:
    """A value as a checkpoint holds it; TypeError for what it cannot hold."""
    # NumPy arrays and tuples are stored under a marker key, so that they come back as what they were.
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} cannot go into a checkpoint")
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()
        return {"__array__": torch.from_numpy(raw), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, tuple):
        return {"__tuple__": [plain(part) for part in value]}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot go into a checkpoint: only plain values, arrays and tensors can")


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if "__array__" in value:
            return value["__array__"].numpy().view(value["dtype"]).reshape(value["shape"]).copy()
        if "__tuple__" in value:
            return tuple(_arrays(part) for part in value["__tuple__"])
        return {key: _arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_arrays(part) for part in value]
    return value
