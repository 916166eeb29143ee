"""Plots of the commands, as files that are complete or absent."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument, MissingExtra
from envfleet.util.files import write_durably


def can_draw() -> bool:
    """Whether plots can be drawn; says what is missing if not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(f"no plot: {MissingExtra('matplotlib', extra='cli')}", file=sys.stderr, flush=True)
        return False
    return True


def draw(path: Path, title: str, panels: Sequence[Callable[[Any], None]], height: float = 3.6) -> None:
    """Write a picture of panels side by side; each function draws on the axes it is given."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels) + 1, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0]):
        panel(axes)
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, format=path.suffix[1:], dpi=110)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, drawn.getbuffer(), fsync=False)
    except OSError as problem:
        raise BadArgument(f"the plot {path} cannot be written: {problem}") from None
