"""`report.html`: one page about a run, or about several side by side, readable offline: curves as inline SVG and tables."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from envfleet.errors import BadArgument
from envfleet.train.chart import line_chart
from envfleet.train.loggers import read_rows
from envfleet.util.files import write_durably
from envfleet.util.text import number

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}
td,th{padding:.2em 1.2em .2em 0;text-align:left;vertical-align:top;border-bottom:1px solid #eee}th{font-weight:600}
code,pre{background:#f4f4f4;padding:.1em .3em}pre{padding:.8em;white-space:pre-wrap;overflow-wrap:anywhere}
svg{background:#fafafa;margin:0 1em 1em 0}.plots{display:flex;flex-wrap:wrap}
"""
#: Column of the metrics -> title of its chart and name of its axis.
_CURVES = {
    "return": ("Return of training episodes", "mean of the last 100"),
    "eval/mean_return": ("Return in evaluation", "mean return"),
    "length": ("Length of training episodes", "steps, mean of the last 100"),
    "sps": ("Speed", "steps per second"),
    "value_loss": ("Value loss", "value loss"),
    "policy_loss": ("Policy loss", "policy loss"),
    "entropy": ("Entropy of the policy", "entropy (nats)"),
    "approx_kl": ("Change of the policy per update", "KL divergence (nats)"),
    "elo": ("Rating against past policies", "Elo"),
}
#: Of families, the column in which several runs are compared.
_COMPARED = {
    "task_return/50 %": ("Return of the median task", "mean of the last episodes"),
    "probability/likeliest": ("How likely the curriculum's likeliest task is", "probability"),
}
#: Columns that belong together -> title of their chart and name of its axis.
_FAMILIES = {
    "inner_return/": ("Return of inner episodes", "mean return"),
    "task_return/": ("Return over tasks", "quantiles of the tasks' returns"),
    "probability/": ("What the curriculum assigns", "probability"),
}
_STEPS, _SECONDS = "environment steps", "training time (s)"


def write_report(folder: str | Path, about: dict[str, Any] | None = None, path: str | Path | None = None) -> Path:
    """Write the report of a run folder from its metrics, as `report.html` or `path`.

    `about` holds what the metrics do not: plan, throughput, faults, command, versions. It is kept in `report.json`, from which a
    later call takes it.
    """
    folder = Path(folder)
    if about is not None:
        write_durably(folder / "report.json", json.dumps(about, indent=1, default=str).encode())
    config, rows, about = _stored(folder, "config.json"), read_rows(folder), about or _stored(folder, "report.json")
    title = f"PPO on {config.get('env', '')}"
    parts = [_table(_facts(rows) | {"Fleet": about.get("plan", "–")})]
    curves = [_adaptation({"": rows}), *(_family(rows, prefix, *words) for prefix, words in _FAMILIES.items())]
    curves += [_curve({"": rows}, name, *words) for name, words in (_CURVES | _by_name(rows, config)).items()]
    parts.append(f'<h2>Curves</h2><div class="plots">{"".join(curves)}</div>')
    parts.append("<h2>Where the time went</h2>" + _table(about.get("throughput", {})))
    parts.append("<h2>Faults</h2>" + _faults(about.get("faults", [])))
    if about.get("tasks"):
        parts.append("<h2>Tasks</h2>" + _tasks(about["tasks"]))
    if about.get("episodes"):
        parts.append("<h2>Episodes</h2>" + _table(about["episodes"]))
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    parts.append(f"<h2>How to repeat it</h2><pre>{_text(about.get('command', '–'))}</pre><p>{_text(versions)}</p>")
    parts.append("<h2>Settings</h2>" + _table(config))
    return write_page(Path(path) if path else folder / "report.html", title, parts)


def write_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page about several runs: their curves in the same charts, and the settings in which they differ."""
    names = _short_names([Path(folder) for folder in folders])
    runs = {name: read_rows(folder) for name, folder in names.items()}
    configs = {name: _stored(folder, "config.json") for name, folder in names.items()}
    facts = {name: _facts(rows) for name, rows in runs.items()}
    title = f"{len(runs)} runs side by side"
    parts = [_columns(facts)]
    charts = [_curve(runs, name, *_CURVES[name], by) for name in ("return", "eval/mean_return") for by in ("step", "wall_s")]
    charts.insert(0, _adaptation(runs))
    rest = _COMPARED | {name: words for name, words in _CURVES.items() if name not in ("return", "eval/mean_return")}
    charts += [_curve(runs, name, *words) for name, words in rest.items()]
    parts.append(f'<h2>Curves over steps and over time</h2><div class="plots">{"".join(charts)}</div>')
    parts.append(_compared_tasks({name: _stored(folder, "report.json").get("tasks") or {} for name, folder in names.items()}))
    keys = dict.fromkeys(key for config in configs.values() for key in config if key != "out")
    differ = [key for key in keys if len({json.dumps(config.get(key)) for config in configs.values()}) > 1]
    found = _columns({name: {key: config.get(key, "–") for key in differ} for name, config in configs.items()})
    parts.append("<h2>Settings that differ</h2>" + (found if differ else "<p>None.</p>"))
    return write_page(Path(path), title, parts)


def write_page(path: Path, title: str, parts: Sequence[str]) -> Path:
    """Write a page that needs nothing beside it."""
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{_text(title)}</h1>{"".join(parts)}</body></html>'
    write_durably(path, page.encode())
    return path


def _stored(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if name == "config.json" and not path.is_file():
        raise BadArgument(f"there is no run in {folder}: give the folder that `envfleet train --out` wrote")
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise BadArgument(f"{path} is damaged: {error}") from error
    return found if isinstance(found, dict) else {}


def _short_names(folders: Sequence[Path]) -> dict[str, Path]:
    """The last part of each path where these differ, else the whole."""
    last = [folder.resolve().name for folder in folders]
    return dict(zip(last if len(set(last)) == len(last) else map(str, folders), folders))


def _by_name(rows: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Curves of the returns of every agent, environment or task where there are several."""
    names = sorted({name for row in rows for name in row if name.startswith("return/")})
    kind = "task " if config.get("env_type") == "meta" else ""
    return {name: (f"Return of {kind}{name.removeprefix('return/')}", "return") for name in names[:12] if len(names) > 1}


