"""Where the numbers of a run go: CSV and JSONL always, TensorBoard by default, Weights & Biases when asked."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any, Protocol

from envfleet.errors import BackendMissing

Row = dict[str, float]


class Logger(Protocol):
    """Takes one row of numbers per update."""

    def log(self, row: Row, step: int) -> None:
        """Take the numbers of an update; `step` counts environment steps."""

    def close(self) -> None:
        """Write what is left."""


class TableLogger:
    """`metrics.csv` and `metrics.jsonl` in the run folder; on resume, rows after the checkpoint are cut off.

    Example:
        >>> import tempfile
        >>> logger = TableLogger(tempfile.mkdtemp())
        >>> logger.log({"update": 1.0, "return": 20.0}, step=1024)
        >>> logger.close()
        >>> (logger.folder / "metrics.csv").read_text().split()
        ['step,update,return', '1024,1.0,20.0']
    """

    def __init__(self, folder: str | Path, resumed_at: int | None = None) -> None:
        self.folder = Path(folder)
        self._jsonl, self._csv = self.folder / "metrics.jsonl", self.folder / "metrics.csv"
        self._columns: list[str] = []
        rows = read_rows(self.folder) if resumed_at is not None else []
        kept = [row for row in rows if row.get("update", 0) <= (resumed_at or 0)]
        _rewrite(self._jsonl, "".join(json.dumps(row) + "\n" for row in kept))
        for row in kept:
            self._columns += [name for name in row if name not in self._columns]
        self._rewrite_csv(kept)
        self._file = open(self._jsonl, "a", buffering=1)  # noqa: SIM115 - open for the whole run
        self._table = open(self._csv, "a", newline="", buffering=1)  # noqa: SIM115

    def log(self, row: Row, step: int) -> None:
        """Append a row to both files; each line is flushed, so a kill loses none that was written."""
        row = {"step": step, **row}
        self._file.write(json.dumps(row) + "\n")
        new = [name for name in row if name not in self._columns]
        if new:  # a table has one header: when evaluation adds its columns, it is written again
            self._columns += new
            self._table.close()
            self._rewrite_csv(read_rows(self.folder))
            self._table = open(self._csv, "a", newline="", buffering=1)  # noqa: SIM115
            return
        csv.writer(self._table, lineterminator="\n").writerow([row.get(name, "") for name in self._columns])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._table.close()

    def _rewrite_csv(self, rows: list[dict[str, Any]]) -> None:
        lines = [",".join(self._columns)] if self._columns else []
        lines += [",".join(str(row.get(name, "")) for name in self._columns) for row in rows]
        _rewrite(self._csv, "".join(line + "\n" for line in lines))


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Read the rows of `metrics.jsonl`; a last line cut short by a kill is left out."""
    path = Path(folder) / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # cut short by a kill
    return rows


def _rewrite(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


class TensorBoardLogger:
    """TensorBoard event files in `<run>/tensorboard`."""

    def __init__(self, folder: str | Path, resumed_at_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise BackendMissing("tensorboard", extra="train") from missing
        # purge_step hides what was logged after the checkpoint that is resumed from.
        self._writer: Any = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=resumed_at_step)

    def log(self, row: Row, step: int) -> None:
        """Write one scalar per entry."""
        for name, value in row.items():
            self._writer.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger:
    """One Weights & Biases run: it lives in the trainer's process, workers know nothing of it."""

    def __init__(
        self, folder: str | Path | None, config: dict[str, Any], project: str, mode: Any, run_id: str | None
    ) -> None:
        try:
            import wandb
        except ImportError as missing:
            raise BackendMissing("wandb", extra="wandb") from missing
        self._run: Any = wandb.init(
            project=project,
            config=config,
            dir=str(folder) if folder else None,
            mode=mode,
            id=run_id,
            resume="allow" if run_id else None,
        )
        self.run_id: str = self._run.id

    def log(self, row: Row, step: int) -> None:
        """Send a row."""
        self._run.log(row, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
