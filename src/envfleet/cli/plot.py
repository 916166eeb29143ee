"""Plots of the commands, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument


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
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as problem:
        raise BadArgument(f"the plot {path} cannot be written: {problem}") from None
