"""What a run shows while it runs: a live box in a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from envfleet.util.text import number

_END = "\x1b[K\n\x1b[J"  # erases the rest of the line, and what was drawn below
_BLOCKS = "▁▂▃▄▅▆▇█"
_TWO_COLUMNS = 70  # below this width the numbers are in one column, so that none is cut
_MAX_WIDTH = 79  # fits the usual 80 columns; a wider terminal that is made narrower then leaves nothing behind
_MAX_FAULTS, _WINDOW_S = 3, 5.0  # so many faults are shown in so many seconds


class View:
    """Shows the state of a run. This one shows nothing."""

    def start(self, header: Sequence[str]) -> None:
        """Take what is known before the first update: environment, fleet, device, where it is saved."""

    def fault(self, line: str) -> None:
        """Take a fault."""

    def note(self, line: str) -> None:
        """Take an event that is rare and matters."""

    def show(self, status: dict[str, Any]) -> None:
        """Take the numbers of an update."""

    def interrupt(self) -> None:
        """Something else was written to the terminal. Called from signal handlers."""

    def close(self) -> None:
        """Stop showing."""


class Lines(View):
    """A line every few seconds, for logs and pipes."""

    def __init__(self, out: TextIO | None = None, every_s: float = 5.0) -> None:
        self._out = out or sys.stdout
        self._every_s = every_s
        self._last = float("-inf")
        self._status: dict[str, Any] | None = None
        self._window, self._shown, self._hidden = float("-inf"), 0, 0  # faults: since when, shown since then, not shown

    def start(self, header: Sequence[str]) -> None:
        """Print it."""
        self._write("\n".join(header) + "\n")

    def fault(self, line: str) -> None:
        """Print the first few; the next line of numbers counts the others."""
        now = time.monotonic()
        if now - self._window >= _WINDOW_S:
            self._window, self._shown = now, 0
        if self._shown < _MAX_FAULTS:
            self._shown += 1
            self.note(f"fault: {line}")
        else:
            self._hidden += 1

    def note(self, line: str) -> None:
        """Print it."""
        self._write(f"{line}\n")

    def show(self, status: dict[str, Any]) -> None:
        """Print, unless the last line is recent."""
        self._status = status
        if time.monotonic() - self._last >= self._every_s:
            self._print()

    def close(self) -> None:
        """Print what has not been printed yet."""
        if self._status is not None:
            self._print()

    def _print(self) -> None:
        s, self._status, self._last = self._status or {}, None, time.monotonic()
        parts = [*_progress(s), f"return {number(s.get('return'), 4)}", f"length {number(s.get('length'), 4)}"]
        parts += [f"{s['sps']:,.0f} steps/s", f"{_clock(s['left_s'])} left"]
        if s.get("num_faults"):
            parts.append(f"faults {s['num_faults']:,}" + (f" ({self._hidden:,} not shown)" if self._hidden else ""))
            self._hidden = 0
        self._write("  ".join(parts) + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Live(Lines):
    """A box of constant height that is drawn again in place, for terminals."""

    def __init__(self, out: TextIO | None = None, every_s: float = 0.25) -> None:
        super().__init__(out, every_s)
        self._returns: list[float] = []
        self._drawn: list[int] = []  # the width of every line on the screen

    def note(self, line: str) -> None:
        """Write it above the box, whole: the cause of a fault is at its end."""
        self._write(f"{self._back()}{line}{_END}")

    def show(self, status: dict[str, Any]) -> None:
        """Draw, unless it was drawn just now."""
        if isinstance(status.get("return"), float):
            self._returns.append(status["return"])
        super().show(status)

    def interrupt(self) -> None:
        """Draw the next box below."""
        self._drawn = []

    def _print(self) -> None:
        s, self._status, self._last = self._status or {}, None, time.monotonic()
        lines = box(s, self._returns, min(self._columns() - 1, _MAX_WIDTH))
        self._write(self._back() + "\x1b[K\n".join(f"{colour}{line}\x1b[0m" for colour, line in lines) + _END)
        self._drawn = [len(line) for _, line in lines]

    def _columns(self) -> int:
        return max(shutil.get_terminal_size().columns, 20)

    def _back(self) -> str:
        """Back to the first line of the box. A terminal that was made narrower has broken its lines."""
        columns, drawn = self._columns(), self._drawn
        self._drawn = []
        return f"\x1b[{sum(-(-width // columns) for width in drawn)}F" if drawn else ""


def box(s: dict[str, Any], returns: Sequence[float], width: int) -> list[tuple[str, str]]:
    """The numbers of a run as lines of `width` characters, each with the code of its colour.

    Example:
        >>> status = {"step": 50, "total_steps": 100, "sps": 10.0, "left_s": 5.0, "env": "CartPole-v1"}
        >>> lines = [line for _, line in box(status, [1.0, 2.0], 60)]
        >>> print(lines[0], {len(line) for line in lines})
        ╭─ PPO · CartPole-v1 ──────────────────────────────────────╮ {60}
    """
    share = s.get("collect_share", 0.0)
    cells = [
        ("steps", _of(s["step"], None if s.get("num_episodes") else s["total_steps"])),
        ("time", f"{_clock(s.get('wall_s', 0.0))}, {_clock(s['left_s'])} left"),
        ("episodes", _of(s.get("n_completed_episodes", 0), s.get("num_episodes"))),
        ("steps/s", f"{s['sps']:,.0f}"),
        ("return", f"{number(s.get('return'), 4)} (last 100)"),
        ("collect, learn", f"{share:.0%}, {1 - share:.0%}"),
        ("length", number(s.get("length"), 4)),
        ("losses", f"{number(s.get('policy_loss'))}, {number(s.get('value_loss'))}"),
        ("faults", _faults(s)),
        ("entropy, KL", f"{number(s.get('entropy'))}, {number(s.get('approx_kl'))}"),
    ]
    inner, half = width - 4, (width - 5) // 2
    pairs = zip(cells[::2], cells[1::2])
    rows = [_cell(*one, 8, half) + " " + _cell(*two, 14, inner - half - 1) for one, two in pairs]
    if width < _TWO_COLUMNS:
        rows = [_cell(*cell, 14, inner) for cell in cells[::2] + cells[1::2]]
    done = min(s.get("done", s["step"] / max(s["total_steps"], 1)), 1.0)
    full = int(done * (inner - 6))
    bar = f"{'━' * full}{'─' * (inner - 6 - full)} {done:>5.0%}"
    curve = f"trend    {spark(returns, inner - 9)}"
    more = [
        f"{label:<8} {_numbers(s, prefix)}"
        for label, prefix in (("inner", "inner_return/"), ("tasks", "return/"), ("tasks", "task_return/"))
        if _has(s, prefix)
    ]
    chances = {name.removeprefix("probability/"): s[name] for name in s if name.startswith("probability/")}
    if chances:  # of the tasks that a curriculum chooses, the likeliest first
        more.append(f"{'assigns':<8} {_named(dict(sorted(chances.items(), key=lambda item: -item[1])))}")
    # Of many tasks: the quantiles above, and a few with their names.
    more += [f"{label:<8} {_named(s[name])}" for label, name in (("best", "best_tasks"), ("worst", "worst_tasks")) if name in s]
    title = f"╭─ PPO · {s.get('env', '')} "[: width - 1]
    return [
        ("\x1b[34m", title + "─" * (width - 1 - len(title)) + "╮"),
        *(("", f"│ {_cut(line, inner)} │") for line in (bar, *rows, *more, curve)),
        ("\x1b[34m", "╰" + "─" * (width - 2) + "╯"),
    ]


def spark(values: Sequence[float], width: int) -> str:
    """A curve of so many characters.

    Example:
        >>> spark([0, 1, 2, 3], 2), spark([], 3)
        ('▁█', '')
    """
    values = [value for value in values if math.isfinite(value)]
    width = max(min(width, len(values)), 0)
    ends = [(i + 1) * len(values) // width for i in range(width)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip([0, *ends], ends)]
    low, span = min(means, default=0.0), (max(means, default=0.0) - min(means, default=0.0)) or 1.0
    return "".join(_BLOCKS[int((value - low) / span * 7.99)] for value in means)


def _progress(s: dict[str, Any]) -> list[str]:
    """What is counted first, with its end."""
    step, episodes = s["step"], s.get("n_completed_episodes", 0)
    if s.get("num_episodes"):
        return [f"episode {episodes:,}/{s['num_episodes']:,}", f"steps {step:,}"]
    return [f"step {step:,}/{s['total_steps']:,}", f"episodes {episodes:,}"]


def _has(s: dict[str, Any], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in s)


def _numbers(s: dict[str, Any], prefix: str) -> str:
    """The values of all columns with a prefix: of inner episodes in their order, of tasks with their names."""
    found = {name.removeprefix(prefix): value for name, value in s.items() if name.startswith(prefix)}
    return "  ".join(number(value, 3) for value in found.values()) if prefix == "inner_return/" else _named(found)


def _named(values: dict[str, float]) -> str:
    return "  ".join(f"{name}: {number(value, 3)}" for name, value in values.items())


def _of(done: int, total: int | None) -> str:
    return f"{done:,} of {total:,}" if total else f"{done:,}"


def _faults(s: dict[str, Any]) -> str:
    quarantined = s.get("num_quarantined", 0)
    return f"{s.get('num_faults', 0):,}" + (f", quarantined slots {quarantined}" if quarantined else "")


def _cell(name: str, value: str, label: int, width: int) -> str:
    return _cut(f"{name:<{label}} {value}", width)


def _cut(text: str, width: int) -> str:
    """Exactly so many characters. What is cut ends with a mark: the rest of a number must not look like a number."""
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d}" if minutes >= 60 else f"{minutes}:{left:02d}"


def choose_view(quiet: bool = False) -> View:
    """Live in a terminal, lines otherwise."""
    if quiet:
        return View()
    can_draw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "utf" in (sys.stdout.encoding or "").lower()
    return Live() if can_draw else Lines()