def _facts(rows: list[dict[str, Any]]) -> dict[str, str]:
    last = rows[-1] if rows else {}
    evaluated = [row["eval/mean_return"] for row in rows if "eval/mean_return" in row]
    wall_s = last.get("wall_s", 0.0)
    return {
        "Steps": f"{int(last.get('step', 0)):,} in {int(last.get('update', 0)):,} updates",
        "Episodes": f"{int(last.get('n_completed_episodes', 0)):,}",
        "Training time": f"{wall_s:,.0f} s, {last.get('step', 0) / wall_s:,.0f} steps/s" if wall_s else "–",
        "Return (mean of the last 100 episodes)": number(last.get("return"), 4),
        "Return in the last evaluation": f"{evaluated[-1]:.4g} (best {max(evaluated):.4g})" if evaluated else "–",
        "Faults": f"{int(last.get('num_faults', 0)):,}",
    }


def _curve(runs: dict[str, list[dict[str, Any]]], name: str, title: str, y_name: str, by: str = "step") -> str:
    """One column of the metrics over steps or time, a line per run; empty when there is nothing to draw."""
    series = {
        run: [(float(row[by]), float(row[name])) for row in rows if isinstance(row.get(name), (int, float)) and by in row]
        for run, rows in runs.items()
    }
    return line_chart(series, title, _STEPS if by == "step" else _SECONDS, y_name)


def _family(rows: list[dict[str, Any]], prefix: str, title: str, y_name: str) -> str:
    """All columns with a prefix in one chart, the first twelve of them."""
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)))[:12]
    series = {
        name.removeprefix(prefix): [(float(row["step"]), float(row[name])) for row in rows if name in row] for name in names
    }
    return line_chart(series, title, _STEPS, y_name)


def _adaptation(runs: dict[str, list[dict[str, Any]]]) -> str:
    """How the return rises from inner episode to inner episode, in the last evaluation, if all runs have one, else in training."""
    last: dict[str, list[dict[str, Any]]] = {}
    # One update may have few episodes. The last fifth of a run: its beginning is another agent.
    for prefix, where, most in (("eval/inner_return/", "evaluation", 1), ("inner_return/", "training", 10)):
        seen = {run: [row for row in rows if f"{prefix}2" in row] for run, rows in runs.items()}
        last = {run: rows[-max(1, min(most, len(rows) // 5)) :] for run, rows in seen.items()}
        if where == "training" or all(last.values()):
            break
    series = {
        run: sorted(
            (float(name.rpartition("/")[2]), fmean(row[name] for row in rows if name in row))
            for name in {name for row in rows for name in row if name.startswith(prefix)}
        )
        for run, rows in last.items()
    }
    more = ", last updates" if most > 1 else ""
    return line_chart(series, f"Adaptation to a task, in {where}{more}", "inner episode", "mean return", x_low=1.0)


def _faults(faults: list[str]) -> str:
    if not faults:
        return "<p>None.</p>"
    shown = "".join(f"<li>{_text(fault)}</li>" for fault in faults[:50])
    more = f"<p>… {len(faults)} in all.</p>" if len(faults) > 50 else ""
    return f"<ul>{shown}</ul>{more}"


def _tasks(means: dict[str, float], few: int = 10) -> str:
    """The mean return of each task, the best first; of many tasks, those at both ends."""
    shown = {name: number(value, 4) for name, value in means.items()}
    words = "<p>Mean return of the last episodes of each task"
    if len(shown) <= 3 * few:
        return f"{words}, the best first.</p>{_table(shown)}"
    best, worst = (dict(list(shown.items())[part]) for part in (slice(few), slice(-few, None)))
    left = f"<p>… {len(shown) - 2 * few} tasks in between …</p>"
    return f"{words}, the best and the worst of {len(shown)}.</p>{_table(best)}{left}{_table(worst)}"


def _compared_tasks(tasks: dict[str, dict[str, float]], most: int = 30) -> str:
    """The mean return of each task, a column per run; empty without tasks. Of many tasks, those that the first run has best."""
    names = list(dict.fromkeys(name for means in tasks.values() for name in means))
    if not names:
        return ""
    shown = {run: {name: number(means.get(name), 4) for name in names[:most]} for run, means in tasks.items()}
    left = f"<p>… {len(names) - most} more.</p>" if len(names) > most else ""
    return f"<h2>Tasks</h2><p>Mean return of the last episodes of each task.</p>{_columns(shown)}{left}"


def _table(values: dict[str, Any]) -> str:
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in values.items())
    return f"<table>{rows}</table>" if rows else "<p>Not known: the run did not reach its end.</p>"


def _columns(runs: dict[str, dict[str, Any]]) -> str:
    """A table with a column per run."""
    head = "".join(f"<th>{_text(name)}</th>" for name in runs)
    keys = next(iter(runs.values()))
    rows = "".join(
        f"<tr><th>{_text(key)}</th>{''.join(f'<td>{_text(values[key])}</td>' for values in runs.values())}</tr>" for key in keys
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))
