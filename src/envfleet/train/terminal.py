"""What a run shows while it runs: a live table in a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from envfleet.util.extras import from_extra
from envfleet.util.text import number


class View:
    """Shows the state of a run. This one shows nothing."""

    def show(self, status: dict[str, Any]) -> None:
        """Take the numbers of an update."""

    def close(self) -> None:
        """Stop showing."""


class Lines(View):
    """A line every few seconds, for logs and pipes."""

    def __init__(self, out: TextIO | None = None, every_s: float = 5.0) -> None:
        self._out = out or sys.stdout
        self._every_s = every_s
        self._last = float("-inf")
        self._status: dict[str, Any] | None = None

    def show(self, status: dict[str, Any]) -> None:
        """Print, unless the last line is recent."""
        self._status = status
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self._print(status)
            self._status = None

    def _print(self, s: dict[str, Any]) -> None:
        print(
            f"step {s['step']:,}/{s['total_steps']:,}  return {number(s.get('return'), 4)}  "
            f"length {number(s.get('length'), 4)}  episodes {s.get('n_completed_episodes', 0)}  {s['sps']:,.0f} steps/s",
            file=self._out,
            flush=True,
        )

    def close(self) -> None:
        """Print what has not been printed yet."""
        if self._status is not None:
            self._print(self._status)


class Live(View):
    """A table that is redrawn in place (rich)."""

    def __init__(self) -> None:
        with from_extra("train"):
            from rich.live import Live as RichLive
        self._live = RichLive(refresh_per_second=4, transient=False)
        self._live.start()
        self._last = 0.0

    def show(self, status: dict[str, Any]) -> None:
        """Redraw, a few times a second at most."""
        now = time.monotonic()
        if now - self._last >= 0.2 or status["step"] >= status["total_steps"]:
            self._last = now
            self._live.update(table(status))

    def close(self) -> None:
        """Leave the last table standing."""
        self._live.stop()


def table(s: dict[str, Any]) -> Any:
    """Draw the numbers of a run as a rich panel."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for _ in range(4):
        grid.add_column()
    left = max(s["total_steps"] - s["step"], 0)
    eta = left / s["sps"] if s["sps"] else 0.0
    cells = [
        ("steps", f"{s['step']:,} / {s['total_steps']:,}"), ("ETA", f"{int(eta // 60)}:{int(eta % 60):02d}"),
        ("return (mean 100)", number(s.get("return"), 4)), ("length (mean 100)", number(s.get("length"), 4)),
        ("n_completed_episodes", f"{s.get('n_completed_episodes', 0):,}"), ("n_envs", str(s.get("n_envs", 1))),
        ("steps/s", f"{s['sps']:,.0f}"),
        ("collect / learn", f"{s.get('collect_share', 0):.0%} / {1 - s.get('collect_share', 0):.0%}"),
        ("fleet", str(s.get("plan", ""))), ("faults", str(s.get("num_faults", 0))),
        ("policy / value loss", f"{number(s.get('policy_loss'), 4)} / {number(s.get('value_loss'), 4)}"),
        ("entropy / KL", f"{number(s.get('entropy'), 4)} / {number(s.get('approx_kl'), 4)}"),
    ]  # fmt: skip
    for (name, value), (other, more) in zip(cells[::2], cells[1::2]):
        grid.add_row(f"[dim]{name}", value, f"[dim]{other}", more)
    bar = ProgressBar(total=s["total_steps"], completed=min(s["step"], s["total_steps"]))
    return Panel(Group(bar, grid), title=f"PPO · {s.get('env', '')}", border_style="blue")


def choose_view(quiet: bool = False) -> View:
    """Live in a terminal, lines otherwise."""
    if quiet:
        return View()
    return Live() if sys.stdout.isatty() else Lines()
