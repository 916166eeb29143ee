"""Videos of slot 0, made off the step path: an episode is replayed elsewhere from its seed, task and actions.

Rendering while training would slow every step of the recorded episode. An episode is fully given by what the
trainer knows anyway, so another process replays it at low priority and encodes it. If the environment is not
deterministic the film differs from what was trained on; its return is then compared and the difference is noted.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from envfleet.core.fleet import Fleet
from envfleet.errors import FaultError, FleetError
from envfleet.slots.factories import resolve
from envfleet.util.extras import from_extra
from envfleet.util.trees import Tree, tree_map


class VideoError(FleetError):
    """A video cannot be made: the environment does not render pictures."""


@dataclass(frozen=True)
class Film:
    """What a video is made from."""

    env: Any
    env_kwargs: dict[str, Any]
    seed: int
    task: Any
    actions: Sequence[Tree]
    episode_return: float
    path: str


def write_video(path: str | Path, frames: Sequence[NDArray[np.uint8]], fps: int = 30) -> Path:
    """Encode pictures [H, W, 3] as mp4 (H.264)."""
    with from_extra("video"):
        import imageio_ffmpeg  # type: ignore[import-untyped]
    if not frames:
        raise VideoError("there is no frame to write")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = frames[0].shape[:2]
    # H.264 wants even sides: a row or column is cut rather than the picture scaled.
    height, width = height - height % 2, width - width % 2
    writer = imageio_ffmpeg.write_frames(str(path), (width, height), fps=fps, macro_block_size=2, ffmpeg_log_level="error")
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame[:height, :width, :3]))
    writer.close()
    return path


def fleet_for_video(env: Any, env_kwargs: dict[str, Any]) -> Fleet:
    """One environment that renders pictures, as a fleet: tasks and seeds reach it the way they do in training."""
    from envfleet.core.construct import make

    try:
        factory = resolve(env, {**env_kwargs, "render_mode": "rgb_array"})
        return make(factory, 1, backend="serial", on_end="wait")
    except FaultError as error:
        raise VideoError(f"the environment cannot be made with render_mode='rgb_array': {error.fault.cause}") from error


def _picture(fleet: Fleet) -> NDArray[np.uint8]:
    picture = fleet.render(0)
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise VideoError("the environment gives no pictures: it needs render_mode='rgb_array'")
    return picture


def play(film: Film) -> Path:
    """Replay an episode and encode it."""
    with fleet_for_video(film.env, film.env_kwargs) as fleet:
        batch = fleet.reset(seed=[film.seed], tasks=None if film.task is None else [film.task])
        frames = [_picture(fleet)]
        for action in film.actions:
            batch = fleet.step(tree_map(lambda leaf: np.asarray(leaf)[None], action))
            frames.append(_picture(fleet))
            if batch.ended[0]:
                break
        total, fps = float(np.mean(batch.ep_return[0])), int(fleet.metadata.get("render_fps", 30))
    path = write_video(film.path, frames, fps)
    if abs(total - film.episode_return) > 1e-6 * max(1.0, abs(total)):
        note = f"replayed with return {total}, trained on {film.episode_return}: the environment is not deterministic\n"
        path.with_suffix(".txt").write_text(note)
    return path


class VideoMaker:
    """Starts one background process per film and waits for them at the end."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.problems: list[str] = []

    def make(self, film: Film) -> None:
        """Begin encoding a film; returns at once."""
        self._collect(timeout_s=None)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(delete=False, suffix=".film") as file:
                file.write(cloudpickle.dumps(film))
            command = [sys.executable, "-m", "envfleet.train.video", file.name]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            self._running.append((process, Path(file.name)))
        except OSError as error:  # a full disk: one film is missing, the run goes on
            self.problems.append(f"{film.path}: {error.strerror or error}")

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait for the films in the making, a bounded time each."""
        self._collect(timeout_s)

    def _collect(self, timeout_s: float | None) -> None:
        running, self._running = self._running, []
        for process, file in running:
            if timeout_s is None and process.poll() is None:
                self._running.append((process, file))
                continue
            try:
                _, complaint = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                _, complaint = process.communicate()
            if process.returncode:
                lines = complaint.decode(errors="replace").strip().splitlines()
                self.problems.append(lines[-1] if lines else f"exit code {process.returncode}")
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)
    # Our own temporary file, written a moment ago by the trainer.
    play(pickle.loads(Path(sys.argv[1]).read_bytes()))
