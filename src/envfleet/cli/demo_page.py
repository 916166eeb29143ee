"""`demo.html`: what the demo found, on one page that is readable offline, with pictures as inline SVG."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from envfleet.cli.demo_parts import Part
from envfleet.train.chart import line_chart
from envfleet.train.html_report import write_page

_OURS, _OTHERS = "#2563eb", "#94a3b8"
_COLOURS = {"ok": "#bbf7d0", "fault": "#dc2626"}
_MARKS = {True: '<span style="color:#15803d">✓</span>', False: '<span style="color:#b91c1c">✗</span>'}


def write_demo(folder: Path, parts: Sequence[Part], machine: str) -> Path:
    """Write the page of these parts into the folder."""
    sections = "".join(_section(part, folder) for part in parts)
    intro = f"<p>All of this was run on {html.escape(machine)}, when this page was written.</p>"
    return write_page(folder / "demo.html", "envfleet demo", [intro, sections])


def _section(part: Part, folder: Path) -> str:
    pictures = _table(part.rows) if part.rows else ""
    pictures += bars(part.bars, part.unit) if part.bars else ""
    pictures += timeline(part.timeline) if part.timeline else ""
    if part.metrics:
        points = [(float(row["step"]), float(row["return"])) for row in part.metrics if isinstance(row.get("return"), float)]
        title = "Return of training episodes (mean of the last 100)"
        pictures += line_chart({"return": points}, title, "environment steps", "return", 640, 300)
    link = ""
    if part.link is not None:
        target = html.escape(os.path.relpath(part.link, folder))
        link = f'<p>All curves, settings and timings of the run: <a href="{target}">{target}</a></p>'
    return f"<h2>{html.escape(part.title)}</h2><p>{_MARKS[part.ok]} {html.escape(part.verdict)}</p>{pictures}{link}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{lines}</table>"


def bars(values: dict[str, float], unit: str, width: int = 640) -> str:
    """One bar per value, its number beside it.

    Example:
        >>> bars({"a": 1.0, "b": 2.0}, "steps/s").count("<rect")
        2
    """
    left, right, row = 205, 110, 26
    most = max(values.values()) or 1.0
    lines = []
    for i, (name, value) in enumerate(values.items()):
        y, long = 8 + i * row, (width - left - right) * value / most
        colour = _OTHERS if name.startswith("Gymnasium") else _OURS
        lines.append(
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" font-size="13">{html.escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{max(long, 1):.1f}" height="{row - 8}" fill="{colour}"/>'
            f'<text x="{left + long + 6:.1f}" y="{y + 14}" font-size="12">{value:,.0f} {html.escape(unit)}</text>'
        )
    return f'<svg width="{width}" height="{len(values) * row + 8}" role="img" aria-label="{html.escape(unit)}">{"".join(lines)}</svg>'


def timeline(slots: Sequence[Sequence[str]], width: int = 640) -> str:
    """A row per slot, a cell per step: green where the row is data, red where it is marked FAULT."""
    left, row, steps = 60, 18, len(slots[0])
    cell = (width - left - 10) / steps
    marks = []
    for slot, cells in enumerate(slots):
        y = 6 + slot * row
        marks.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end" font-size="12">slot {slot}</text>')
        marks.append(f'<rect x="{left}" y="{y}" width="{steps * cell:.1f}" height="{row - 4}" fill="{_COLOURS["ok"]}"/>')
        marks += [
            f'<rect x="{left + step * cell - 1:.1f}" y="{y}" width="{cell + 2:.1f}" height="{row - 4}" fill="{_COLOURS["fault"]}"/>'
            for step, what in enumerate(cells)
            if what == "fault"
        ]
    bottom = 6 + len(slots) * row + 14
    marks.append(f'<text x="{left}" y="{bottom}" font-size="12">step 0</text>')
    marks.append(f'<text x="{width - 10}" y="{bottom}" text-anchor="end" font-size="12">step {steps}</text>')
    legend = f'<tspan fill="{_COLOURS["fault"]}">■</tspan> a row marked FAULT'
    marks.append(f'<text x="{width / 2:.0f}" y="{bottom}" text-anchor="middle" font-size="12">{legend}</text>')
    return f'<svg width="{width}" height="{bottom + 8}" role="img" aria-label="rows per slot">{"".join(marks)}</svg>'
