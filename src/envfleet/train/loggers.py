"""Where the numbers of a run go: CSV and JSONL always, TensorBoard by default, Weights & Biases when asked."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
import zlib
from pathlib import Path
from typing import Any, Protocol

from envfleet.errors import BadArgument, DamagedWarning
from envfleet.util.extras import from_extra
from envfleet.util.files import AppendFile, keep_aside, write_durably
from envfleet.util.text import first_line

Row = dict[str, float]
#: Every line of metrics.jsonl ends with the CRC-32 of the row without it.
_SEAL = re.compile(rb', "crc32": "([0-9a-f]{8})"\}$')


class Logger(Protocol):
    """Takes one row of numbers per update."""

    def log(self, row: Row, step: int) -> None:
        """Take the numbers of an update; `step` counts environment steps."""

    def close(self) -> None:
        """Write what is left."""


class TableLogger(Logger):
    """`metrics.csv` and `metrics.jsonl` in the run folder; on resume, rows after the checkpoint are cut off."""

    def __init__(self, folder: str | Path, resumed_at: int | None = None) -> None:
        self.folder = Path(folder)
        rows = _rows_to_keep(self.folder, resumed_at) if resumed_at is not None else []
        jsonl = self.folder / "metrics.jsonl"
        write_durably(jsonl, "".join(map(_line, rows)).encode(), fsync=False)
        self._file = AppendFile(jsonl)
        self._begin_table(rows)

    def _begin_table(self, rows: list[dict[str, Any]]) -> None:
        path = self.folder / "metrics.csv"
        columns = list(dict.fromkeys(name for row in rows for name in row))
        header = [_cells(dict(zip(columns, columns)), columns)] if rows else []
        write_durably(path, "".join([*header, *(_cells(row, columns) for row in rows)]).encode(), fsync=False)
        self._columns, self._table = columns, AppendFile(path)

    def log(self, row: Row, step: int) -> None:
        """Append a row to both files, whole: a kill or a full disk loses none that was written."""
        row = {"step": step, **row}
        self._file.append(_line(row))
        if row.keys() <= set(self._columns):
            self._table.append(_cells(row, self._columns))
        else:  # a table has one header: when evaluation adds its columns, it is written again
            before = self._table
            self._begin_table(read_rows(self.folder))
            before.close()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._table.close()


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Read the rows of `metrics.jsonl`. A `DamagedWarning` names lines that are not what was written; they are left out.

    A last line that was cut short by a kill is left out too.
    """
    path = Path(folder) / "metrics.jsonl"
    rows, wrong = _read_lines(path)
    if wrong:
        warnings.warn(f"{path} is damaged in {_line_numbers(wrong)}: left out", DamagedWarning, stacklevel=2)
    return rows


def _rows_to_keep(folder: Path, resumed_at: int) -> list[dict[str, Any]]:
    """The rows up to the checkpoint that is resumed from; a damaged file is kept aside, with a warning."""
    path = folder / "metrics.jsonl"
    rows, wrong = _read_lines(path)
    kept = [row for row in rows if row.get("update", 0) <= resumed_at]
    missing = sorted(set(range(1, resumed_at + 1)) - {int(row.get("update", 0)) for row in kept})
    if path.is_file() and (wrong or missing):
        aside = keep_aside(path)
        where = _line_numbers(wrong) if wrong else f"{len(missing)} rows up to update {resumed_at}, which are missing"
        warnings.warn(f"{path} is damaged in {where}: kept as {aside.name}", DamagedWarning, stacklevel=4)
    return kept


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows, and the numbers of the lines that are damaged."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    rows, wrong = [], []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):  # what follows the last line feed was being written
            wrong.append(number)
    return rows, wrong


def _line_numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")
    return f"line {shown}" if len(numbers) == 1 else f"lines {shown}"


def _line(row: dict[str, Any]) -> str:
    text = json.dumps(row)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def _row(line: bytes) -> dict[str, Any] | None:
    """A row, or None for a line that is not what was written. Rows from before there were checksums hold numbers only."""
    seal = _SEAL.search(line)
    text = line[: seal.start()] + b"}" if seal else line
    if seal and int(seal.group(1), 16) != zlib.crc32(text):
        return None
    try:
        row = json.loads(text)
    except ValueError:
        return None
    numbers = isinstance(row, dict) and all(isinstance(value, (int, float)) for value in row.values())
    return row if numbers else None


def _cells(row: dict[str, Any], columns: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([row.get(name, "") for name in columns])
    return text.getvalue()


class TensorBoardLogger(Logger):
    """TensorBoard event files in `<run>/tensorboard`."""

    def __init__(self, folder: str | Path, resumed_at_step: int | None = None) -> None:
        with from_extra("train"):
            from torch.utils.tensorboard import SummaryWriter
        # purge_step hides what was logged after the checkpoint that is resumed from.
        self._writer: Any = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=resumed_at_step)

    def log(self, row: Row, step: int) -> None:
        """Write one scalar per entry."""
        for name, value in row.items():
            self._writer.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger(Logger):
    """One Weights & Biases run, in the trainer's process; workers do not use it."""

    def __init__(self, folder: str | Path | None, config: dict[str, Any], project: str, mode: Any, run_id: str | None) -> None:
        with from_extra("wandb"):
            import wandb
        try:
            self._run: Any = wandb.init(
                project=project,
                config=config,
                dir=str(folder) if folder else None,
                mode=mode,
                id=run_id,
                resume="allow" if run_id else None,
            )
        except wandb.errors.Error as error:
            remedy = "log in (`wandb login`), or use --wandb-mode offline"
            raise BadArgument(f"--wandb: Weights & Biases cannot be used here ({first_line(error)}): {remedy}") from error
        except ValueError as error:  # of its settings, which it reads from the variables WANDB_… too: an empty one is wrong
            words = ", ".join(line.strip() for line in str(error).splitlines()[:3])
            remedy = "unset or mend the variable WANDB_… of that name; the mode is online, offline or disabled"
            raise BadArgument(f"--wandb: Weights & Biases refuses a setting ({words}): {remedy}") from error
        self.run_id: str = self._run.id

    def log(self, row: Row, step: int) -> None:
        """Send a row."""
        self._run.log(row, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
