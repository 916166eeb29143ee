"""The run folder: checkpoints, metrics, videos, report; who may write into it, and what a resumed run finds there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envfleet.errors import BadArgument, CheckpointError, RunExists, WriteFailed
from envfleet.rollout.segments.segment import Segment
from envfleet.train.checkpoint import Checkpoints, plain
from envfleet.train.config import FIELDS, PPOConfig, checked
from envfleet.train.html_report import write_report
from envfleet.train.loggers import Logger, TableLogger, TensorBoardLogger, WandbLogger
from envfleet.train.settings import as_text
from envfleet.train.video import Film, VideoMaker
from envfleet.util.files import NO_ROOM, remove_leftovers, write_durably
from envfleet.util.jsonable import to_jsonable
from envfleet.util.locks import FolderLock
from envfleet.util.seeding import episode_seed
from envfleet.util.trees import tree_map

if TYPE_CHECKING:
    from envfleet.train.trainer import PPOTrainer


class RunFolder:
    """What a run writes. `open` decides between a new run and a resumed one."""

    def __init__(self, config: PPOConfig) -> None:
        assert config.out is not None
        self.config = config
        self.path = Path(config.out)
        self.checkpoints = Checkpoints(self.path, config.keep_checkpoints)
        self.loggers: list[Logger] = []
        self.videos = VideoMaker(self.path / "videos")
        self.wandb_id: str | None = None  # stored in checkpoints, so that a resumed run is the same one
        self._filming: list[Any] | None = None
        self._lock: FolderLock | None = None

    def open(self) -> dict[str, Any] | None:
        """Make the folder ready and hold it; return the checkpoint to go on from, if there is one and it is wanted."""
        for name, value in self.config.to_dict().items():
            try:
                plain(value)
            except TypeError as error:  # before anything is trained: it could not be written into a checkpoint
                hint = (
                    "numbers, text, arrays, lists and dicts of them; else build it inside a callable env, or train without out="
                )
                raise BadArgument(f"{name}={value!r} cannot be written into the run folder ({error}): give {hint}") from error
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path / "trainer.lock", "training in")
        except OSError as error:
            if error.errno in NO_ROOM:
                raise WriteFailed(self.path, error, self._safe()) from error
            raise BadArgument(f"the run folder {str(self.path)!r} cannot be written: {error.strerror or error}") from error
        try:
            return self._stored()
        except BaseException:
            self._lock.close()
            raise

    def _stored(self) -> dict[str, Any] | None:
        if not self.config.resume:
            if self.checkpoints.paths() or (self.path / "config.json").exists():
                raise RunExists(self.path)
            return None
        for folder in (self.path, self.checkpoints.folder):
            remove_leftovers(folder)
        stored = self.checkpoints.load_latest(keep_damaged=True)
        if stored is not None:
            self._refuse_other_run(stored["config"])
        return stored

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A file that cannot be written is an error that says which checkpoint is safe."""
        try:
            yield
        except WriteFailed:
            raise
        except OSError as error:
            path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else self.path
            raise WriteFailed(path, error, self._safe()) from error

    def _safe(self) -> str:
        last = self.checkpoints.last_good
        if last is None:
            return "no checkpoint was written yet: make room and start again with --resume"
        return f"the last good checkpoint is {last}: make room, then --resume goes on from it"

    def _refuse_other_run(self, before: dict[str, Any]) -> None:
        now = self.config.to_dict()
        fixed = [name for name, spec in FIELDS.items() if not spec.metadata["may_change"]]
        before = {name: checked(name, before[name]) for name in fixed if name in before}
        # As JSON, in which arrays can be compared and NaN equals itself.
        old, new = ({name: json.dumps(to_jsonable(values.get(name, now[name]))) for name in fixed} for values in (before, now))
        changed = [name for name in fixed if old[name] != new[name]]
        if changed:
            changes = ", ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in changed)
            raise CheckpointError(
                f"{self.path} holds another run: {changes}. Resume with the same settings: `envfleet train --resume {self.path}` takes them from the run"
            )

    def start(self, update: int, num_steps: int, stored: dict[str, Any] | None) -> None:
        """Open the logs, cut back to the checkpoint."""
        config, resumed = self.config, stored is not None
        with self.writing():
            if config.wandb:  # first: without a login it fails, and then the folder must not be a run yet
                run_id = ((stored or {}).get("run") or {}).get("wandb_id")
                logger = WandbLogger(self.path, config.to_dict(), config.wandb_project, config.wandb_mode, run_id)
                self.wandb_id = logger.run_id
                self.loggers.append(logger)
            about = json.dumps(config.to_dict(), indent=1, default=str)
            write_durably(self.path / "config.json", about.encode())
            self.loggers.append(TableLogger(self.path, update if resumed else None))
            if config.tensorboard:
                self.loggers.append(TensorBoardLogger(self.path, num_steps + 1 if resumed else None))

    def log(self, row: dict[str, float], step: int) -> None:
        """Hand a row to every logger."""
        with self.writing():
            for logger in self.loggers:
                logger.log(row, step)

    def save(self, update: int, state: dict[str, Any], best: bool) -> Path:
        """Write a checkpoint."""
        with self.writing():
            return self.checkpoints.save(update, {**state, "run": {"wandb_id": self.wandb_id}}, best)

    # -- video -----------------------------------------------------------------------------------------------------

    def film(self, trainer: PPOTrainer, segment: Segment) -> None:
        """When a video is due, keep the actions of slot 0's next whole episode and have it filmed at its end."""
        every, update = self.config.video_every, trainer.counters.update
        if every and update % every == 0 and self._filming is None:
            self._filming = []  # wait for an episode to begin
        if self._filming is None:
            return
        ended = segment.ended[:, 0]
        for t in range(segment.num_steps):
            if segment.step[t, 0] == 0:
                self._filming = []
            elif not self._filming:
                continue
            self._filming.append(tree_map(lambda leaf, t=t: leaf[t, 0], segment.action))
            if ended[t] and not segment.scored[t, 0]:
                self._filming = []  # a fault: wait for the next
            elif ended[t]:
                actions, self._filming = self._filming, None
                self.videos.make(self._episode(trainer, segment, t, actions))
                return

    def _episode(self, trainer: PPOTrainer, segment: Segment, t: int, actions: list[Any]) -> Film:
        """The episode of slot 0 that ended at step t."""
        index = int(np.flatnonzero((segment.end_index == (t, 0)).all(axis=1))[0])
        task = int(segment.task[t, 0])
        return Film(
            env=trainer.envs[0],
            env_kwargs=self.config.env_kwargs,
            seed=episode_seed(self.config.seed, "segment", 0, int(segment.episode[t, 0])),
            task=trainer.fleet.task_value(task) if task >= 0 else None,
            actions=actions,
            episode_return=float(segment.end_return[index]),
            path=str(self.videos.folder / f"update_{trainer.counters.update:06d}.mp4"),
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, trainer: PPOTrainer) -> Path:
        """Write the report."""
        import gymnasium
        import torch

        import envfleet

        counters = trainer.counters
        steps = max(counters.num_steps, 1)
        self.videos.close()
        versions = {"envfleet": envfleet.__version__, "python": sys.version.split()[0]}
        versions |= {module.__name__: module.__version__ for module in (torch, np, gymnasium)}
        about = {
            "plan": str(trainer.fleet.plan),
            "throughput": {
                "Steps per second": f"{steps / max(counters.wall_s, 1e-9):,.0f}",
                "Collecting": f"{counters.collect_s:.1f} s, {steps / max(counters.collect_s, 1e-9):,.0f} steps/s",
                "Learning": f"{counters.learn_s:.1f} s, {steps / max(counters.learn_s, 1e-9):,.0f} steps/s",
            },
            "faults": [str(fault) for fault in trainer.fleet.faults] + [f"video: {why}" for why in self.videos.problems],
            "tasks": trainer.board.means(),
            "episodes": {"Ledger": str(trainer.collector.ledger)},
            "command": command_for(self.config),
            "versions": versions,
        }
        with self.writing():
            return write_report(self.path, about)

    def close(self) -> None:
        """Close logs, wait for videos, release the folder."""
        self.videos.close()
        loggers, self.loggers = self.loggers, []
        try:
            with self.writing(), ExitStack() as closing:
                for logger in loggers:
                    closing.callback(logger.close)
        finally:
            if self._lock is not None:
                self._lock.close()


def command_for(config: PPOConfig) -> str:
    """Return the command that repeats a run with these settings, even if presets change.

    Example:
        >>> command_for(PPOConfig(env="CartPole-v1", num_envs=8)).split(" --")[:2]
        ['envfleet train CartPole-v1', 'preset none']
    """
    parts = [f"envfleet train {config.env_name}", "--preset none"]
    for name, spec in FIELDS.items():
        value, flag = getattr(config, name), name.replace("_", "-")
        if name in ("env", "preset", "resume", "columns") or value == spec.default or value == {}:
            continue
        no = "no-" if value is False else ""
        parts.append(f"--{no}{flag}" if isinstance(value, bool) else f"--{flag} {as_text(value)}")
    return " ".join(parts)
