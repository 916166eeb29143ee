"""`report.html`: one page about a run, readable offline: curves as inline SVG, config, throughput, faults, how to repeat it."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from envfleet.train.loggers import read_rows
from envfleet.util.files import write_durably
from envfleet.util.text import number

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}
td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}code,pre{background:#f4f4f4;padding:.1em .3em}
pre{padding:.8em;overflow:auto}svg{background:#fafafa;margin:0 1em 1em 0}.plots{display:flex;flex-wrap:wrap}
"""
_CURVES = (
    ("return", "Return of training episodes (mean of the last 100)"),
    ("eval/mean_return", "Return in evaluation"),
    ("length", "Episode length (mean of the last 100)"),
    ("value_loss", "Value loss"),
    ("policy_loss", "Policy loss"),
    ("entropy", "Entropy"),
    ("approx_kl", "Distance of the policy per update (KL)"),
    ("sps", "Steps per second"),
)


def write_report(folder: str | Path, about: dict[str, Any]) -> Path:
    """Write the report of a run folder from its metrics; `about` holds config, plan, faults, command and results."""
    folder = Path(folder)
    rows = read_rows(folder)
    parts = [f"<h1>{_text(about.get('title', 'Training run'))}</h1>", _summary(rows, about)]
    curves = [curve(rows, name, title) for name, title in (*_CURVES, *_by_name(rows))]
    parts.append(f'<h2>Curves</h2><div class="plots">{"".join(part for part in curves if part)}</div>')
    parts.append("<h2>Where the time went</h2>" + _table(about.get("throughput", {})))
    parts.append("<h2>Faults</h2>" + _faults(about.get("faults", [])))
    if about.get("episodes"):
        parts.append("<h2>Episodes</h2>" + _table(about["episodes"]))
    again = f"<pre>{_text(about.get('command', ''))}</pre>"
    parts.append(f"<h2>How to repeat it</h2>{again}<p>Versions: {_text(json.dumps(about.get('versions', {})))}</p>")
    parts.append("<h2>Settings</h2>" + _table(about.get("config", {})))
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(about.get("title", "run"))}</title><style>{STYLE}</style><body>{"".join(parts)}</body></html>'
    path = folder / "report.html"
    write_durably(path, page.encode())
    return path


def _by_name(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Curves of the returns of every agent, environment or task where there are several, and of the rating."""
    names = sorted({name for row in rows for name in row if name.startswith("return/")})
    shown = [(name, f"Return of {name.removeprefix('return/')}") for name in names[:12]] if len(names) > 1 else []
    return [*shown, ("elo", "Elo rating against past policies")]


def _summary(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    last = rows[-1] if rows else {}
    facts = {
        "Steps": f"{int(last.get('step', 0)):,}",
        "Updates": int(last.get("update", 0)),
        "Return (mean of the last 100 episodes)": number(last.get("return")),
        "Fleet": about.get("plan", ""),
        **about.get("results", {}),
    }
    return _table(facts)


def curve(rows: list[dict[str, Any]], name: str, title: str, width: int = 440, height: int = 240) -> str:
    """One column of the metrics over the steps, as an SVG picture; empty when there is nothing to draw."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float)) and row[name] == row[name]]
    if len(points) < 2:
        return ""
    points = points[:: max(len(points) // 400, 1)]
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    low, high = min(ys), max(ys)
    high = high if high > low else low + 1.0
    left, right, top, bottom = 58, 10, 30, 28
    span = max(xs[-1] - xs[0], 1.0)

    def at(x: float, y: float) -> str:
        px = left + (x - xs[0]) / span * (width - left - right)
        py = height - bottom - (y - low) / (high - low) * (height - top - bottom)
        return f"{px:.1f},{py:.1f}"

    line = " ".join(at(x, y) for x, y in zip(xs, ys))
    labels = "".join(
        f'<text x="{left - 6}" y="{at(xs[0], y).split(",")[1]}" text-anchor="end" font-size="11">{number(y)}</text>'
        f'<line x1="{left}" x2="{width - right}" y1="{at(xs[0], y).split(",")[1]}" y2="{at(xs[0], y).split(",")[1]}" stroke="#ddd"/>'
        for y in (low, (low + high) / 2, high)
    )
    ends = "".join(
        f'<text x="{at(x, low).split(",")[0]}" y="{height - 8}" text-anchor="{anchor}" font-size="11">{int(x):,}</text>'
        for x, anchor in ((xs[0], "start"), (xs[-1], "end"))
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="{_text(title)}">'
        f'<text x="{left}" y="18" font-size="13">{_text(title)}</text>{labels}{ends}'
        f'<polyline fill="none" stroke="#2563eb" stroke-width="1.6" points="{line}"/></svg>'
    )


def _faults(faults: list[str]) -> str:
    if not faults:
        return "<p>None.</p>"
    shown = "".join(f"<li>{_text(fault)}</li>" for fault in faults[:50])
    more = f"<p>… {len(faults)} in all.</p>" if len(faults) > 50 else ""
    return f"<ul>{shown}</ul>{more}"


def _table(values: dict[str, Any]) -> str:
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in values.items())
    return f"<table>{rows}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))
