"""Make the README's pictures again: `python tools/make_pictures.py [throughput] [demo]`.

`throughput.svg` is drawn from the tables in docs/performance.md, which the benchmark writes. `demo.svg` is a recording of
`envfleet demo`: every line appears when it appeared, but no pause is longer than a second. Both are plain SVG, without scripts and fonts from elsewhere.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"

#: What the tables call a contestant -> what the picture calls it.
SHOWN = {
    "ours auto": "envfleet",
    "gymnasium Sync": "Gymnasium SyncVectorEnv",
    "SB3 Dummy": "SB3 DummyVecEnv",
    "RLlib two runners": "RLlib, two runners",
    "gymnasium Async": "Gymnasium AsyncVectorEnv",
    "Tianshou Shmem": "Tianshou ShmemVectorEnv",
    "SB3 Subproc (fork)": "SB3 SubprocVecEnv",
    "TorchRL Parallel": "TorchRL ParallelEnv",
}
#: Longer pauses in a recording are shortened to this.
LONGEST_PAUSE_S = 1.0
PANELS = ("CartPole-v1, 64 slots", "Ant-v5, 64 slots")
SANS, MONO = "system-ui,Segoe UI,Helvetica,Arial,sans-serif", "ui-monospace,Menlo,Consolas,monospace"


def rates(page: str, title: str) -> dict[str, float]:
    """Steps per second of every contestant in the first table with this title."""
    table = page.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 1 and re.fullmatch(r"[\d.]+[kM]?", cells[1]):
            found[cells[0]] = float(cells[1].rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(cells[1][-1], 1.0)
    return found


def throughput(page: str) -> str:
    """Two groups of bars, envfleet first, with the machine's limit as a line."""
    width, left, row, head = 860, 200, 22, 44
    body, y = [], 10
    for title in PANELS:
        found = rates(page, title)
        limit = found["limit"]
        scale = (width - left - 120) / max(limit, *(found[name] for name in SHOWN))
        env = title.partition(",")[0]
        body.append(
            f'<text x="{left}" y="{y + 16}" font-size="15" font-weight="600">{env}, 64 environments, steps per second</text>'
        )
        y += head - 14
        top = y
        for name, label in SHOWN.items():
            ours, long = name.startswith("ours"), found[name] * scale
            weight = ' font-weight="700"' if ours else ""
            body.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end"{weight}>{label}</text>')
            body.append(
                f'<rect x="{left}" y="{y + 2}" width="{max(long, 1):.1f}" height="{row - 6}" fill="{"#2563eb" if ours else "#94a3b8"}"/>'
            )
            place = f'x="{left + long - 6:.1f}" text-anchor="end" fill="#ffffff"' if ours else f'x="{left + long + 6:.1f}"'
            body.append(f'<text {place} y="{y + 14}"{weight}>{found[name]:,.0f}</text>')
            y += row
        x = left + limit * scale
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y}" stroke="#dc2626" stroke-dasharray="4 3"/>')
        body.append(
            f'<text x="{x - 6:.1f}" y="{y - 4}" text-anchor="end" fill="#dc2626">limit of this machine: {limit:,.0f}</text>'
        )
        y += 26
    return _svg(width, y, f'<g font-family="{SANS}" font-size="13" fill="#1e293b">{"".join(body)}</g>', "#ffffff")


def record(command: list[str]) -> list[tuple[float, str]]:
    """Run a command; its lines with the seconds at which they came."""
    began = time.monotonic()
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as running:
        assert running.stdout is not None
        lines = [(time.monotonic() - began, line.rstrip("\n")) for line in running.stdout]
    if running.returncode:
        sys.exit(f"{command} ended with {running.returncode}")
    return lines


def terminal(prompt: str, lines: list[tuple[float, str]], columns: int = 118) -> str:
    """A terminal in which the lines appear at their times."""
    cell, high, left, top = 7.3, 17, 14, 44
    shown = [(0.0, f"$ {prompt}")]
    waited = 0.0  # how much of the waiting was left out
    for before, (at, line) in zip([0.0, *(at for at, _ in lines)], lines):
        waited += max(0.0, at - before - LONGEST_PAUSE_S)
        shown.append((at - waited, line[: columns - 1] + "…" if len(line) > columns else line))
    text = []
    for i, (at, line) in enumerate(shown):
        colour = "#86efac" if "✓" in line else "#f8fafc" if line.startswith("$") or re.match(r"\d/\d", line) else "#cbd5e1"
        text.append(
            f'<text class="l" style="animation-delay:{at + 0.3:.2f}s" x="{left}" y="{top + i * high}" fill="{colour}" '
            f'xml:space="preserve">{html.escape(line)}</text>'
        )
    dots = "".join(
        f'<circle cx="{18 + 18 * i}" cy="16" r="5" fill="{c}"/>' for i, c in enumerate(("#f87171", "#fbbf24", "#4ade80"))
    )
    # Where nothing moves (a viewer without animations, print), all lines are visible.
    style = "<style>.l{animation:on .01s linear backwards}@keyframes on{from{opacity:0}}@media (prefers-reduced-motion){.l{animation:none}}</style>"
    body = f'{style}{dots}<g font-family="{MONO}" font-size="12">{"".join(text)}</g>'
    return _svg(int(columns * cell + 2 * left), top + len(shown) * high + 4, body, "#0f172a")


def _svg(width: int, height: int, body: str, background: str) -> str:
    box = f'<rect width="{width}" height="{height}" rx="8" fill="{background}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">{box}{body}</svg>\n'


def main(wanted: list[str]) -> None:
    """Make the pictures of these names; all if there are none."""
    if not wanted or "throughput" in wanted:
        (IMAGES / "throughput.svg").write_text(throughput((ROOT / "docs" / "performance.md").read_text()))
    if not wanted or "demo" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            lines = record([sys.executable, "-m", "envfleet", "demo", "--out", f"{folder}/demo"])
            shown = [(at, line.replace(f"{folder}/demo", "runs/demo")) for at, line in lines]
        (IMAGES / "demo.svg").write_text(terminal("envfleet demo", shown))


if __name__ == "__main__":
    main(sys.argv[1:])
