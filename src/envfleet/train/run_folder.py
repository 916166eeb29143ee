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
from envfleet.train.checkpoint import Checkpoints
from envfleet.train.config import FIELDS, PPOConfig
from envfleet.train.loggers import Logger, TableLogger, TensorBoardLogger, WandbLogger
from envfleet.train.report import write_report
from envfleet.train.settings import as_text
from envfleet.train.video import Film, VideoMaker
from envfleet.util.files import NO_ROOM, remove_leftovers, write_durably
from envfleet.util.locks import FolderLock
from envfleet.util.seeding import episode_seed
from envfleet.util.trees import tree_map

if TYPE_CHECKING:
    from envfleet.train.trainer import PPOTrainer

LOCK_FILE = "trainer.lock"


class RunFolder:
    """What a run writes. `open` decides between a new run and a resumed one."""

    def __init__(self, config: PPOConfig) -> None:
        assert config.out is not None
        self.config = config
        self.path = Path(config.out)
        self.checkpoints = Checkpoints(self.path, config.keep_checkpoints)
        self.loggers: list[Logger] = []
        self.videos = VideoMaker(self.path / "videos")
        self._wandb_id: str | None = None
        self._filming: list[Any] | None = None
        self._lock: FolderLock | None = None

    def open(self) -> dict[str, Any] | None:
        """Make the folder ready and hold it; return the checkpoint to go on from, if there is one and it is wanted."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path / LOCK_FILE, "training in")
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
        occupied = self.checkpoints.paths() or (self.path / "config.json").exists()
        if not self.config.resume:
            if occupied:
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
        changed = [name for name in fixed if before.get(name, now[name]) != now[name]]
        if changed:
            changes = ", ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in changed)
            raise CheckpointError(f"{self.path} holds another run: {changes}. Resume with the same settings")

    def start(self, update: int, num_steps: int, stored: dict[str, Any] | None) -> None:
        """Open the logs, cut back to the checkpoint."""
        with self.writing():
            self._start(update, num_steps, stored)

    def _start(self, update: int, num_steps: int, stored: dict[str, Any] | None) -> None:
        config = self.config
        resumed = stored is not None
        about = json.dumps(config.to_dict(), indent=1, default=str)
        write_durably(self.path / "config.json", about.encode())
        self.loggers.append(TableLogger(self.path, update if resumed else None))
        if config.tensorboard:
            self.loggers.append(TensorBoardLogger(self.path, num_steps + 1 if resumed else None))
        if config.wandb:
            run_id = (stored or {}).get("run", {}).get("wandb_id") if resumed else None
            logger = WandbLogger(self.path, config.to_dict(), config.wandb_project, config.wandb_mode, run_id)
            self._wandb_id = logger.run_id
            self.loggers.append(logger)

    def log(self, row: dict[str, float], step: int) -> None:
        """Hand a row to every logger."""
        with self.writing():
            for logger in self.loggers:
                logger.log(row, step)

    def save(self, update: int, state: dict[str, Any], best: bool) -> Path:
        """Write a checkpoint."""
        with self.writing():
            return self.checkpoints.save(update, state, best)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the folder."""
        return {"wandb_id": self._wandb_id}

    # -- video -----------------------------------------------------------------------------------------------------

    def film(self, trainer: PPOTrainer, segment: Segment) -> None:
        """When a video is due, keep the actions of slot 0's next whole episode and have it filmed at its end."""
        every = self.config.video_every
        if not every:
            return
        if trainer.counters.update % every == 0 and self._filming is None:
            self._filming = []  # wait for an episode to begin
        if self._filming is None:
            return
        ended = segment.ended[:, 0]
        for t in range(segment.num_steps):
            if segment.step[t, 0] == 0:
                self._filming = [int(segment.episode[t, 0]), []]
            if not self._filming:
                continue
            self._filming[1].append(tree_map(lambda leaf, t=t: leaf[t, 0], segment.action))
            if ended[t]:
                if segment.scored[t, 0]:
                    self._send_to_film(trainer, segment, t)
                    self._filming = None
                    return
                self._filming = []

    def _send_to_film(self, trainer: PPOTrainer, segment: Segment, t: int) -> None:
        assert self._filming
        episode, actions = self._filming
        index = int(np.flatnonzero((segment.end_index == (t, 0)).all(axis=1))[0])
        task = int(segment.task[t, 0])
        self.videos.make(
            Film(
                env=trainer.envs[0],
                env_kwargs=self.config.env_kwargs,
                seed=episode_seed(self.config.seed, "segment", 0, episode),
                task=trainer.fleet.task_value(task) if task >= 0 else None,
                actions=actions,
                episode_return=float(segment.end_return[index]),
                path=str(self.path / "videos" / f"update_{trainer.counters.update:06d}.mp4"),
            )
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
        versions = {
            "envfleet": envfleet.__version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
        }
        about = {
            "title": f"PPO on {self.config.env_name}",
            "plan": str(trainer.fleet.plan),
            "config": self.config.to_dict(),
            "throughput": {
                "Steps per second": f"{steps / max(counters.wall_s, 1e-9):,.0f}",
                "Collecting": f"{counters.collect_s:.1f} s, {steps / max(counters.collect_s, 1e-9):,.0f} steps/s",
                "Learning": f"{counters.learn_s:.1f} s, {steps / max(counters.learn_s, 1e-9):,.0f} steps/s",
            },
            "faults": [str(fault) for fault in trainer.fleet.faults] + [f"video: {why}" for why in self.videos.problems],
            "episodes": {"Ledger": str(trainer.collector.ledger)},
            "command": command_for(self.config),
            "versions": versions,
        }
        with self.writing():
            return write_report(self.path, about)

    def close(self) -> None:
        """Close logs, wait for videos, let go of the folder."""
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
    """Return the command that repeats a run with these settings, whatever the presets say by then.

    Example:
        >>> command_for(PPOConfig(env="CartPole-v1", num_envs=8)).split(" --")[:2]
        ['envfleet train CartPole-v1', 'preset none']
    """
    parts = [f"envfleet train {config.env_name}", "--preset none"]
    for name, spec in FIELDS.items():
        value = getattr(config, name)
        if name in ("env", "preset", "resume", "columns") or value == spec.default or value == {}:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{'' if value else 'no-'}{flag}")
        else:
            parts.append(f"--{flag} {as_text(value)}")
    return " ".join(parts)
