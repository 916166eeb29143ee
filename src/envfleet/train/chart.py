"""Line charts as SVG text: axes with names and round ticks, one colour per series, a legend where there are several."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from envfleet.util.text import number

Points = Sequence[tuple[float, float]]

#: As many as there are lines in a chart of a report.
COLOURS = "#2563eb #dc2626 #059669 #d97706 #7c3aed #0891b2 #be185d #4d7c0f #111827 #92400e #9ca3af #f472b6".split()  # noqa: SIM905
_MOST_POINTS = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 32, 44


def line_chart(
    series: Mapping[str, Points], title: str, x_name: str, y_name: str, width: int = 450, height: int = 260, x_low: float = 0.0
) -> str:
    """Draw series of (x, y) points, x from `x_low`; empty when none has two points. Values that are not finite are left out.

    Example:
        >>> line_chart({"a": [(0, 1.0), (10, 2.0)]}, "Return", "steps", "return")[:4]
        '<svg'
        >>> line_chart({"a": [(0, 1.0)]}, "Return", "steps", "return")
        ''
    """
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    kept = {name: points[:: max(len(points) // _MOST_POINTS, 1)] for name, points in kept.items() if len(points) > 1}
    if not kept:
        return ""
    xs, ys = [x for points in kept.values() for x, _ in points], [y for points in kept.values() for _, y in points]
    x_ticks, y_ticks = ticks(x_low, max(xs)), ticks(min(ys), max(ys))
    if all(float(x).is_integer() for x in xs):  # there is no inner episode 1.5
        x_ticks = [x for x in x_ticks if float(x).is_integer()]
    legend = 18 * len(kept) if len(series) > 1 else 0
    x_high, y_low, y_high = max(*xs, x_low + 1e-9), y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (width - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return height - _BOTTOM - (y - y_low) / (y_high - y_low) * (height - _TOP - _BOTTOM)

    parts = [_label(_LEFT, 18, title, size=13, weight="600")]
    for y in y_ticks:
        parts.append(f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="#e2e2e2"/>')
        parts.append(_label(_LEFT - 6, py(y) + 4, number(y), "end"))
    for x in (x for x in x_ticks if x_low <= x <= x_high):
        parts.append(
            f'<line x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{height - _BOTTOM}" y2="{height - _BOTTOM + 4}" stroke="#888"/>'
        )
        parts.append(_label(px(x), height - _BOTTOM + 16, _thousands(x), "middle"))
    parts.append(_label((_LEFT + width - _RIGHT) / 2, height - 8, x_name, "middle"))
    middle = (_TOP + height - _BOTTOM) / 2
    parts.append(_label(14, middle, y_name, "middle", turn=f' transform="rotate(-90 14 {middle})"'))
    for index, (name, points) in enumerate(kept.items()):
        colour = COLOURS[list(series).index(name) % len(COLOURS)]
        line = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{line}"/>')
        if legend:
            at = height + 12 + 18 * index
            parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 22}" y1="{at - 4}" y2="{at - 4}" stroke="{colour}" stroke-width="3"/>')
            parts.append(_label(_LEFT + 30, at, name))
    size = f'width="{width}" height="{height + legend}"'
    return f'<svg {size} role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`.

    Example:
        >>> ticks(3, 97), ticks(0.5, 0.5)
        ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    if high <= low:
        pad = abs(low) or 1.0
        low, high = low - pad, low + pad
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _thousands(x: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def _label(x: float, y: float, text: str, anchor: str = "start", size: int = 11, weight: str = "400", turn: str = "") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}{turn}>{html.escape(text)}</text>'
